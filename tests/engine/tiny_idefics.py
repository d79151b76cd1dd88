"""Idefics3 and SmolVLM in small: tiles whose names stand in the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.tiny_tokens import name_tokens

# SmolVLM's, but for its end of a turn.
_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# Behind those of the bundled tokenizer; the names of other tiles are text to it.
_TILE_TOKENS = (
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>"),
)


def config(image: int, text: dict[str, Any], spread: float) -> dict[str, Any]:
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "initializer_range": spread,
    }  # fmt: skip
    return {
        "text_config": text | {"model_type": "llama"},
        "vision_config": vision,
        "image_token_id": image,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    }


def write_companions(directory: Path) -> dict[str, Any]:
    """Template, tokens and settings of prompts; gives those of images."""
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    name_tokens(directory, "<image>", _TILE_TOKENS)
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    return {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
    }  # fmt: skip
