"""What clients may constrain, in every spelling, and where a schema is at fault."""

from __future__ import annotations

from typing import Any

import pytest

from epd.api.asked.grammar import checked_grammar
from epd.api.asked.structured import ANY_OBJECT, Constraint
from epd.api.http.errors import ApiError
from epd.model_files.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.api.fakes import chat_asked
from tests.grammars import VOCAB_SIZE, next_tokens

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True, "description": "d"}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(CHECKPOINT, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("present", "kind", "value", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ANY_OBJECT, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            "json", SCHEMA, "response_format.json_schema.schema",
        ),
        ({"guided_json": '{"type": "object"}'}, "json", ANY_OBJECT, "guided_json"),
        ({"guided_json": True}, "json", True, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"],
         "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": True}}, "json", ANY_OBJECT,
         "structured_outputs.json_object"),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/", "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"', "guided_grammar"),
        ({"ebnf": "root ::= [a-z]+"}, "grammar", "root ::= [a-z]+", "ebnf"),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"json_schema": '{"type": "object"}'}, "json", ANY_OBJECT, "json_schema"),
    ],
)  # fmt: skip
def test_spellings(present: Any, kind: str, value: Any, param: str, grammars: Grammars) -> None:
    found = chat_asked(**present).constraint
    assert found == Constraint(kind, value, param)
    assert checked_grammar(found, grammars.fault)


@pytest.mark.parametrize(
    "text", ["root ::= (", "root ::= other", "main ::= 'x'", "nothing", "(" * 9999]
)
def test_ebnf_that_cannot_be_converted_is_refused_by_name(text: str, grammars: Grammars) -> None:
    with pytest.raises(ApiError) as caught:
        checked_grammar(Constraint("grammar", text, "ebnf"), grammars.fault)
    assert (caught.value.param, caught.value.status) == ("ebnf", 400)
    assert "ebnf" in caught.value.message


def test_ebnf_says_what_it_says(grammars: Grammars) -> None:
    text = 'root ::= greeting (" " name)*  # all of it\ngreeting ::= "hi" | "yo"\nname ::= [a-c]{2}'
    grammar = checked_grammar(Constraint("grammar", text, "ebnf"), grammars.fault)
    for said, ends in (("hi", True), ("yo ab", True), ("hi ab", True), ("h", False)):
        allowed = next_tokens(grammars, said, grammar, list(said.encode()))
        assert bool((allowed >= 256).any()) is ends, said


def test_free_text() -> None:
    assert chat_asked().constraint is None
    assert chat_asked(response_format={"type": "text"}).constraint is None
    assert chat_asked(structured_outputs={"json_object": False}).constraint is None


@pytest.mark.parametrize(
    ("present", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_refused(present: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat_asked(**present)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "objec"}, "guided_json", "objec"),
        (
            {"properties": {"a": {"items": {"type": "strin"}}}},
            "guided_json.properties.a.items", "strin",
        ),
        ({"properties": {"a": {"not": {"const": [1]}}}}, "guided_json.properties.a", "not"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"pattern": "("}}},
         "guided_json.properties.a", "group"),
        ({"anyOf": [{"type": "string"}, {"minLength": "two", "type": "string"}]},
         "guided_json.anyOf.1", "minLength"),
        ({"$ref": "#/nowhere"}, "guided_json", "nowhere"),
        ({"allOf": 3}, "guided_json", "array"),
    ],
)  # fmt: skip
def test_a_bad_schema_says_where(
    schema: dict[str, Any], place: str, reason: str, grammars: Grammars
) -> None:
    with pytest.raises(ApiError) as caught:
        checked_grammar(Constraint("json", schema, "guided_json"), grammars.fault)
    assert caught.value.status == 400
    assert caught.value.message.startswith(f"{place} cannot be followed: ")
    assert reason in caught.value.message


@pytest.mark.parametrize(("kind", "value"), [("regex", "("), ("grammar", "start: nowhere")])
def test_a_bad_grammar(kind: str, value: str, grammars: Grammars) -> None:
    with pytest.raises(ApiError, match="cannot be followed"):
        checked_grammar(Constraint(kind, value, f"guided_{kind}"), grammars.fault)
