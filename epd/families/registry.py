"""From a checkpoint's `model_type` to the adapter of its family, whose folder is imported then.

A family is one folder: its adapter, and what only its models have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd.later import later
from epd.model_files.checkpoint import Checkpoint
from epd.model_files.model_directory import check_config

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter

ADAPTERS = {
    "qwen2_vl": "epd.families.qwen_vl.adapter:Qwen2VL",
    "qwen2_5_vl": "epd.families.qwen_vl.adapter:Qwen2_5VL",
    "qwen3_vl": "epd.families.qwen_vl.adapter:Qwen3VL",
    "qwen3_vl_moe": "epd.families.qwen_vl.adapter:Qwen3VLMoe",
    "qwen3_5": "epd.families.qwen3_5.adapter:Qwen3_5",
    "qwen3_5_moe": "epd.families.qwen3_5.adapter:Qwen3_5Moe",
    "llava_onevision": "epd.families.llava_onevision.adapter:LlavaOnevision",
    "idefics3": "epd.families.idefics3.adapter:Idefics3",
    "smolvlm": "epd.families.idefics3.adapter:SmolVLM",
    "kimi_k25": "epd.families.kimi.adapter:KimiK25",
    "qwen3": "epd.families.text.adapter:Qwen3",
    "llama": "epd.families.text.adapter:Llama",
}


def adapter_for(checkpoint: Checkpoint, attention: str = "sdpa") -> ModelAdapter:
    """The adapter of a checkpoint.  Raises ModelError, before transformers sees config.json."""
    check_config(checkpoint)
    adapter: ModelAdapter = later(ADAPTERS[checkpoint.model_type])(checkpoint, attention)
    return adapter
