"""Tokens of a family that writes more into a prompt for an image than its placeholder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}IMAGE{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def plain_template(image: str) -> str:
    """Of chats; `image` is what stands for one."""
    return _TEMPLATE.replace("IMAGE", image)


def name_tokens(directory: Path, image: str, names: Sequence[str]) -> None:
    """The bundled tokenizer that lies here: `image` is its placeholder, and `names` come behind."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (directory / name).read_text().replace("<|image_pad|>", image)
        (directory / name).write_text(text)
    found = json.loads((directory / "tokenizer.json").read_text())
    like = found["added_tokens"][-1]
    for token_id, content in enumerate(names, like["id"] + 1):
        found["added_tokens"].append(like | {"id": token_id, "content": content})
    (directory / "tokenizer.json").write_text(json.dumps(found))
