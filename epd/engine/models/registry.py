"""From a checkpoint's `model_type` to the adapter of its family."""

from __future__ import annotations

from epd.engine.checkpoint import Checkpoint
from epd.engine.model_directory import check_config
from epd.engine.models.base import ModelAdapter
from epd.engine.models.kimi import KimiK25
from epd.engine.models.llava_onevision import LlavaOnevision
from epd.engine.models.qwen3_5 import Qwen3_5, Qwen3_5Moe
from epd.engine.models.qwen_vl import Qwen2_5VL, Qwen2VL, Qwen3VL, Qwen3VLMoe
from epd.engine.models.text import Llama, Qwen3

ADAPTERS: dict[str, type[ModelAdapter]] = {
    adapter.model_type: adapter
    for adapter in (
        *(Qwen2VL, Qwen2_5VL, Qwen3VL, Qwen3VLMoe, Qwen3_5, Qwen3_5Moe),
        *(LlavaOnevision, KimiK25, Qwen3, Llama),
    )
}


def adapter_for(checkpoint: Checkpoint, attention: str = "sdpa") -> ModelAdapter:
    """The adapter of a checkpoint.  Raises ModelError, before transformers sees config.json."""
    check_config(checkpoint)
    return ADAPTERS[checkpoint.model_type](checkpoint, attention)
