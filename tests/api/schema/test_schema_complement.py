"""What llguidance does not know is said by what it knows, and is neither more nor less."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest

from epd.api.http.errors import ApiError
from epd.api.schema.rewrite import NotExact, exact
from tests.answers import GRAMMARS, drawn, grammar_of, matcher_of, takes
from tests.hostile.contrary import contrary, value
from tests.hostile.forked import outcomes


def outcome(seed: int) -> str:
    """Answers are valid; by the letter, valid values are answers, but for the order of members."""
    asked, closes = contrary(seed), seed % 2 == 0
    try:
        validator = jsonschema_rs.validator_for(json.dumps(asked))
    except (ValueError, jsonschema_rs.ReferencingError):
        return "not for the validator"
    try:
        grammar = grammar_of(asked, closes=closes)
    except ApiError:
        return "refused"
    if GRAMMARS.proof(grammar):
        return "refused"
    matcher = GRAMMARS._matcher(grammar)
    for n in range(4):
        answer = drawn(matcher.deep_copy(), random.Random(n))
        if answer is not None and not validator.is_valid(json.loads(answer)):
            return f"wrong: {seed}: {answer!r}"
    found = "right"
    for n in range(40):
        one = value(random.Random(n))
        is_taken, is_valid = takes(matcher.deep_copy(), json.dumps(one)), validator.is_valid(one)
        if is_taken > is_valid:
            return f"wrong: {seed}: {one!r}"
        if is_valid > is_taken and not closes and not (isinstance(one, dict) and len(one) > 1):
            found = "narrow"
    return found


def ask(first: int, count: int) -> Counter[str]:
    found = outcomes(outcome, range(first, first + count))
    assert not [text for text in found if text.startswith("wrong")], found
    return found


ANSIBLE = "^(?!(True|is)$)[A-Za-z]+$"
TAG = {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]}
AB = {"type": "object", "properties": {"a": {}, "b": {}}}


@pytest.mark.parametrize(
    ("asked", "values"),
    [
        ({**AB, "additionalProperties": False, "maxProperties": 1, "minProperties": 1}, "members"),
        ({**AB, "additionalProperties": False, "maxProperties": 2}, "members"),
        ({**AB, "required": ["a"], "minProperties": 1}, "members"),
        ({**AB, "not": {"required": ["a", "b"]}}, "members"),
        ({**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "members"),
        ({**AB, "dependentRequired": {"a": ["b"]}}, "members"),
        ({**AB, "dependencies": {"b": {"required": ["a"]}}}, "members"),
        ({**AB, "propertyNames": {"not": {"enum": ["a", "c"]}}}, "members"),
        ({**AB, "propertyNames": {"enum": ["a", "c"]}, "required": ["c"]}, "members"),
        ({"if": TAG, "then": {"required": ["b"]}, "else": {"maxProperties": 1}},
         [{}, {"k": "x"}, {"k": "x", "b": 1}, {"k": "y"}, {"b": 1}, {"b": 1, "c": 1}, 7]),
        ({"type": "object", "patternProperties": {ANSIBLE: {}}, "additionalProperties": False},
         [{"True": 1}, {"Tru": 1}, {"isa": 1}, {"is": 1}, {"is2": 1}]),
        ({"not": {"enum": ["ab", "b", None, 5, 7, True]}},
         ["ab", "b", "a", "", "abc", None, 5, 5.5, 6, 8, True, False, [], {}]),
        ({"type": "string", "pattern": "^[a-z.]+$",
          "not": {"anyOf": [{"enum": ["haxe", "all"]}, {"pattern": "\\.(zip|hxml)$"}]}},
         ["all", "a.zip", "a.zi", "hxml", "x.hxml", "alla", ".zip", "A"]),
        ({"type": "string", "pattern": "^(?=.*[a-z])(?=.*\\d).{3,}$"}, ["abc", "ab1", "1a", "123"]),
        ({"type": "string", "pattern": "^(?!foo|ba[rz]$)[a-z]+$"},
         ["foo", "foox", "bar", "barx", "bax", "baz", "f"]),
        ({"type": "string", "pattern": "^(?!.*[.]exe$).*$"}, ["a.exe", "aexe", "a.exec", ""]),
        ({"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", "c"]}, "minItems": 1},
         [[], ["a"], ["b", "a"], ["a", "a"], ["c", "b", "a"]]),
        ({"type": "array", "uniqueItems": False}, [[], ["a", "a"]]),
        ({"items": [{"enum": [0, 1]}], "additionalItems": {"not": {}}, "type": "array",
          "$schema": "http://json-schema.org/draft-07/schema#"}, [[], [0], [2], [0, 1]]),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, [1, 1.25, 1.5]),
        ({"allOf": [{"type": "number", "exclusiveMaximum": -2}, {"minimum": -2.5}]}, [-2, -2.25]),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "string"}], "$defs": {"A": {"type": "null"}}},
         [None, "a", 1]),
    ],
)  # fmt: skip
def test_what_is_said_otherwise_is_the_same(asked: Any, values: Any) -> None:
    if values == "members":
        values = [{}, {"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "b": 2}, {"k": "x"}, {"k": "y"}]
        values += [{"a": 2, "c": 1}]
    assert "$schema" in asked or exact(exact(asked)) == exact(asked)
    valid = [one for one in values if jsonschema_rs.is_valid(asked, one)]
    matcher = matcher_of(asked, closes=False)
    assert [one for one in values if takes(matcher.deep_copy(), json.dumps(one))] == valid
    assert 0 < len(valid) < len(values) or not asked.get("uniqueItems", True)


def test_a_name_that_must_come_does_not_lead_to_another() -> None:
    names = {"propertyNames": {"enum": ["c", "a"]}, "additionalProperties": {"type": "null"}}
    matcher = matcher_of({"type": "object", **names, "required": ["c", "a"]})
    answers = {drawn(matcher.deep_copy(), random.Random(n), ends=0.0) for n in range(9)}
    assert answers == {b'{"c": null, "a": null}'}


@pytest.mark.parametrize("names", [{"enum": ["b"]}, {"not": {"const": "a"}}])
def test_a_reference_to_a_member_that_may_not_be_is_refused(names: Any) -> None:
    """The member was false, so that 1 was one of the two only."""
    one_of = [{"type": "integer"}, {"$ref": "#/properties/a"}]
    members = {"a": {}, "b": {"type": "number", "oneOf": one_of}}
    asked = {"properties": members, "propertyNames": names}
    assert not jsonschema_rs.is_valid(asked, {"b": 1})
    with pytest.raises(ApiError, match="#/properties/a: no member has that name"):
        grammar_of(asked, closes=False)


def test_complements_of_complements_are_given_up_in_time() -> None:
    asked: Any = {"required": ["a"]}
    for _ in range(40):
        asked = {"oneOf": [{"required": ["b"]}, {"properties": {"a": asked}}]}
    began_s = time.process_time()
    with contextlib.suppress(NotExact, RecursionError):
        exact(asked)
    assert time.process_time() - began_s < 1.0  # 0.1


def test_contrary_schemas_are_followed_exactly() -> None:
    found = ask(0, 25)
    assert found["right"] > 5 * found["narrow"], found


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_contrary_schemas_are_followed_exactly() -> None:
    found = ask(1000, 10_000)
    assert found["right"] > 5 * found["narrow"], found
