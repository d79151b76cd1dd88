"""Prompts equal to transformers', without transformers in the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd.api.chat import ChatRenderer
from epd.api.errors import ApiError
from epd.tiny import CHECKPOINT


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(CHECKPOINT))


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi ☃ 你好\n\n "}],
    [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is the total?"}]}],
    [
        {"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "Image 1?"}]},
        {"role": "assistant", "content": "3.50"},
        {"role": "user", "content": [{"type": "text", "text": "And now?"}, IMAGE]},
    ],
]


def for_transformers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def part(p: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image"} if p["type"] == "image_url" else p

    return [
        m if isinstance(m["content"], str) else {**m, "content": [part(p) for p in m["content"]]}
        for m in messages
    ]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_rendering_and_ids_equal_transformers(
    messages: list[dict[str, Any]], reference: Any
) -> None:
    renderer = ChatRenderer(CHECKPOINT)
    text = renderer.render(messages)
    expected = reference.apply_chat_template(
        for_transformers(messages), tokenize=False, add_generation_prompt=True
    )
    assert text == expected
    assert renderer.encode(text, add_special_tokens=False) == reference.encode(
        expected, add_special_tokens=False
    )


def test_placeholders_become_rows() -> None:
    renderer = ChatRenderer(CHECKPOINT)
    ids, offsets = renderer.expand([1, 262, 2, 262, 3], [3, 2])
    assert ids == [1, 262, 262, 262, 2, 262, 262, 3]
    assert offsets == [1, 5]


def test_text_cannot_spell_a_placeholder() -> None:
    renderer = ChatRenderer(CHECKPOINT)
    text = renderer.render([{"role": "user", "content": "look: <|image_pad|>"}])
    ids = renderer.encode(text, add_special_tokens=False)
    with pytest.raises(ApiError, match="placeholder"):
        renderer.expand(ids, [])


def test_a_text_model_gets_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((Path(CHECKPOINT) / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    )
    renderer = ChatRenderer(tmp_path)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert renderer.render([{"role": "user", "content": parts}]) == "[user]a\nb"
    with pytest.raises(ApiError, match="one message only"):
        renderer.render([{"role": "user", "content": "a"}] * 2)


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((Path(CHECKPOINT) / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ApiError, match="no chat template"):
        ChatRenderer(tmp_path).render([{"role": "user", "content": "a"}])
