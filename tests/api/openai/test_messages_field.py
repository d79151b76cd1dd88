"""Messages of a chat request: roles, parts, what has no effect in them, faults with their path."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.openai.test_validation import chat, refusal


def test_roles_and_parts():
    image = {"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}}
    asked = chat(
        messages=[
            {"role": "system", "content": "s"},
            {"role": "developer", "content": [{"type": "text", "text": "d"}]},
            {"role": "user", "content": [image, {"type": "text", "text": "u"}]},
            {"role": "assistant", "content": "a", "refusal": None, "tool_calls": []},
        ]
    )
    assert asked.messages == [
        {"role": "system", "content": "s"},
        {"role": "system", "content": [{"type": "text", "text": "d"}]},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:x"}},
                {"type": "text", "text": "u"},
            ],
        },
        {"role": "assistant", "content": "a"},
    ]


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original", None])
def test_an_image_s_detail_is_a_hint(detail: str | None):
    asked = chat(messages=parts(image(url="x", detail=detail)))
    assert asked.messages == chat(messages=parts(image(url="x"))).messages


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_an_image_in_any_message_but_an_answer_and_as_a_plain_url(role: str):
    plain = {"type": "image_url", "image_url": "data:x"}
    found = chat(messages=parts(plain, role=role)).messages
    assert found == chat(messages=parts(image(url="data:x"), role=role)).messages


def parts(*values: Any, role: str = "user") -> list[Any]:
    return [{"role": "system", "content": "s"}, {"role": role, "content": list(values)}]


def image(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": fields}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ([3], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "x", "reasoning": "y"}], "messages[0].reasoning"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
        ),
        (parts("x"), "messages[1].content[0]"),
        (parts({"text": "x"}), "messages[1].content[0].type"),
        (parts({"type": "input_audio"}), "messages[1].content[0].type"),
        (parts({"type": "text"}), "messages[1].content[0].text"),
        (parts({"type": "text", "text": "x", "cache": 1}), "messages[1].content[0].cache"),
        (parts({"type": "image_url", "image_url": 3}), "messages[1].content[0].image_url"),
        (parts(image()), "messages[1].content[0].image_url.url"),
        (parts(image(url="x", detail="some")), "messages[1].content[0].image_url.detail"),
        (parts(image(url="x", size=3)), "messages[1].content[0].image_url.size"),
        (parts(image(url="x"), role="assistant"), "messages[1].content[0]"),
    ],
)
def test_faults_of_messages_are_named_with_their_path(messages: Any, param: str):
    error = refusal(chat, messages=messages)
    assert error.param == param
    assert param in error.message


def test_names_and_hints_in_messages_and_tools_have_no_effect():
    hints = {"id": "x", "cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": "u", "uuid": "7", **hints}
    shown = {**image(url="data:x"), "uuid": "8", **hints}
    plain = [{"type": "text", "text": "u"}, image(url="data:x")]
    tool = {"type": "function", "function": {"name": "now"}}
    sent = {"role": "user", "content": [part, shown], "type": "message", **hints}
    asked = chat(messages=[sent], tools=[{**tool, "cache_control": {"type": "ephemeral"}}])
    expected = chat(messages=[{"role": "user", "content": plain}], tools=[tool])
    assert asked.messages == expected.messages
    assert [t["function"] for t in asked.tools] == [t["function"] for t in expected.tools]
    stream = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert chat(**stream) == chat(stream=True)
    bad = [{"role": "user", "content": "x", "cache_control": "yes"}]
    assert refusal(chat, messages=bad).param == "messages[0].cache_control"


def test_names_and_reasoning_are_there_for_the_template():
    asked = chat(messages=[
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "content": "y", "reasoning_content": "hm"},
        {"role": "assistant", "content": "z", "reasoning": "so"},
    ])  # fmt: skip
    assert asked.messages is not None
    assert [m.get("name") for m in asked.messages] == ["Ann", None, None]
    assert [m.get("reasoning_content") for m in asked.messages] == [None, "hm", "so"]


INNER = {
    "a lone surrogate": '{"a": "\\ud83d"}',
    "in a key": '{"\\udc00": 1}',
    "no number": '{"a": NaN}',
    "infinity": '{"a": -Infinity}',
    "out of range": '{"a": 1e999}',
    "cut": '{"a": ',
    "deep": '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
}


@pytest.mark.parametrize("text", INNER.values(), ids=INNER)
def test_json_inside_json_is_read_as_strictly(text: str):
    """Fault F73: what the outer reader would refuse was a 500 when the template met it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    error = refusal(chat, messages=[{"role": "assistant", "tool_calls": [call]}])
    assert (error.param, error.code) == (
        "messages[0].tool_calls[0].function.arguments",
        "invalid_json",
    )
    error = refusal(chat, guided_json=text)
    assert (error.param, error.code) == ("guided_json", "invalid_json")
