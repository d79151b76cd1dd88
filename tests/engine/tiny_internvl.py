"""InternVL in small: with the tower and the language model of InternVL3, and with those of the
largest InternVL3.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokens import name_tokens

_VIDEO = "InternVLVideoProcessor"
# InternVL3's.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """Of InternVL3: a Qwen2 whose rope would be stretched beyond its context."""
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": [32, 32], "patch_size": [8, 8],
        "attention_bias": True, "initializer_range": spread,
    }  # fmt: skip
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return {
        "text_config": text | {"model_type": "qwen2", "rope_parameters": rope},
        "vision_config": vision,
        "image_token_id": image,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    }


def config_moe(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """Of InternVL3.5-241B-A28B: experts, and the tower of 6B, whose keys and queries are normed."""
    found = config(image, text, spread)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    found["text_config"] = text | experts | {
        "model_type": "qwen3_moe", "head_dim": 16, "hidden_size": 48, "norm_topk_prob": True,
        "num_hidden_layers": 2,
    }  # fmt: skip
    found["vision_config"] |= {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
        "image_size": [48, 48], "norm_type": "rms_norm", "attention_bias": False,
        "use_qk_norm": True,
    }  # fmt: skip
    return found | {"image_seq_length": 9}


def write_companions(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Template, tokens and settings of prompts; gives those of images."""
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    _name_tokens(directory)
    rows = settings["image_seq_length"]
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_length": rows}))
    side = settings["vision_config"]["image_size"][0]
    video = {"size": {"height": side, "width": side}, "video_processor_type": _VIDEO}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return {
        "image_processor_type": "GotOcr2ImageProcessorFast", "crop_to_patches": False,
        "size": {"height": side, "width": side}, "min_patches": 1, "max_patches": 6,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip


def _name_tokens(directory: Path) -> None:
    """The bundled tokenizer, with the tokens of InternVL."""
    name_tokens(directory, "<IMG_CONTEXT>", ("<img>", "</img>", "<video>"))
    path = directory / "tokenizer_config.json"
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>"}
    named = {f"{name}_token": token for name, token in names.items()}
    named["video_token"] = "<video>"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": named}))
