"""Calls in each family's form: however the text is cut, whatever marks stand in arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.asked.calls.parser import CallParser
from epd.api.asked.calls.registry import FORMS, REASONING, form_named, form_of
from epd.api.asked.calls.tagged import typed
from epd.api.asked.grammar import checked_grammar
from epd.api.asked.reasoning import Place, ReasoningParser, place_of
from epd.api.asked.tools import whole_calls
from epd.api.openai.validation import read_chat
from epd.config import Limits, Settings
from epd.model_files.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.api.asked.test_tools import TOOLS, WEATHER, cut, drawn
from tests.api.fakes import FakePreparer, said
from tests.api.test_server import chunks_of, client_of, finish_of, text_of

FUNCTIONS: dict[str, Any] = {
    "weather": WEATHER,
    "now": None,
    "put": {"properties": {"text": {"type": "string"}, "n": {"type": ["integer", "null"]}}},
}


def glm(name: str, arguments: dict[str, Any], line: str = "\n") -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>{line}<arg_value>{_as_text(v)}</arg_value>{line}"
        for k, v in arguments.items()
    )
    return f"<tool_call>{name}{line}{pairs}</tool_call>"


def qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(f"<parameter={k}>\n{_as_text(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    call = f"functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}"
    return f"<|tool_call_begin|>{call}<|tool_call_end|>"


GEMMA4 = '<|tool_call> <tool_call|> <|"|>'


def gemma(name: str, arguments: dict[str, Any], marks: str = GEMMA4) -> str:
    begin, end, quote = marks.split()

    def told(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{told(v)}' for k, v in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(told, value))}]"
        return json.dumps(value)

    return f"{begin}call:{name}{told(arguments)}{end}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


WRITERS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "functiongemma": lambda n, a: gemma(n, a, "<start_function_call> <end_function_call> <escape>"),
    "gemma4": gemma,
    "glm45": glm,
    "hermes": lambda n, a: f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>",
    "kimi_k2": kimi,
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}",
    "qwen3_coder": qwen3_coder,
}
CALLED = '{"name": "now", "arguments": {}, "id": "abc123def"}'
HERMES = f"<tool_call>{CALLED}</tool_call>"
# What may stand in a text of an argument: of each form but what ends such a text there.
MARKS = (
    *("<tool_call>", "</tool_call>", "<|tool_call>", "<tool_call|>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_call_begin|>", "<|tool_call_end|>", "</think>", "<function=now>", "</function>"),
    *("<parameter=n>", "<arg_key>", "</arg_key>", "</arg_value>", "</parameter>", "}", "{", '"'),
    *("\\", "\n", ", ", ":", "<", "ü", "\U0001f600", "call:now{}", "null", "<escape", '<|"|'),
)
# And what ends it, as no text of a form with tags can have it.
END = re.compile(r"</(arg_value|parameter)>\s*(<arg_key>|<parameter=|</tool_call>|</function>)")
TEXTS = (
    st.lists(st.sampled_from(MARKS), min_size=1, max_size=5)
    .map(lambda some: f"a{''.join(some)}b")
    .filter(lambda text: not END.search(text))
)


def parse(form: str, parts: Iterable[str], limit: int = 0) -> tuple[str, list[tuple[str, Any]]]:
    parser, shown, pieces = CallParser(FUNCTIONS, limit, form=form_named(form)), "", []
    for part in parts:
        text, found = parser.push(part)
        shown += text
        pieces += found
    calls = [call["function"] for call in whole_calls(pieces)]
    return shown + parser.finish(), [(c["name"], json.loads(c["arguments"])) for c in calls]


def all_cuts(text: str) -> Iterable[list[str]]:
    """Once at each place, and at all of them."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)


@pytest.mark.parametrize("form", FORMS)
def test_calls_at_every_cut(form: str) -> None:
    calls = [
        ("weather", {"city": "Bern}\n</tool_call>", "days": 2}),
        ("now", {}),
        (
            "put",
            {"text": 'x = {"a": [1, "<tool_call|>"]}', "n": None, "o": {"p": [True, "é"]}},
        ),
    ]
    text = "Let me look." + "\n".join(WRITERS[form](*call) for call in calls)
    for parts in all_cuts(text):
        assert parse(form, parts) == ("Let me look.", calls), parts


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_marks_in_arguments_are_part_of_them(form: str, data: st.DataObject) -> None:
    """But what ends a text in the form itself."""
    value = data.draw(st.dictionaries(st.sampled_from(["text", "more"]), TEXTS, min_size=1))
    calls = [("put", value), ("now", {})]
    written = "\n".join(WRITERS[form](*call) for call in calls)
    edges = data.draw(st.lists(st.integers(0, 10_000), max_size=30))
    assert parse(form, cut(f"so {written}", edges)) == ("so ", calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("glm45", "<tool_call>later\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("glm45", "<tool_call>now and then"),
        ("qwen3_coder", "<tool_call>\n<function=later>\n</function>\n</tool_call>!"),
        ("qwen3_coder", "<tool_call>\nno function\n</tool_call>!"),
        ("kimi_k2", "<|tool_call_begin|>later:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS]later[ARGS]{}"),
        ("mistral", '[TOOL_CALLS][{"name": "later", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS now"),
        ("gemma4", "<|tool_call>call:later{}<tool_call|>."),
        ("gemma4", "<|tool_call>now{}<tool_call|>."),
        ("functiongemma", "<start_function_call>call:now"),
    ],
)
def test_what_is_no_call_stays_text(form: str, text: str) -> None:
    for parts in all_cuts(f"so {text}"):
        assert parse(form, parts) == (f"so {text}", []), parts


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("glm45", glm("put", {"text": "5", "n": 5}, ""), [("put", {"text": "5", "n": 5})]),
        ("qwen3_coder", qwen3_coder("put", {"text": "a\n"}).replace(">\n", ">"),
         [("put", {"text": "a\n"})]),
        ("qwen3_coder", qwen3_coder("put", {"n": "None"}), [("put", {"n": None})]),
        ("kimi_k2", f"<|tool_calls_section_begin|>{kimi('now', {})}<|tool_calls_section_end|>",
         [("now", {})]),
        ("mistral", f'[TOOL_CALLS] [{CALLED}, {{"arguments": {{"text": "]"}}, "name": "put"}}]',
         [("now", {}), ("put", {"text": "]"})]),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{"a": 1}', [("now", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]now{"a": 1}', [("now", {"a": 1})]),
        ("gemma4", '<|tool_call>call:put{ text: two words , n: 03,"k": "x\\""}<tool_call|>',
         [("put", {"text": "two words", "n": "03", "k": 'x"'})]),
        ("hermes", f"<tool_call>{CALLED[:32]}<{HERMES}{HERMES}", [("now", {})] * 2),
        *((form, f"{form_named(form).open}{CALLED}{form_named(form).close}", [("now", {})])
          for form in FORMS),
    ],
)  # fmt: skip
def test_other_writings_of_a_form(form: str, text: str, calls: Any) -> None:
    for parts in all_cuts(text):
        assert parse(form, parts) == ("", calls), parts


@pytest.mark.parametrize("form", FORMS)
def test_only_one_call_where_one_is_asked_for(form: str) -> None:
    text = WRITERS[form]("now", {}) * 2
    for parts in all_cuts(text):
        assert parse(form, parts, limit=1) == ("", [("now", {})])


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_rubbish_is_the_same_however_it_is_cut(form: str, data: st.DataObject) -> None:
    """And no piece is lost or comes twice: what is whole JSON is so at any cut."""
    own = form_named(form)
    call = WRITERS[form]("put", {"text": "a", "n": [1]})
    pieces = st.sampled_from([own.open, own.close, *MARKS])
    begun = st.integers(0, len(call)).map(lambda at: call[:at])
    text = "".join(data.draw(st.lists(pieces | begun, max_size=12)))
    edges = data.draw(st.lists(st.integers(0, 10_000), max_size=20))

    def told(parts: list[str]) -> Any:
        parser, shown, found = CallParser(FUNCTIONS, form=own), "", []
        for part in parts:
            text, some = parser.push(part)
            shown += text
            found += some
        return shown + parser.finish(), [c["function"] for c in whole_calls(found)]

    assert told(cut(text, edges)) == told([text])


def test_ids_are_those_that_templates_take() -> None:
    """Kimi's template shows a call by its id alone; Mistral's takes 9 letters and digits."""
    ids = {}
    for form in FORMS:
        parser = CallParser(FUNCTIONS, form=form_named(form))
        ids[form] = parser.push(WRITERS[form]("now", {}))[1][0].call_id
    assert ids.pop("kimi_k2") == "functions.now:0"
    assert len(own := ids.pop("mistral")) == 9 and own.isalnum()
    assert all(own.startswith("call_") for own in ids.values())


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"), ({"type": "integer"}, "5", 5), (None, "5", 5),
        ({"type": "integer"}, "five", "five"), ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"), ({"enum": ["1", "2"]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "5", 5), (None, "NaN", "NaN"),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"type": "boolean"}, "True", True), ({"type": "string"}, "True", "True"), (7, "[1", "[1"),
        (None, "9" * 400, int("9" * 400)), (None, "[1e999]", "[1e999]"), ({"type": [{}]}, "1", 1),
    ],
)  # fmt: skip
def test_a_text_is_what_its_schema_takes(schema: Any, text: str, value: Any) -> None:
    assert (typed(schema, text), type(typed(schema, text))) == (value, type(value))


@pytest.mark.parametrize("form", FORMS)
def test_an_enforced_call_is_json_between_the_marks_of_its_family(form: str) -> None:
    preparer = FakePreparer()
    preparer.call_form = form
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    use = read_chat({**body, "tool_choice": "required"}, preparer, Limits()).tool_use
    assert use is not None and use.form == form
    state = Grammars(CHECKPOINT, 272)
    grammar = checked_grammar(use, state.fault)
    for seed in range(8):
        text = drawn(state, grammar, seed)
        assert text.startswith(form_named(form).open)
        shown, calls = parse(form, list(text))
        assert shown == "" and calls and {name for name, _ in calls} <= {"weather", "now"}


@pytest.mark.parametrize("form", FORMS)
def test_a_template_is_of_the_form_that_it_writes(form: str) -> None:
    source = f"{{{{ tools }}}}{{{{ messages[0].content }}}}{WRITERS[form]('f', {'k': 1})}"
    source = source if form in ("functiongemma", "gemma4") else source.replace("{", "{", 1)
    assert form_of(source) == form
    assert form_of("{{ tools }}") == ""


def test_each_family_s_reasoning_is_a_value_of_the_setting() -> None:
    hint = get_type_hints(Settings, include_extras=True)["reasoning_parser"]
    assert set(get_args(get_args(hint)[0])) == {"", *REASONING}


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_at_every_cut(name: str) -> None:
    marks = REASONING[name]
    assert place_of(name, f"user: hi\n{marks.open}\n") is Place.INSIDE
    assert place_of(name, f"user: hi\n{marks.open}\n\n{marks.close}\n\n") is Place.BEHIND
    for parts in all_cuts(f"{marks.open}\nhm <b>\n\nso\n{marks.close}\n\nBern {marks.close}"):
        parser = ReasoningParser(place_of(name, "user: hi\n"), marks)
        told = [*map(parser.push, parts), parser.finish()]
        assert "".join(r for r, _ in told) == "hm <b>\n\nso"
        assert "".join(t for _, t in told) == f"Bern {marks.close}"


def test_marks_around_an_answer_are_no_text() -> None:
    """Behind reasoning, at its beginning and its end."""
    marks = REASONING["glm41v"]
    for text, expected in (
        ("<think>so</think>\n<answer>\nB </answer> </ans\n</answer>\n", "B </answer> </ans"),
        ("<think>so</think><answer>B</answer> or C", "B</answer> or C"),
        ("<think>so</think><answer>B</ans", "B</ans"),
        ("<think>so</think>B</answer>", "B</answer>"),
        ("<think>so</think><ans", "<ans"),
    ):
        for parts in all_cuts(text):
            parser = ReasoningParser(Place.AHEAD, marks)
            told = [*map(parser.push, parts), parser.finish()]
            assert "".join(t for _, t in told) == expected, parts


async def test_a_streamed_answer_in_another_form() -> None:
    call = kimi("weather", {"city": "Bern", "days": 2})
    parts = ("Let me look.<|tool_calls_sec", f"tion_begin|>{call[:75]}", call[75:])
    script = [step for part in parts for step in (said(part), 0.02)] + [said("", "stop")]
    async with client_of(script) as (client, _, preparer):
        preparer.call_form = "kimi_k2"
        chunks = await chunks_of(client, tools=TOOLS)
    assert text_of(chunks) == "Let me look." and finish_of(chunks) == ["tool_calls"]
    pieces = [p for c in chunks for choice in c.choices for p in choice.delta.tool_calls or []]
    assert pieces[0].id == "functions.weather:0" and len(pieces) > 1
    arguments = "".join(piece.function.arguments for piece in pieces)
    assert json.loads(arguments) == {"city": "Bern", "days": 2}
