"""Reasoning told apart from the answer, however the text was cut; flags of chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.asked.reasoning import Place, ReasoningParser, place_of
from epd.api.asked.template_flags import TemplateFlags
from epd.api.http.errors import ApiError
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.chat_template import ChatTemplate
from epd.api.prompts.prepare import Preparer
from epd.cli.configure.settings import gateway_config
from epd.config import Settings
from epd.model_files.checkpoint import ModelError
from epd.tiny import CHECKPOINT
from tests.api.asked.test_tools import CALL, TOOLS, cut
from tests.api.fakes import FakeFrontend, chat_asked, said, serving
from tests.api.test_server import ask, chunks_of, client_of, finish_of, text_of
from tests.api.wire import HI, exchange, request

USER = [{"role": "user", "content": "hi"}]
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
ALWAYS = "{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n<think>\n"


def parse(place: Place, parts: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(place)
    pieces = [*(parser.push(part) for part in parts), parser.finish()]
    return "".join(r for r, _ in pieces), "".join(t for _, t in pieces)


@given(
    st.lists(st.integers(0, 10_000), max_size=20),
    st.sampled_from([
        (Place.AHEAD, "<think>\nhm\n\nso\n</think>\n\nBern", ("hm\n\nso", "Bern")),
        (Place.AHEAD, "\n<think></think>Bern\n", ("", "Bern\n")),
        (Place.AHEAD, " Bern </think>", ("", " Bern </think>")),
        (Place.AHEAD, "<thing>", ("", "<thing>")),
        (Place.AHEAD, "<thi", ("", "<thi")),
        (Place.AHEAD, "<think>cut off </thi", ("cut off </thi", "")),
        (Place.INSIDE, "\nhm <think>\n</think>\n\nBern", ("hm <think>", "Bern")),
        (Place.INSIDE, "cut off\n", ("cut off", "")),
    ]),
)  # fmt: skip
def test_however_the_text_is_cut(
    edges: list[int], case: tuple[Place, str, tuple[str, str]]
) -> None:
    place, text, expected = case
    assert parse(place, cut(text, edges)) == expected


def test_where_an_answer_begins_is_read_from_the_prompt() -> None:
    template = ChatTemplate(QWEN3, {})
    free = template.render(USER)
    off = template.render(USER, flags=TemplateFlags({"enable_thinking": False}))
    always = ChatTemplate(ALWAYS, {}).render(USER)
    places = [place_of("qwen3", text) for text in (free, off, always)]
    assert places == [Place.AHEAD, Place.BEHIND, Place.INSIDE]
    assert {place_of("", text) for text in (free, off, always)} == {Place.BEHIND}
    spelled = template.render([{"role": "user", "content": "<think>"}])
    assert place_of("qwen3", spelled) is Place.AHEAD


# --- flags of the template ------------------------------------------------------------------------


def rendered(source: str, **body: Any) -> str:
    return ChatTemplate(source, {}).render(USER, flags=chat_asked(**body).template_flags)


def test_flags_reach_the_template() -> None:
    kwargs = {"enable_thinking": False}
    assert rendered(QWEN3, chat_template_kwargs=kwargs).endswith("</think>\n\n")
    assert rendered(QWEN3, reasoning_effort="none").endswith("</think>\n\n")
    assert rendered(QWEN3, reasoning_effort="high") == rendered(QWEN3)
    both = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert rendered(QWEN3, **both) == rendered(QWEN3)  # what is said to the template itself wins
    graded = "{{ messages[0].content }} {{ reasoning_effort }}"
    assert rendered(graded, reasoning_effort="low") == "hi low"


def test_what_turns_nothing_off_is_harmless() -> None:
    plain = "{{ messages[0].content }}"
    assert rendered(plain, chat_template_kwargs={"enable_thinking": False}) == "hi"
    assert (
        rendered(plain, reasoning_effort="none") == rendered(plain, reasoning_effort="high") == "hi"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"chat_template_kwargs": {"style": "brief"}}, "chat_template_kwargs.style"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_flags_that_the_template_does_not_read_are_refused(body: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered("{{ messages[0].content }}", **body)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_template_of_the_operator_s(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("own: {{ messages[0].content }}")
    assert ChatRenderer(CHECKPOINT, str(path)).render(USER) == "own: hi"
    with pytest.raises(ModelError, match="cannot be read"):
        ChatRenderer(CHECKPOINT, str(tmp_path / "gone"))


async def test_the_prompt_says_where_its_answer_begins(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(QWEN3)
    settings = Settings(
        model_dir=str(CHECKPOINT), chat_template=str(path), reasoning_parser="qwen3"
    )
    preparer = Preparer(gateway_config(settings, "gateway", ""))
    off = TemplateFlags(effort="none")
    prompts = [await preparer.chat(USER), await preparer.chat(USER, flags=off)]
    await preparer.close()
    assert [prompt.reasoning for prompt in prompts] == [Place.AHEAD, Place.BEHIND]


# --- the answer -----------------------------------------------------------------------------------

PARTS = ("<thi", "nk>\nhm", " so\n", "</thi", "nk>", "\n\nBern")
SCRIPT = [step for part in PARTS for step in (said(part), 0.02)] + [said("", "stop")]


async def test_a_whole_answer() -> None:
    async with client_of(SCRIPT, SCRIPT) as (client, _, preparer):
        plain = (await ask(client)).choices[0].message
        preparer.reasoning = Place.AHEAD
        message = (await ask(client)).choices[0].message
    assert plain.content == "".join(PARTS)
    assert (message.content, message.reasoning, message.reasoning_content) == (
        "Bern", "hm so", "hm so"
    )  # fmt: skip


async def test_a_streamed_answer_and_its_raw_chunks() -> None:
    frontend = FakeFrontend(SCRIPT)
    async with serving(frontend) as (server, _, preparer):
        preparer.reasoning = Place.AHEAD
        _, _, sent = await exchange(server, request({**HI, "stream": True}))
    lines = [line.removeprefix("data: ") for line in sent.decode().split("\n\n") if line]
    _, *deltas, last = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert last == {}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm so"
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == "Bern"
    assert all(deltas)  # none for the marks


async def test_calls_after_reasoning() -> None:
    parts = ("<think>which?</think>\n\n", f"<tool_call>\n{CALL}\n</tool_call>")
    script = [said(parts[0]), 0.02, said(parts[1], "stop")]
    async with client_of(script) as (client, _, preparer):
        preparer.reasoning = Place.AHEAD
        chunks = await chunks_of(client, tools=TOOLS)
    assert finish_of(chunks) == ["tool_calls"] and text_of(chunks) == ""
    thought = [getattr(c.choices[0].delta, "reasoning", None) for c in chunks]
    assert [text for text in thought if text] == ["which?"]


async def test_a_constrained_answer_is_the_answer() -> None:
    """The grammar holds from its first token: no reasoning can be in it."""
    async with client_of([said('{"a": 1}', "stop")]) as (client, _, preparer):
        preparer.reasoning = Place.INSIDE
        answer = await ask(client, response_format={"type": "json_object"})
    assert answer.choices[0].message.content == '{"a": 1}'
