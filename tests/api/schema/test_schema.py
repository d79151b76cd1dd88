"""Answers under a rewritten schema are valid under the one that the client sent."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import re
import time
from collections import Counter
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from epd.api.http.errors import ApiError
from epd.api.schema.rewrite import NotExact, exact
from tests.answers import GRAMMARS, admits, drawn, grammar_of
from tests.hostile.forked import outcomes
from tests.hostile.schemas import schema


def outcome(seed: int) -> str:
    asked, closes = schema(seed), seed % 2 == 0
    try:
        grammar = grammar_of(asked, closes=closes)
    except ApiError:
        return "refused"
    if GRAMMARS.proof(grammar):
        return "refused"
    try:
        validator = jsonschema_rs.validator_for(json.dumps(asked), validate_formats=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return "not for the validator"
    matcher = GRAMMARS._matcher(grammar)
    answers = [drawn(matcher.deep_copy(), random.Random(n)) for n in range(4)]
    for answer in answers:
        if answer is not None and not validator.is_valid(json.loads(answer)):
            return f"wrong: {seed}: {answer!r}"
    return "cut" if answers == [None] * 4 else "right"


def ask(first: int, count: int) -> Counter[str]:
    found = outcomes(outcome, range(first, first + count))
    assert not [text for text in found if text.startswith("wrong")], found
    return found


def test_answers_are_valid_by_a_foreign_validator() -> None:
    assert ask(0, 120)["right"] > 30


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_answers_are_valid_by_a_foreign_validator() -> None:
    assert ask(1000, 20_000)["right"] > 5000


def test_a_place_of_broken_unicode_can_be_told() -> None:
    with pytest.raises(ApiError) as refused:
        grammar_of({"properties": {"\ud83d": {"const": 2**60}}})
    assert refused.value.message.encode() and "\\ud83d" in refused.value.message


# --- ends -----------------------------------------------------------------------------------------

SELF = {"type": "object", "properties": {"a": {"$ref": "#"}}}
PAIR = {
    "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}, "required": ["b"]},
    "B": {"type": "array", "items": {"$ref": "#/$defs/A"}, "minItems": 1},
}


@pytest.mark.parametrize(
    "asked",
    [
        {**SELF, "required": ["a"]},
        {"$ref": "#"},
        {"allOf": [{"type": "string"}, {"$ref": "#/allOf/1"}]},
        {"$ref": "#/$defs/A", "$defs": PAIR},
        {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": PAIR},
        False,
    ],
)
def test_what_has_no_end_is_refused(asked: object) -> None:
    with pytest.raises(NotExact, match="nothing finite"):
        exact(asked)


def test_what_has_an_end_takes_it() -> None:
    assert admits(SELF, {"a": {"a": {}}})
    some = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": PAIR}
    assert exact(some) == {
        "anyOf": [False, {"type": "null"}],
        "$defs": {"A": False, "B": False},
    }
    assert admits(some, None)
    rests = {**PAIR, "B": {**PAIR["B"], "minItems": 0}}
    assert admits({"$ref": "#/$defs/A", "$defs": rests}, {"b": [{"b": []}]})


def test_a_long_chain_is_told_in_time() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
    for last in ({"type": "null"}, {"$ref": "#/$defs/d0"}):
        asked = {"$ref": "#/$defs/d0", "$defs": {**chain, "d1500": last}}
        began_s = time.process_time()
        with contextlib.suppress(NotExact):
            exact(asked)
        assert time.process_time() - began_s < 1.0  # 0.05


# --- what is no schema ----------------------------------------------------------------------------

KEYS = [
    *("type", "enum", "const", "format", "required", "minProperties", "minimum", "allOf", "oneOf"),
    *("properties", "$defs", "$ref", "items", "not", "exclusiveMinimum", "maximum", "maxItems"),
]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["a", *KEYS]),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(KEYS), inner),
)


@example({"enum": [float("inf")]}, False)
@given(anything, st.booleans())
def test_any_json_is_rewritten_or_refused(value: object, closes: bool) -> None:
    try:
        found = exact(value, closes=closes)
    except NotExact:
        return
    assert repr(exact(found, closes=closes)) == repr(found)


# --- formats --------------------------------------------------------------------------------------


def test_days_are_those_of_the_calendar() -> None:
    pattern = exact({"type": "string", "format": "date"})
    assert isinstance(pattern, dict)
    is_day = re.compile(pattern["pattern"]).match
    for year in (1, 4, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    dt.date.fromisoformat(text)
                except ValueError:
                    assert not is_day(text), text
                else:
                    assert is_day(text), text


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("time", "23:59:59.5+05:30", "23:59:60Z"),
        ("time", "00:00:00Z", "24:00:00Z"),
        ("date-time", "2024-02-29T12:00:00Z", "2023-02-29T12:00:00Z"),
        ("date", "0001-01-01", "0000-01-01"),
        ("email", f"{'a' * 64}@b.c", f"{'a' * 65}@b.c"),
        ("email", "a@[127.0.0.1]", f"a@{'b' * 64}.c"),
        ("hostname", f"{'a' * 63}.b", ".".join(["a" * 63] * 4)),
    ],
)
def test_formats_are_those_of_their_standards(form: str, right: str, wrong: str) -> None:
    asked = {"type": "string", "format": form}
    assert admits(asked, right) is False  # no JSON without quotes
    assert admits(asked, json.dumps(right)) and not admits(asked, json.dumps(wrong))


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("email", "a0@b.c", f"a0{'a' * 63}@b.c"),
        ("hostname", f"a0.{'b' * 63}", "a0" + f".{'d' * 61}" * 5),
        ("time", "07:00:59.30+06:50", "07:00:60.30+06:50"),
    ],
)
def test_a_format_beside_a_pattern_is_followed_too(form: str, right: str, wrong: str) -> None:
    for pattern in ("(0){1,3}", "(0)*"):
        asked = {"type": "string", "format": form, "pattern": pattern}
        assert admits(asked, json.dumps(right)) and not admits(asked, json.dumps(wrong))


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^\s$", "\t\n\r\u2003\u3000\xa0 ", "\x85\ufeffa"),
        (r"^[a\s]$", "a\t\u2028", "\x85s"),
        (r"^\S$", "as\u200b", "\x85\ufeff\t\u2003"),
        (r"^[^\s]$", "as", "\t\u2003\x85\ufeff"),
        (r"^[^\S]$", "\t\u2003", "as\x85\ufeff"),
        (r"^.$", "a\x85.", "\n\r\u2028\u2029"),
        (r"^[.[&~]$", ".[&~", "a"),
        (r"^\\s$", "", "s\t"),
    ],
)
def test_spaces_are_those_of_ecma_262(pattern: str, right: str, wrong: str) -> None:
    asked = {"type": "string", "pattern": pattern}
    assert all(admits(asked, json.dumps(one, ensure_ascii=False)) for one in right)
    assert not any(admits(asked, json.dumps(one, ensure_ascii=False)) for one in wrong)


@pytest.mark.parametrize("form", ["path", "password", "int32", "regex", "", "color-hex", 7])
def test_an_unknown_format_is_an_annotation(form: object) -> None:
    assert exact({"type": "string", "format": form}) == {"type": "string"}


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        ({"propertyNames": {"pattern": "^[a-z]{2}$"}}, [{"ab": 1}, {}], [{"abc": 1}]),
        ({"propertyNames": {"enum": ["x-", "y"]}}, [{"y": 1, "x-": 2}], [{"z": 1}, {"x": 1}]),
        ({"propertyNames": {"const": "x"}, "additionalProperties": {"const": 1}},
         [{"x": 1}], [{"x": 2}, {"y": 1}]),
        ({"propertyNames": {"type": "string"}, "required": ["a"]}, [{"a": 1, "b": 2}], [{}]),
        ({"propertyNames": True, "properties": {"a": {"not": {}}}}, [{"b": 1}], [{"a": 1}]),
        ({"additionalProperties": {"not": True}, "properties": {"a": {}}}, [{"a": 1}], [{"b": 1}]),
        ({"properties": {"a": {"not": {"not": {}}}}}, [{"a": [1]}], []),
    ],
)  # fmt: skip
def test_names_and_what_is_forbidden(asked: Any, right: list[Any], wrong: list[Any]) -> None:
    asked = {"type": "object", **asked}
    assert all(admits(asked, value, closes=False) for value in right)
    assert not any(admits(asked, value, closes=False) for value in wrong)
    for value in (*right, *wrong):
        assert jsonschema_rs.is_valid(asked, value) is (value in right)


def test_annotations_do_not_count() -> None:
    asked = {"type": "object", "description": "d" * (100 << 10), "properties": {"title": {}}}
    assert exact(asked, closes=False) == {"type": "object", "properties": {"title": {}}}
    assert grammar_of(asked)
    with pytest.raises(ApiError, match="65536 characters without its descriptions"):
        grammar_of({"enum": ["x" * (70 << 10)]})


# --- branches and objects -------------------------------------------------------------------------


def tagged(tag: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": tag}, "n": {"type": "integer"}},
        "required": ["kind"],
    }


@pytest.mark.parametrize(
    ("branches", "differ"),
    [
        ([{"type": "string"}, {"type": "null"}], True),
        ([{"type": ["string", "boolean"]}, {"type": "array"}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"const": "a"}, {"enum": ["b", "c"]}], True),
        ([{"const": "a"}, {"enum": ["a", "c"]}], False),
        ([{"const": 1}, {"const": 1.0}], False),
        ([tagged("a"), tagged("b"), tagged("c")], True),
        ([tagged("a"), {"type": "object"}], False),
        ([tagged("a"), {**tagged("b"), "required": []}], False),
    ],
)
def test_branches_that_exclude_each_other_need_no_negation(
    branches: list[Any], differ: bool
) -> None:
    found = exact({"oneOf": branches}, closes=False)
    assert (found == {"anyOf": branches}) is differ


OPEN = {"properties": {"a": {}}}
CLOSED = {**OPEN, "additionalProperties": False}
WHOLE = {"properties": {"a": {"type": "integer"}}}  # of which no complement can be said


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (OPEN, CLOSED),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({**OPEN, "required": ["b"]}, {**OPEN, "required": ["b"]}),
        ({**OPEN, "minProperties": 1}, {**CLOSED, "minProperties": 1}),
        ({"items": OPEN}, {"items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
        ({**OPEN, "anyOf": [OPEN]}, {**OPEN, "anyOf": [OPEN]}),
        ({**OPEN, "anyOf": [{"required": ["a"]}]}, {**CLOSED, "anyOf": [{"required": ["a"]}]}),
        ({"not": WHOLE}, {"not": WHOLE}),
        ({"oneOf": [WHOLE, WHOLE]}, {"oneOf": [WHOLE, WHOLE]}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": OPEN}},
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}},
        ),
        (
            {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": OPEN}},
            {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": OPEN}},
        ),
        (
            {"not": {"$ref": "#/$defs/A"}, "$defs": {"A": WHOLE}},
            {"not": {"$ref": "#/$defs/A"}, "$defs": {"A": WHOLE}},
        ),
    ],
)
def test_objects_without_further_members(asked: object, found: object) -> None:
    assert exact(asked) == found
    assert exact(asked, closes=False) == asked


@pytest.mark.parametrize("fewest", [1, 2, 3])
def test_names_that_may_come_twice_do_not_count_twice(fewest: int) -> None:
    asked = {"type": "object", "required": ["a"], "minProperties": fewest}
    if fewest < 3:
        assert admits(asked, '{"a": 1, "b": 1}') and not admits(asked, "{}")
        return
    with pytest.raises(NotExact, match="different names"):
        exact(asked)


@pytest.mark.parametrize("is_tagged", [False, True])
def test_many_branches_are_compared_in_time(is_tagged: bool) -> None:
    """Each with each, 2,000 would be compared two million times in each pass."""
    branches = [tagged(f"t{i}") if is_tagged else {"const": f"t{i}"} for i in range(2000)]
    began_s = time.process_time()
    found = exact({"oneOf": branches}, closes=False)
    assert found == {"anyOf": branches}
    assert exact({"oneOf": [*branches, branches[7]]}, closes=False) != found
    assert time.process_time() - began_s < 1.5  # 0.1


def test_closed_or_by_the_letter() -> None:
    asked = {"type": "object", **OPEN}
    assert not admits(asked, {"a": 1, "b": 2})
    assert admits(asked, {"a": 1, "b": 2}, closes=False)
