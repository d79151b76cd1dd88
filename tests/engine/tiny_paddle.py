"""PaddleOCR-VL in small, and in another size with biases and a head that is the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PIXELS = {"size": {"shortest_edge": 1024, "longest_edge": 16384}, "patch_size": 8, "merge_size": 2}


def config(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 48,
        "num_attention_heads": 2, "patch_size": 8, "spatial_merge_size": 2,
        "initializer_range": spread,
    }  # fmt: skip
    return {
        "text_config": text
        | {"head_dim": 16, "rope_parameters": rope, "tie_word_embeddings": False},
        "vision_config": vision,
        "image_token_id": image,
        "video_token_id": image + 1,
        "vision_start_token_id": 259,
        "vision_end_token_id": 260,
        "tie_word_embeddings": False,
    }


def config_biased(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    found = config(image, text, spread)
    found["text_config"] |= {
        "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "use_bias": True,
        "num_hidden_layers": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    found["vision_config"] |= {
        "hidden_size": 48, "num_attention_heads": 3, "num_hidden_layers": 3, "image_size": 32,
    }  # fmt: skip
    return found | {"tie_word_embeddings": True}


def write_companions(directory: Path) -> dict[str, Any]:
    """The name of the placeholder, which the processor of prompts asks for; gives the settings of
    images."""
    path = directory / "tokenizer_config.json"
    said = json.loads(path.read_text()) | {"image_token": "<|image_pad|>"}
    path.write_text(json.dumps(said))
    return {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "processor_class": "PaddleOCRVLProcessor",
    } | _PIXELS
