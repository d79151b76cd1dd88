"""Gemma 4 in small: an E model, whose last layers read others' keys and values, and a mixture whose
wide layers have keys for values and which sees pictures both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokens import name_tokens

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'video' %}<|video|>"
    "{% else %}<|image|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WINDOW, _FULL = "sliding_attention", "full_attention"


def config(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """Of an E model."""
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4,
        "position_embedding_size": 96, "use_clipped_linears": True, "initializer_range": spread,
    }  # fmt: skip
    own = {
        "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32,
        "layer_types": [_WINDOW, _WINDOW, _FULL, _WINDOW, _FULL, _WINDOW, _FULL],
        "num_kv_shared_layers": 3, "sliding_window": 24, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": text["vocab_size"], "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0, "pad_token_id": 0,
    }  # fmt: skip
    return {
        "text_config": text | own,
        "vision_config": vision,
        "audio_config": None,
        "image_token_id": image,
        "video_token_id": 263,
        "audio_token_id": 266,
    }


def config_moe(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    """Of 26B-A4B."""
    found = config(image, text, spread)
    found["text_config"] |= {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "layer_types": [_WINDOW, _FULL] * 2,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
        "use_bidirectional_attention": "vision",
    }  # fmt: skip
    found["vision_config"] |= {"use_clipped_linears": False, "standardize": True}
    return found


def write_companions(directory: Path) -> dict[str, Any]:
    """Template, tokens and settings of videos; gives those of images."""
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    named = {"boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>"}
    name_tokens(directory, "<|image|>", tuple(named.values()))
    tokens, file = directory / "tokenizer.json", directory / "tokenizer_config.json"
    tokens.write_text(tokens.read_text().replace("<|video_pad|>", "<|video|>"))
    said = json.loads(file.read_text()) | {"image_token": "<|image|>"} | named
    file.write_text(json.dumps(said))
    common = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    video = common | {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 4}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return common | {"image_processor_type": "Gemma4ImageProcessor"}
