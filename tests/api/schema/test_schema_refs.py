"""References inside tools lead to where they stand, and marks inside arguments are part of them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from epd.api.asked.calls.parser import CallParser
from epd.api.asked.grammar import checked_grammar
from epd.api.schema.references import moved
from epd.model_files.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.api.asked.test_tools import NAMES, TEXT, cut, drawn, parse, tool
from tests.api.fakes import chat_asked

MARKED = st.dictionaries(
    st.sampled_from(["a", "</tool_call>", "x}"]),
    st.sampled_from(["</tool_call>", '"}}</tool_call>', "<tool_call>{", "\\", "}]", '\\"', 1, None])
    | st.lists(st.sampled_from(["[", "{", {"b": "</tool_call>"}]), max_size=3),
    max_size=4,
)


@given(st.lists(MARKED, min_size=1, max_size=3), st.lists(st.integers(0, 10_000), max_size=30))
def test_marks_in_arguments_are_part_of_them(called: list[Any], edges: list[int]) -> None:
    """Fault F72, with other keys behind the arguments, too, however the text is cut."""
    bodies = [json.dumps({"name": "now", "arguments": one, "id": 3}) for one in called]
    bodies += [json.dumps({"arguments": one, "name": "now"}) for one in called]
    text = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    said, calls = parse(cut(f"look {text}", edges))
    assert said == "look "
    assert [json.loads(c["function"]["arguments"]) for c in calls] == called * 2


@given(st.integers(0, 10_000))
def test_a_forced_call_that_is_cut_short_says_nothing_else(edge: int) -> None:
    text = TEXT.removeprefix("Let me look.")
    parser = CallParser(NAMES, is_forced=True)
    said, _ = parser.push(text[: edge % len(text)])
    assert said + parser.finish() == ""


DEFINED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#/properties/a"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"A": {"enum": [7]}},
}
LIST = {
    "type": "object",
    "properties": {"rest": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["rest"],
    "additionalProperties": False,
}


def test_references_are_to_the_parameters_that_they_stand_in() -> None:
    """Nested types of pydantic, two tools that name theirs alike, and a list of itself."""
    grammars, called = Grammars(CHECKPOINT, 272), set()
    other = {**DEFINED, "$defs": {"A": {"enum": ["x"]}}}
    tools = [tool("f", DEFINED), tool("g", other), tool("h", LIST)]
    use = chat_asked(tools=tools, tool_choice="required", parallel_tool_calls=False).tool_use
    assert use is not None
    grammar = checked_grammar(use, grammars.fault)
    for seed in range(12):
        said = drawn(grammars, grammar, seed)
        call = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        name, arguments = call["name"], call["arguments"]
        called.add(name)
        while name == "h" and arguments is not None:
            assert set(arguments) == {"rest"}
            arguments = arguments["rest"]
        right = {"f": {"a": 7, "b": 7}, "g": {"a": "x", "b": "x"}, "h": None}
        assert arguments == right[name]
    assert called == {"f", "g", "h"}


def test_what_is_no_reference_stays() -> None:
    schema = {
        "properties": {"const": {"$ref": "#/$defs/x"}, "$ref": {"const": {"$ref": "#/x"}}},
        "enum": [{"$ref": "#"}],
        "items": [{"$ref": "other.json#/a"}],
    }
    assert moved(schema, "#/there") == {
        **schema,
        "properties": {"const": {"$ref": "#/there/$defs/x"}, "$ref": {"const": {"$ref": "#/x"}}},
    }
