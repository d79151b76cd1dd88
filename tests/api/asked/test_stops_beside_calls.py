"""Stop strings end an answer by its content alone, whatever stands in arguments of its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from epd.api.answers.choice import Choice, Delta
from epd.api.asked.reasoning import Place, ReasoningParser
from epd.api.asked.tools import CallPiece, ToolUse, whole_calls
from tests.api.answers.test_text import first_stop
from tests.api.asked.test_tools import TOOLS, cut
from tests.api.fakes import FakeStream, Letters, said
from tests.api.test_server import ask, chunks_of, client_of, finish_of, text_of

PIECES = (
    "<tool_call>",
    "</tool_call>",
    "}",
    "{",
    '"',
    "\\",
    "\n",
    "ab",
    "<",
    "name",
    "now",
    "]",
    ", ",
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
STOPS = st.lists(st.sampled_from((*PIECES, "}}", '"}', "ab\n", "a", "ok", "k")), max_size=3)
EDGES = st.lists(st.integers(0, 10_000), max_size=30)
CALLS = st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS, max_size=2), max_size=2).map(
    lambda arguments: (
        f"<tool_call>\n{json.dumps({'name': 'now', 'arguments': arguments})}\n</tool_call>"
    )
)
WORDS = st.sampled_from(["ok", "\n", " ab\n\n", "<tool_call>no</tool_call>", "<tool_call>", "a<b"])
ANSWERS = st.lists(CALLS | WORDS, max_size=4).map("".join)


def take(parts: Sequence[str], stop: Sequence[str], parallel: bool = True) -> list[Delta]:
    """One delta for each part, the last one with the end of the text."""
    use = ToolUse(tuple(TOOLS), parallel=parallel)
    stream: Any = FakeStream("r")
    choice = Choice(0, stream, Letters(), tuple(stop), tool_use=use)
    updates = [*map(said, parts), said("", "stop")]
    return [choice.take([update]) for update in updates if not choice.finish_reason]


def told(deltas: Sequence[Delta]) -> tuple[str, list[Any], str, int]:
    calls = whole_calls([piece for delta in deltas for piece in delta.calls])
    return (
        "".join(delta.text for delta in deltas),
        [call["function"] for call in calls],
        deltas[-1].finish_reason,
        sum(len(delta.token_ids) for delta in deltas),
    )


def expected(answer: str, stop: Sequence[str]) -> tuple[str, list[Any], str, int]:
    """Token by token: each text between calls is looked through by itself."""
    text, segment, pieces, num_tokens = "", "", list[CallPiece](), 0
    for delta in take(list(answer), ()):
        num_tokens += len(delta.token_ids)
        segment += delta.text
        pieces += delta.calls
        at = first_stop(segment, list(stop))
        if at is not None or delta.finish_reason:
            calls = [call["function"] for call in whole_calls(pieces)]
            return text + segment[:at], calls, "tool_calls" if calls else "stop", num_tokens
        if any(piece.name for piece in delta.calls):
            text, segment = text + segment, ""
    raise AssertionError("no end")


@settings(max_examples=40)
@given(ANSWERS, STOPS, EDGES)
def test_however_tokens_are_bundled(answer: str, stop: list[str], edges: list[int]) -> None:
    assert told(take(cut(answer, edges), stop)) == expected(answer, stop)


@settings(max_examples=30)
@given(st.lists(CALLS, min_size=1, max_size=3), STOPS, EDGES)
def test_what_stands_in_a_call_changes_nothing(
    calls: list[str], stop: list[str], edges: list[int]
) -> None:
    answer = "\n".join(calls)
    text, found, finish, count = told(take(cut(answer, edges), stop))
    arguments = [json.loads(call.split("\n")[1])["arguments"] for call in calls]
    assert (text, finish, count) == ("", "tool_calls", len(answer))
    assert [json.loads(call["arguments"]) for call in found] == arguments


@settings(max_examples=20)
@given(CALLS, EDGES)
def test_one_call_is_counted_to_its_end(call: str, edges: list[int]) -> None:
    """Where one is asked for: what was bundled behind it is no part of the answer."""
    deltas = take(cut(call + "\nand more", edges), (), parallel=False)
    text, calls, finish, count = told(deltas)
    assert (text, len(calls), finish, count) == ("", 1, "tool_calls", len(call))


def test_reasoning_is_not_looked_through() -> None:
    stream: Any = FakeStream("r")
    choice = Choice(0, stream, Letters(), ("\n\n",), reasoning=ReasoningParser(Place.AHEAD))
    delta = choice.take([said("<think>a\n\nb</think>\n\nc d\n\nmore", "stop")])
    assert (delta.reasoning, delta.text, delta.finish_reason) == ("a\n\nb", "c d", "stop")


async def test_whole_and_streamed_alike() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {"a": "}STOP"}}\n</tool_call>'
    script = [said("Well."), 0.01, said(call[:50]), 0.01, said(call[50:]), said("", "stop")]
    async with client_of(script, script) as (client, frontend, _):
        answer = await ask(client, tools=TOOLS, stop=["STOP", "}"])
        chunks = await chunks_of(client, tools=TOOLS, stop=["STOP", "}"])
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Well.", "tool_calls")
    assert (text_of(chunks), finish_of(chunks)) == ("Well.", ["tool_calls"])
    arguments = choice.message.tool_calls[0].function.arguments
    pieces = [p for c in chunks for one in c.choices for p in one.delta.tool_calls or []]
    assert "".join(p.function.arguments for p in pieces) == arguments == '{"a": "}STOP"}'
    assert [stream.reasons for stream in frontend.streams] == [[], []]


def test_no_stop_string_spans_a_call() -> None:
    """What is held back for one is told ahead of the call."""
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    before, after, end = take(["xa" + call, "b"], ["ab"])
    assert (before.text, len(before.calls), after.text, end.text) == ("xa", 1, "b", "")
    assert end.finish_reason == "tool_calls"
