"""GLM's families in small, with the tower and the norms that each has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokens import name_tokens

_IMAGE, _START, _END = 262, 259, 260  # the placeholder is the bundled tokenizer's
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_NAMES = {
    "<|begin_of_video|><|video|><|end_of_video|>": "<|vision_start|><|video_pad|><|vision_end|>",
    "<|begin_of_image|>": "<|vision_start|>", "<|end_of_image|>": "<|vision_end|>",
    "<|image|>": "<|image_pad|>", "<|video|>": "<|video_pad|>",
}  # fmt: skip
_PIXELS = {"size": {"shortest_edge": 2048, "longest_edge": 32768}, "patch_size": 8, "merge_size": 2}


def config(family: str, text: dict[str, Any], spread: float) -> dict[str, Any]:
    of_text = {
        "glm4v": "glm4v_text", "glm46v": "glm4v_text", "glm_ocr": "glm_ocr_text",
        "glm4v_moe": "glm4v_moe_text",
    }[family]  # fmt: skip
    found: dict[str, Any] = text | {
        "model_type": of_text,
        "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }
    vision: dict[str, Any] = {
        "model_type": of_text.replace("text", "vision"),
        "depth": 2, "hidden_size": 32, "out_hidden_size": text["hidden_size"], "num_heads": 2,
        "intermediate_size": 48, "image_size": 48, "patch_size": 8, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "initializer_range": spread,
    }  # fmt: skip
    if family == "glm46v":  # another size of the same parts
        found |= {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
        found |= {"intermediate_size": 80, "num_hidden_layers": 2}
        vision |= {"depth": 3, "hidden_size": 48, "num_heads": 3, "out_hidden_size": 48}
        vision |= {"attention_bias": True, "image_size": 32}
    if family == "glm_ocr":
        found |= {"head_dim": 24}
        found["rope_parameters"] = _ROPE | {
            "mrope_section": [3, 5, 4],
            "partial_rotary_factor": 1.0,
        }
    if family == "glm4v_moe":
        found |= {
            "head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
        }  # fmt: skip
    return {
        "text_config": found,
        "vision_config": vision,
        "image_token_id": _IMAGE,
        "video_token_id": 263,
        "image_start_token_id": _START,
        "image_end_token_id": _END,
        "video_start_token_id": 264,
        "video_end_token_id": 265,
        "tie_word_embeddings": False,
    }


def write_companions(directory: Path, family: str) -> dict[str, Any]:
    """Tokens of images and videos, and the settings of videos; gives those of images."""
    name_tokens(directory, "<|image|>", ("<|begin_of_video|>", "<|end_of_video|>"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (directory / name).read_text()
        for theirs, ours in _NAMES.items():
            text = text.replace(ours, theirs)
        (directory / name).write_text(text)
    kind = "Glm46V" if family in ("glm46v", "glm_ocr") else "Glm4v"
    named = {"processor_class": f"{kind}Processor"} | _PIXELS
    video = {"video_processor_type": f"{kind}VideoProcessor"} | named
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return {"image_processor_type": f"{kind}ImageProcessor"} | named
