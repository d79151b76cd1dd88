"""DeepSeek-OCR 2 in small, and in another size whose SAM sees everything in one layer.

Its class has 144 or 256 queries for a view, so views are of 48 or 64 patches along a side.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokens import name_tokens, plain_template

_PATCH = 4


def config(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    experts = {
        "n_routed_experts": 4, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1,
        "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4, "topk_group": 1, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    sam = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 192,
        "patch_size": _PATCH, "window_size": 14, "global_attn_indexes": [], "output_channels": 16,
        "downsample_channels": [24, 32], "initializer_range": spread,
    }  # fmt: skip
    reader = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": spread,
    }  # fmt: skip
    return {
        "text_config": text | experts,
        "vision_config": {"sam_config": sam, "encoder_config": reader},
        "image_token_id": image,
        "tie_word_embeddings": False,
    }


def config_wide(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """A larger view of the whole, one layer of experts, biases."""
    found = config(image, text, spread)
    found["text_config"] |= {
        "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3,
        "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2, "attention_bias": True,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    found["vision_config"]["sam_config"] |= {
        "image_size": 256, "num_hidden_layers": 3, "global_attn_indexes": [1], "mlp_dim": 48,
        "downsample_channels": [16, 48],
    }  # fmt: skip
    found["vision_config"]["encoder_config"] |= {"hidden_size": 48, "num_attention_heads": 3}
    return found


def write_companions(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Template, tokens and settings of prompts; gives those of images."""
    (directory / "chat_template.jinja").write_text(plain_template("<image>\n"))
    name_tokens(directory, "<image>", ())
    (directory / "processor_config.json").write_text(json.dumps({"patch_size": _PATCH}))
    side = settings["vision_config"]["sam_config"]["image_size"]
    return {
        "image_processor_type": "DeepseekOcr2ImageProcessor",
        "processor_class": "DeepseekOcr2Processor",
        "size": {"height": side, "width": side},
        "tile_size": 192,
    }
