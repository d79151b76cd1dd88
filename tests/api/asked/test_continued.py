"""The last message goes on: prompts as in transformers, and answers that hold only what is new."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.api.anthropic.request import read_message
from epd.api.asked.reasoning import Place, ReasoningParser, place_of
from epd.api.asked.template_flags import TemplateFlags
from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat, read_completion
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.prepare import Preparer
from epd.config import GatewayConfig, Limits
from epd.tiny import CHECKPOINT
from tests.api.asked.test_tools import HERMES, TOOLS
from tests.api.fakes import FakeFrontend, FakePreparer, said
from tests.api.prompts.test_chat import (
    PARTS_ONLY,
    STRINGS_ONLY,
    for_transformers,
    model_dir,
    reference,
)
from tests.api.test_tokenizing import ask, tiny
from tests.api.wire import exchange, request

GO_ON = TemplateFlags(is_answered=False, is_continued=True)
USER = {"role": "user", "content": "The total?"}
BEGUN = [USER, {"role": "assistant", "content": "The total is"}]
DROPS = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
PLACED = "{% for m in messages %}{{ m.role }}: {{ m.content | replace('a', 'b') }}\n{% endfor %}"
TEMPLATES = {"parts": PARTS_ONLY, "strings": STRINGS_ONLY, "calls": HERMES, "drops": DROPS,
             "replaces": PLACED, "bundled": ""}  # fmt: skip
TEXT = st.text(st.sampled_from("ab <\n\t☃{}") | st.characters(codec="utf-8"), max_size=12)


@cache
def pair(name: str) -> tuple[ChatRenderer, Any]:
    """Ours and transformers'."""
    directory = CHECKPOINT
    if source := TEMPLATES[name]:
        directory = model_dir(Path(tempfile.mkdtemp(prefix="continued-")), source)
    return ChatRenderer(directory), reference(directory)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(TEMPLATES)),
    TEXT | st.lists(TEXT, min_size=1, max_size=3),
    st.booleans(),
)
def test_the_prompt_is_that_of_transformers(name: str, said: Any, has_tail: bool) -> None:
    ours, theirs = pair(name)
    if isinstance(said, list):
        said = [{"type": "text", "text": text} for text in said]
    elif has_tail:
        said += "and <|im_end|> so on  "
    messages = [USER, {"role": "assistant", "content": said}]
    takes_strings = name != "parts"
    expected = for_transformers(messages, parts=not takes_strings)
    if name == "bundled":  # takes either
        expected = messages
    try:
        rendered = theirs.apply_chat_template(
            expected, tokenize=False, continue_final_message=True, add_generation_prompt=False
        )
    except ValueError:
        with pytest.raises(ApiError, match="continue_final_message cannot be kept") as caught:
            ours.render(messages, (), GO_ON)
        assert caught.value.param == "continue_final_message"
        return
    assert ours.render(messages, (), GO_ON) == rendered
    assert ours.encode(rendered, add_special_tokens=False) == theirs.apply_chat_template(
        expected, continue_final_message=True, add_generation_prompt=False, return_dict=False
    )


async def test_whole_streamed_counted_and_tokenized_alike() -> None:
    """Also under Anthropic's name, and with no new answer asked for."""
    frontend = FakeFrontend([said(" 3.50", "stop")])
    go_on: dict[str, Any] = {"messages": BEGUN, "continue_final_message": True}
    async with tiny(frontend) as server:
        told = await ask(server, "/tokenize", **go_on, add_generation_prompt=False)
        text = (await ask(server, "/detokenize", tokens=told["tokens"]))["prompt"]
        answers = [
            await exchange(server, request({**go_on, "max_tokens": 9, **more}, path=path))
            for path, more in (
                ("/v1/chat/completions", {}),
                ("/v1/chat/completions", {"stream": True, "add_generation_prompt": False}),
                ("/v1/chat/completions", {"guided_regex": " [0-9.]+"}),
            )
        ]
        prefilled = {"messages": BEGUN, "max_tokens": 9}
        answers.append(await exchange(server, request(prefilled, path="/v1/messages")))
        counted = await ask(server, "/v1/messages/count_tokens", messages=BEGUN)
        bare = await ask(server, "/tokenize", messages=BEGUN, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nThe total is")
    assert [list(g.token_ids) for g in frontend.generations] == [told["tokens"]] * 4
    assert [bool(g.sampling.grammar) for g in frontend.generations] == [False, False, True, False]
    assert counted["input_tokens"] == told["count"] == bare["count"] - len("\n") - 1
    for (status, _, body), words in zip(
        answers, ('"content":" 3.50"', '"content":" 3.50"', '"content":" 3.50"', '"text":" 3.50"'),
        strict=True,
    ):  # fmt: skip
        assert status == 200 and words in body.decode(), body


CALL = [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("last", "more", "param"),
    [
        (USER, {}, "continue_final_message"),
        ({"role": "system", "content": "x"}, {}, "continue_final_message"),
        ({"role": "assistant", "tool_calls": CALL}, {}, "continue_final_message"),
        ({"role": "assistant", "content": "a", "tool_calls": CALL}, {}, "continue_final_message"),
        ({"role": "assistant", "content": 'a <tool_call>\n{"na'}, {"tools": TOOLS},
         "continue_final_message"),
        (BEGUN[1], {"add_generation_prompt": True}, "continue_final_message"),
        (BEGUN[1], {"add_generation_prompt": 1}, "add_generation_prompt"),
        (BEGUN[1], {"chat_template_kwargs": {"continue_final_message": True}},
         "chat_template_kwargs.continue_final_message"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_is_refused(last: Any, more: dict[str, Any], param: str) -> None:
    body = {"messages": [USER, last], "continue_final_message": True, **more}
    with pytest.raises(ApiError) as caught:
        read_chat(body, FakePreparer(), Limits())
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_begun_call_is_text_where_no_calls_are_found() -> None:
    begun = {"role": "assistant", "content": '<tool_call>\n{"na'}
    body = {"messages": [USER, begun], "continue_final_message": True}
    assert read_chat(body, FakePreparer(), Limits()).template_flags == GO_ON
    done = {"role": "assistant", "content": "<tool_call>{}</tool_call>\n"}
    read_chat({**body, "messages": [USER, done], "tools": TOOLS}, FakePreparer(), Limits())


def test_a_refusal_names_the_message_of_anthropic_s() -> None:
    call = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
    messages = [USER, {"role": "assistant", "content": [call]}]
    with pytest.raises(ApiError) as caught:
        read_message({"messages": messages, "max_tokens": 5}, FakePreparer(), Limits())
    assert caught.value.param == "messages[1]"
    assert caught.value.message.startswith("messages[1] cannot be kept: the last message has tool")


def test_a_plain_completion_has_neither() -> None:
    for name in ("continue_final_message", "add_generation_prompt"):
        with pytest.raises(ApiError) as caught:
            read_completion({"prompt": "x", name: True}, FakePreparer(), Limits())
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("begun", "place"),
    [
        ("", Place.AHEAD),
        ("The total", Place.BEHIND),
        ("<think>Hm", Place.WITHIN),
        ("<think>", Place.INSIDE),
        ("<think>Hm</think>The", Place.BEHIND),
        ("<think>Hm</think>", Place.BEHIND),
    ],
)
def test_where_reasoning_goes_on(begun: str, place: Place) -> None:
    assert place_of("qwen3", f"assistant\n{begun}", begun) is place


async def test_reasoning_that_goes_on_loses_no_line_break() -> None:
    config = GatewayConfig(model_dir=str(CHECKPOINT), reasoning_parser="qwen3")
    preparer = Preparer(config)
    begun = [USER, {"role": "assistant", "content": "<think>Hm"}]
    prompt = await preparer.chat(begun, flags=GO_ON)  # type: ignore[arg-type]
    await preparer.close()
    assert prompt.reasoning is Place.WITHIN
    assert ReasoningParser(prompt.reasoning).push("\nso</think>\n3.50") == ("\nso", "3.50")
