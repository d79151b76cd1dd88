"""Tool calls: offered, forced by a grammar, found in text however it was cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.asked.calls.parser import CallParser
from epd.api.asked.grammar import checked_grammar
from epd.api.asked.tools import whole_calls
from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat
from epd.api.prompts.chat import ChatRenderer
from epd.api.prompts.chat_template import ChatTemplate
from epd.config import Limits
from epd.frontend import Leave
from epd.model_files.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakeFrontend, FakePreparer, chat_asked, conversation, said, serving
from tests.api.test_server import ask, chunks_of, client_of, finish_of, text_of
from tests.api.wire import HI, exchange, request
from tests.grammars import next_tokens

HERMES = (
    "{% if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Answer <tool_call>{...}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}\n{% endfor %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", WEATHER), tool("now")]
CALL = '{"name": "weather", "arguments": {"city": "Bern}", "days": 2}}'
TEXT = f"Let me look.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
NAMES = {"weather": WEATHER, "now": None}


def cut(text: str, edges: list[int]) -> list[str]:
    places = [0, *sorted(edge % (len(text) + 1) for edge in edges), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def parse(parts: list[str], limit: int = 0) -> tuple[str, list[dict[str, Any]]]:
    parser, shown, pieces = CallParser(NAMES, limit), "", []
    for part in parts:
        text, found = parser.push(part)
        shown += text
        pieces += found
    return shown + parser.finish(), whole_calls(pieces)


# --- finding calls --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10_000), max_size=40))
def test_however_the_text_is_cut(edges: list[int]) -> None:
    text, calls = parse(cut(TEXT, edges))
    assert text == "Let me look."
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [
        {"city": "Bern}", "days": 2}
    ] * 2
    assert len({call["id"] for call in calls}) == 2


@given(st.lists(st.integers(0, 10_000), max_size=20), st.sampled_from([
    "no call", "a < b, <tool", "<tool_call>not json</tool_call>", '<tool_call>{"name": "',
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>!',
    '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', "x</tool_call>",
]))  # fmt: skip
def test_what_is_no_call_stays_text(edges: list[int], text: str) -> None:
    assert parse(cut(text, edges)) == (text, [])


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_keys_in_another_order(edges: list[int]) -> None:
    text, calls = parse(cut('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', edges))
    assert (text, len(calls)) == ("", 1)
    assert calls[0]["function"] == {"name": "now", "arguments": '{"a": 1}'}


def test_only_one_call_where_one_is_asked_for() -> None:
    text, calls = parse([TEXT + "and more"], limit=1)
    assert (text, len(calls)) == ("Let me look.", 1)


def test_arguments_arrive_as_they_grow() -> None:
    parser = CallParser(NAMES)
    seen = [
        parser.push(part)[1] for part in ('<tool_call>{"name": "now", "arguments": {"a": "b', "c")
    ]
    assert [[piece.arguments for piece in pieces] for pieces in seen] == [['{"a": "b'], ["c"]]


# --- forced calls ---------------------------------------------------------------------------------


def drawn(grammars: Grammars, grammar: str, seed: int) -> str:
    """What a model that draws at random says under a grammar; it ends as soon as it may."""
    draw = np.random.default_rng(seed)
    token_ids: list[int] = []
    while True:
        allowed = next_tokens(grammars, str(seed), grammar, token_ids)
        ends = allowed[allowed >= 256]
        token = int(ends[0] if len(ends) else draw.choice(allowed))
        if token >= 256:
            return bytes(token_ids).decode()
        token_ids.append(token)


@pytest.mark.parametrize(
    ("choice", "parallel", "most"),
    [("required", True, 99), ("required", False, 1),
     ({"type": "function", "function": {"name": "weather"}}, True, 1)],
)  # fmt: skip
def test_a_forced_answer_is_calls(choice: Any, parallel: bool, most: int) -> None:
    """Whatever the model draws: every answer that the grammar admits parses."""
    present = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    use = chat_asked(**present).tool_use
    assert use is not None
    grammars = Grammars(CHECKPOINT, 272)
    grammar = checked_grammar(use, grammars.fault)
    seen = set()
    for seed in range(30):
        text, calls = parse([drawn(grammars, grammar, seed)])
        assert text == ""
        assert 1 <= len(calls) <= most
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            seen.add(call["function"]["name"])
            is_weather = call["function"]["name"] == "weather"
            assert list(arguments) == (["city", "days"] if is_weather else [])
    assert seen == ({"weather", "now"} if choice == "required" else {"weather"})


RECEIPT = {"type": "object", "properties": {"total": {"enum": [1, 2]}}, "required": ["total"],
           "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    ("constraint", "ends_as"),
    [
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "r", "schema": RECEIPT}}},
         {'{"total": 1}', '{"total": 2}'}),
        ({"structured_outputs": {"choice": ["y/n", 'a "b"']}}, {"y/n", 'a "b"'}),
        ({"structured_outputs": {"regex": "[a-b]/2"}}, {"a/2", "b/2"}),
    ],
)  # fmt: skip
def test_an_answer_is_calls_or_what_is_asked_for(constraint: Any, ends_as: set[str]) -> None:
    """Tools that may be called, beside a format: every answer is one or the other."""
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **constraint}
    asked = read_chat(body, FakePreparer(), Limits())
    use = asked.grammar_source
    assert use is asked.tool_use and use is not None
    grammars = Grammars(CHECKPOINT, 272)
    grammar = checked_grammar(use, grammars.fault)
    texts, names = set(), set()
    for seed in range(40):
        text, calls = parse([drawn(grammars, grammar, seed)])
        assert bool(text) != bool(calls)
        texts |= {text} - {""}
        names |= {call["function"]["name"] for call in calls}
    assert texts == ends_as and names == {"weather", "now"}


def test_a_whole_grammar_cannot_stand_beside_tools() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "ebnf": 'root ::= "a"'}
    use = read_chat(body, FakePreparer(), Limits()).grammar_source
    assert use is not None
    with pytest.raises(ApiError) as caught:
        checked_grammar(use, Grammars(CHECKPOINT, 272).fault)
    assert caught.value.param == "ebnf"


@pytest.mark.parametrize(("mode", "forced"), [("auto", ()), ("required", ("now",))])
def test_allowed_tools(mode: str, forced: tuple[str, ...]) -> None:
    """The others are neither shown nor called."""
    chosen = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": chosen}}
    use = chat_asked(tools=TOOLS, tool_choice=choice).tool_use
    assert use is not None
    assert [tool["function"]["name"] for tool in use.tools] == ["now"]
    assert use.forced == forced
    for broken, param in (
        ({"mode": "some", "tools": chosen}, "tool_choice.allowed_tools.mode"),
        ({"mode": mode, "tools": []}, "tool_choice.allowed_tools.tools"),
        ({"mode": mode, "tools": [{"function": {"name": "x"}}]},
         "tool_choice.allowed_tools.tools[0].function.name"),
    ):  # fmt: skip
        choice = {"type": "allowed_tools", "allowed_tools": broken}
        with pytest.raises(ApiError) as caught:
            chat_asked(tools=TOOLS, tool_choice=choice)
        assert caught.value.param == param


def test_a_bad_schema_is_told_with_its_tool() -> None:
    use = chat_asked(tools=[tool("a", {"type": "strin"})], tool_choice="required").tool_use
    assert use is not None
    with pytest.raises(ApiError) as caught:
        checked_grammar(use, Grammars(CHECKPOINT, 272).fault)
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("present", "param"),
    [
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool("a", [])]}, "tools[0].function.parameters"),
        ({"tools": [tool("a")] * 200}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_refused(present: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_asked(**present)
    assert caught.value.param == param


def test_none_is_no_tools() -> None:
    assert chat_asked(tools=TOOLS, tool_choice="none").tool_use is None
    assert chat_asked().tool_use is None


# --- the prompt -----------------------------------------------------------------------------------


def test_tools_and_calls_reach_the_template() -> None:
    function = {"name": "now", "arguments": '{"a": "ü"}'}
    messages = conversation([
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ])  # fmt: skip
    text = ChatTemplate(HERMES, {}).render(messages, [tool("now")])
    assert text.startswith('Tools: {"type": "function", "function": {"name": "now"')
    assert '<tool_call>\n{"name": "now", "arguments": {"a": "ü"}}\n</tool_call>' in text
    assert "tool: noon" in text


def test_the_bundled_template_shows_tools_as_transformers_renders_it() -> None:
    """And without tools it says what the model was trained on."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(CHECKPOINT))
    ours = ChatRenderer(CHECKPOINT)
    user = {"role": "user", "content": "when?"}
    function = {"name": "now", "arguments": {"a": "ü"}}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}] * 2},
        {"role": "tool", "content": "noon"},
    ]
    for messages, tools in (([user], None), ([user], [tool("now")]), ([user, *called], TOOLS)):
        rendered = ours.render(messages, tools or ())
        assert rendered == theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert ("<tools>" in rendered) == bool(tools)
        assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert ours.render([user]) == "<|im_start|>user\nwhen?<|im_end|>\n<|im_start|>assistant\n"
    call = '<tool_call>\n{"name": "now", "arguments": {"a": "ü"}}\n</tool_call>'
    assert f"assistant\n{call}\n{call}<|im_end|>\n<|im_start|>user\n<tool_resp" in rendered


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", "{{ tools }}{{ messages[0] }}"])
def test_a_template_without_calls_refuses_tools(source: str) -> None:
    template = ChatTemplate(source, {})
    template.render([{"role": "user", "content": "x"}])
    with pytest.raises(ApiError, match="this model takes no tools") as caught:
        template.render([{"role": "user", "content": "x"}], [tool("now")])
    assert caught.value.param == "tools"


# --- the answer, as the official client sees it ---------------------------------------------------

PARTS = ("Let me look.<tool", f"_call>\n{CALL[:40]}", f"{CALL[40:]}\n</tool_call>")
SCRIPT = [step for part in PARTS for step in (said(part), 0.05)] + [said("", "stop")]


async def test_a_whole_answer() -> None:
    async with client_of(SCRIPT) as (client, _, preparer):
        answer = await ask(client, tools=TOOLS)
    assert [t["function"]["name"] for t in preparer.tools] == ["weather", "now"]
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Bern}", "days": 2}


async def test_a_streamed_answer() -> None:
    async with client_of(SCRIPT) as (client, _, _):
        chunks = await chunks_of(client, tools=TOOLS)
    assert text_of(chunks) == "Let me look."
    assert finish_of(chunks) == ["tool_calls"]
    pieces = [p for c in chunks for choice in c.choices for p in choice.delta.tool_calls or []]
    assert len(pieces) > 1  # as they grow
    assert (pieces[0].index, pieces[0].function.name) == (0, "weather")
    assert pieces[0].id.startswith("call_")
    arguments = "".join(piece.function.arguments for piece in pieces)
    assert json.loads(arguments) == {"city": "Bern}", "days": 2}


async def test_raw_chunks_of_calls() -> None:
    """One entry per call in a delta, no empty text beside calls, no delta for the marks alone:
    clients before openai 3 read the first entry only, and take a text for the end of the calls."""
    one = f"<tool_call>{CALL}</tool_call>\n"
    parts = ["<tool_", "call>", "\n", one[11:15], one[15:60], one[60:], one, "\n"]
    script = [step for part in parts for step in (said(part), 0.02)] + [said("", "stop")]
    body = {**HI, "stream": True, "tools": TOOLS}
    async with serving(FakeFrontend(script)) as (server, _, _):
        status, _, sent = await exchange(server, request(body))
    assert status == 200
    lines = [line.removeprefix("data: ") for line in sent.decode().split("\n\n") if line]
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    first, *middle, last = [choice["delta"] for choice in choices]
    assert first == {"role": "assistant", "content": ""}
    assert last == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert middle and all(list(delta) == ["tool_calls"] for delta in middle)
    for delta in middle:
        indices = [entry["index"] for entry in delta["tool_calls"]]
        assert sorted(set(indices)) == indices
    named = [e for delta in middle for e in delta["tool_calls"] if "id" in e]
    assert [entry["index"] for entry in named] == [0, 1]


async def test_a_second_call_is_not_waited_for() -> None:
    one = f"<tool_call>{CALL}</tool_call>"
    script = [said(one), 0.2, said(one), said("", "stop")]
    async with client_of(script) as (client, frontend, _):
        answer = await ask(client, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert frontend.streams[0].reasons == [(Leave.ENOUGH, "one tool call was asked for")]


async def test_without_tools_a_call_is_text() -> None:
    async with client_of(SCRIPT) as (client, _, _):
        answer = await ask(client)
    assert answer.choices[0].message.content.endswith("</tool_call>")
    assert answer.choices[0].message.tool_calls is None
