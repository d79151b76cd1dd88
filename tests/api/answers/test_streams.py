"""Streams of Responses and Messages say what the whole answer says, however it was cut on its way
and however its pieces came together."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epd.api.answers.answer import AnswerFacts
from epd.api.answers.choices import make_choices
from epd.api.answers.parts import PartsAnswer
from epd.api.anthropic.answer import MessageAnswer
from epd.api.anthropic.request import read_message
from epd.api.asked.reasoning import Place
from epd.api.prompts.prepare import Prompt
from epd.api.responses.answer import ResponseAnswer
from epd.api.responses.request import read_response
from epd.config import Limits
from epd.frontend import GenerationUpdate
from tests.api.fakes import EOS, FakePreparer, FakeStream, said

CALL = '<tool_call>{"name": "see", "arguments": {"a": "é}<"}}</tool_call>'
END = chr(EOS)
SHORT = '<think>h</think>A<<tool_call>{"name": "see", "arguments": {}}</tool_call>\n é.'
TEXT = f"<think>hm</think>See: {CALL}\n{CALL} Done."
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
MESSAGE: Any = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 190,
    "tools": [{"name": "see", "input_schema": PARAMETERS}],
}
RESPONSE: Any = {
    "input": "hi",
    "tools": [{"type": "function", "name": "see", "parameters": PARAMETERS}],
}
SCORED: Any = RESPONSE | {"include": ["message.output_text.logprobs"]}
Updates = list[list[GenerationUpdate]]  # what comes in one turn


def choice_of(body: Any, read: Callable[..., Any], kind: type[PartsAnswer]) -> tuple[Any, Any]:
    """Of a model that thinks, where there are tools."""
    model: Any = FakePreparer()
    stream: Any = FakeStream("r")
    asked = read(body, model, Limits())
    place = Place.AHEAD if "tools" in body else Place.BEHIND
    prompt = Prompt(tuple(b"hi"), (), "", reasoning=place)
    (choice,) = make_choices([stream], asked, [prompt], model, tells_reasoning=True)
    return choice, kind(AnswerFacts("r", "tiny", 1, 2, model.token_text), asked)


def events_of(body: Any, read: Any, kind: Any, updates: Updates) -> list[dict[str, Any]]:
    choice, answer = choice_of(body, read, kind)
    sent = answer.opening(choice)
    for together in updates:
        sent += answer.events(choice, choice.take(together))
    sent += answer.end([choice])
    return [json.loads(line[6:]) for line in sent.decode().split("\n") if line[:6] == "data: "]


def whole_of(body: Any, read: Any, kind: Any, updates: Updates) -> dict[str, Any]:
    choice, answer = choice_of(body, read, kind)
    delta = choice.take(update for together in updates for update in together)
    return dict(json.loads(answer.whole([(choice, delta)])))


def without_ids(value: Any) -> Any:
    """The same, with each id in the order in which it is met."""
    names: dict[str, str] = {}

    def named(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"call {len(names)}")

    told = re.sub(r"(call|toolu)_[0-9a-f]{8,}", named, json.dumps(value, sort_keys=True))
    return json.loads(re.sub(r'"completed_at": \d+', '"completed_at": 0', told))


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """As a client puts it together."""
    first, ping, *events, last, stop = events
    assert [e["type"] for e in (ping, last, stop)] == ["ping", "message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    grown: list[str] = []
    is_open = False
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
            grown.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            grown[-1] += delta.get("text") or delta.get("thinking") or delta["partial_json"]
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    for block, text in zip(blocks, grown, strict=True):
        kind = block["type"]
        block["input" if kind == "tool_use" else kind] = (
            json.loads(text) if kind == "tool_use" else text
        )
    assert len({b["id"] for b in blocks if "id" in b}) == 2
    return first["message"] | {"content": blocks} | last["delta"] | {"usage": last["usage"]}


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """As a client puts it together, of items that were added, have grown and are done."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    logprobs: list[Any] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["id"] not in texts
            items.append(event["item"])
            texts[event["item"]["id"]] = ""
        elif kind == "output_item.done":
            assert items[-1]["id"] == event["item"]["id"]
            assert event["item"].get("call_id") == items[-1].get("call_id")
            items[-1] = event["item"]
        else:
            assert (event["output_index"], event["item_id"]) == (len(items) - 1, items[-1]["id"])
            if kind.endswith(".delta"):
                texts[event["item_id"]] += event["delta"]
                logprobs += event.get("logprobs", ())
            elif kind.endswith(("text.done", "arguments.done")):
                assert event.get("text", event.get("arguments")) == texts[event["item_id"]]
    for item in items:
        shown = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert texts[item["id"]] == shown
    told = [entry for i in items if i["type"] == "message" for entry in i["content"][0]["logprobs"]]
    assert logprobs == told
    for item in items if told else ():  # a token of this model is a character
        if item["type"] == "message":
            (content,) = item["content"]
            assert "".join(entry["token"] for entry in content["logprobs"]) == content["text"]
    calls = [item["call_id"] for item in items if "call_id" in item]
    assert calls and len(set(calls)) == len(calls)
    assert events[-1]["response"]["output"] == items
    return dict(events[-1]["response"])


def cuts(text: str, *, logprobs: bool) -> Iterator[Updates]:
    """Two pieces, cut anywhere, and the end; each alone, or with those that came meanwhile."""
    for at in range(len(text) + 1):
        parts = [said(piece, logprobs=logprobs) for piece in (text[:at], text[at:]) if piece]
        parts.append(said(END, "stop", logprobs=logprobs))
        for edges in itertools.product((False, True), repeat=len(parts) - 1):
            bundles = [[parts[0]]]
            for part, begins in zip(parts[1:], edges, strict=True):
                bundles.append([part]) if begins else bundles[-1].append(part)
            yield bundles
    yield [[said(letter, logprobs=logprobs)] for letter in text] + [
        [said(END, "stop", logprobs=logprobs)]
    ]


@pytest.mark.parametrize(
    ("body", "read", "kind", "put_together", "text"),
    [
        pytest.param(MESSAGE, read_message, MessageAnswer, message_of, TEXT, id="messages"),
        pytest.param(RESPONSE, read_response, ResponseAnswer, response_of, TEXT, id="responses"),
        pytest.param(SCORED, read_response, ResponseAnswer, response_of, SHORT, id="scored"),
    ],
)
def test_however_it_is_cut_and_bundled_a_stream_is_the_whole_answer(
    body: Any, read: Any, kind: Any, put_together: Callable[..., Any], text: str
) -> None:
    logprobs = "include" in body
    whole = without_ids(whole_of(body, read, kind, [[said(text + END, "stop", logprobs=logprobs)]]))
    for updates in cuts(text, logprobs=logprobs):
        events = events_of(body, read, kind, updates)
        assert without_ids(put_together(events)) == whole, updates
        assert without_ids(whole_of(body, read, kind, updates)) == whole, updates
