"""From a checkpoint's `model_type` to the adapter of its family."""

from __future__ import annotations

from epd.engine.adapter import ModelAdapter
from epd.families.kimi.adapter import KimiK25
from epd.families.llava_onevision.adapter import LlavaOnevision
from epd.families.qwen3_5.adapter import Qwen3_5, Qwen3_5Moe
from epd.families.qwen_vl.adapter import Qwen2_5VL, Qwen2VL, Qwen3VL, Qwen3VLMoe
from epd.families.text.adapter import Llama, Qwen3
from epd.model_files.checkpoint import Checkpoint
from epd.model_files.model_directory import check_config

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
