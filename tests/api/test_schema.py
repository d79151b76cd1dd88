"""Answers under a rewritten schema are valid under the one that the client sent."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import re
import time
from collections import Counter
from decimal import Decimal
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from epd.api.errors import ApiError
from epd.api.schema import NotExact, exact
from epd.api.structured import Constraint
from epd.engine.grammar import Grammars
from epd.tiny import CHECKPOINT
from tests.grammars import VOCAB_SIZE
from tests.hostile.forked import forked
from tests.hostile.schemas import schema

MAX_TOKENS = 400
ENDS = b'"}],0'  # of what a random answer would go on with for ever

GRAMMARS = Grammars(CHECKPOINT, VOCAB_SIZE)
GRAMMARS.warm_up()


def grammar_of(asked: object) -> str:
    return Constraint("json", asked, "x").checked_grammar(GRAMMARS.fault)


def matcher_of(asked: object) -> LLMatcher:
    return GRAMMARS._matcher(grammar_of(asked))


def admits(asked: object, value: object) -> bool:
    text = value if isinstance(value, str) else json.dumps(value)
    matcher = matcher_of(asked)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def drawn(matcher: LLMatcher, draw: random.Random) -> bytes | None:
    """A random answer; None: it does not end."""
    text = b""
    for _ in range(MAX_TOKENS):
        if matcher.is_accepting() and (matcher.is_stopped() or draw.random() < 0.7):
            return text
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        may = [int(token) for token in np.flatnonzero(bits) if token < 256]
        ends = [token for token in may if token in ENDS]
        if not may:
            return None
        token = draw.choice(ends if ends and draw.random() < 0.6 else may)
        if not matcher.try_consume_tokens([token]):
            return None
        text += bytes([token])
    return None


def outcome(seed: int) -> str:
    asked = schema(seed)
    try:
        matcher = matcher_of(asked)
    except ApiError:
        return "refused"
    try:
        validator = jsonschema_rs.validator_for(json.dumps(asked), validate_formats=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return "not for the validator"
    answers = [drawn(matcher.deep_copy(), random.Random(n)) for n in range(4)]
    for answer in answers:
        if answer is not None and not validator.is_valid(json.loads(answer)):
            return f"wrong: {seed}: {answer!r}"
    return "cut" if answers == [None] * 4 else "right"


def ask(first: int, count: int) -> Counter[str]:
    found = Counter(forked(lambda seed=seed: outcome(seed)) for seed in range(first, first + count))
    assert not [text for text in found if text.startswith("wrong")], found
    return found


def test_answers_are_valid_by_a_foreign_validator() -> None:
    assert ask(0, 120)["right"] > 30


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_answers_are_valid_by_a_foreign_validator() -> None:
    assert ask(1000, 20_000)["right"] > 5000


# --- numbers --------------------------------------------------------------------------------------

FAR = [10**18 + 1, 2**63 - 1, 2**63, 2**64, 10**30]
bounds = st.one_of(
    st.sampled_from([0, 1, -1, 0.5, -0.5, 1e-9, -1e-9, 1e-5, 123456789.12345679, 3.4028235e38]),
    st.sampled_from([sign * n for n in FAR for sign in (1, -1)]),
    st.integers(-(10**6), 10**6),
    st.floats(-1e6, 1e6).map(lambda x: float(f"{x:.4g}")),
)
LOWER = {"minimum": Decimal.__ge__, "exclusiveMinimum": Decimal.__gt__}
UPPER = {"maximum": Decimal.__le__, "exclusiveMaximum": Decimal.__lt__}


@given(
    kind=st.sampled_from(["number", "integer"]),
    lower=st.sampled_from([*LOWER, None]),
    upper=st.sampled_from([*UPPER, None]),
    pair=st.tuples(bounds, bounds).map(sorted),
)
def test_no_number_is_past_its_bounds(
    kind: str, lower: str | None, upper: str | None, pair: list[float]
) -> None:
    asked: dict[str, Any] = {"type": kind}
    limits = []
    for key, bound, compares in ((lower, pair[0], LOWER), (upper, pair[1], UPPER)):
        if key is not None:
            asked[key] = bound
            limits.append((compares[key], Decimal(repr(bound))))
    try:
        matcher = matcher_of(asked)
    except ApiError:
        return
    steps = map(Decimal, ("0", "1", "-1", "1e-10", "-1e-10"))
    near = {Decimal(repr(b)) + step for b in pair for step in (*steps, -Decimal(repr(b)))}
    for number in near if kind == "number" else {n.to_integral_value() for n in near}:
        text = list(format(number, "f").encode())
        one = matcher.deep_copy()
        if one.try_consume_tokens(text) == len(text) and one.is_accepting():
            assert all(compare(number, bound) for compare, bound in limits), (asked, number)


@pytest.mark.parametrize(
    "whole",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38},
        {"type": "integer", "minimum": 5.0},
        {"type": "array", "items": {"type": "null"}, "maxItems": 2.0},
    ],
)
def test_the_ranges_of_types_work(whole: dict[str, Any]) -> None:
    assert any(admits(whole, value) for value in (7, -(10**17), [None, None]))


@pytest.mark.parametrize("number", [2**53 + 1, 10**19, 123456789.12345679, 1e-9, 5e-324, 1e21])
def test_a_literal_that_would_change_is_refused(number: float) -> None:
    for asked in ({"const": number}, {"enum": ["x", {"a": [number]}]}):
        with pytest.raises(NotExact, match="cannot be written exactly"):
            exact(asked)


def test_a_place_of_broken_unicode_can_be_told() -> None:
    with pytest.raises(ApiError) as refused:
        grammar_of({"properties": {"\ud83d": {"const": 2**60}}})
    assert refused.value.message.encode() and "\\ud83d" in refused.value.message


@pytest.mark.parametrize("number", [2**53, -(2**53), 0.1, 1.5e-6, 123456789.1234, 0, 1e15, -7.25])
def test_a_literal_is_itself(number: float) -> None:
    ended = drawn(matcher_of({"const": number}), random.Random(0))
    assert ended is not None and json.loads(ended) == number


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
    ],
)
def test_times_are_those_of_a_clock(form: str, right: str, wrong: str) -> None:
    asked = {"type": "string", "format": form}
    assert admits(asked, right) is False  # no JSON without quotes
    assert admits(asked, json.dumps(right)) and not admits(asked, json.dumps(wrong))


@pytest.mark.parametrize("form", ["path", "password", "int32", "regex", "", "color-hex", 7])
def test_an_unknown_format_is_an_annotation(form: object) -> None:
    assert exact({"type": "string", "format": form}) == {"type": "string"}


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
    assert found == {"anyOf" if differ else "oneOf": branches}


OPEN = {"properties": {"a": {}}}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (OPEN, CLOSED),
        ({**OPEN, "additionalProperties": True}, {**OPEN, "additionalProperties": True}),
        ({**OPEN, "required": ["b"]}, {**OPEN, "required": ["b"]}),
        ({**OPEN, "minProperties": 2}, {**OPEN, "minProperties": 2}),
        ({"items": OPEN}, {"items": CLOSED}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [OPEN]}, {"allOf": [CLOSED]}),
        ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
        ({**OPEN, "anyOf": [OPEN]}, {**OPEN, "anyOf": [OPEN]}),
        ({**OPEN, "anyOf": [{"required": ["a"]}]}, {**CLOSED, "anyOf": [{"required": ["a"]}]}),
        ({"not": OPEN}, {"not": OPEN}),
        ({"oneOf": [OPEN, OPEN]}, {"oneOf": [OPEN, OPEN]}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": OPEN}},
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}},
        ),
        (
            {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": OPEN}},
            {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": OPEN}},
        ),
        (
            {"not": {"$ref": "#/$defs/A"}, "$defs": {"A": OPEN}},
            {"not": {"$ref": "#/$defs/A"}, "$defs": {"A": OPEN}},
        ),
    ],
)
def test_objects_without_further_members(asked: object, found: object) -> None:
    assert exact(asked) == found
    assert exact(asked, closes=False) == asked


def test_closed_or_by_the_letter() -> None:
    asked = {"type": "object", **OPEN}
    assert not admits(asked, {"a": 1, "b": 2})
    letter = Constraint("json", asked, "x").checked_grammar(GRAMMARS.fault, closes=False)
    tokens = list(b'{"a": 1, "b": 2}')
    assert GRAMMARS._matcher(letter).try_consume_tokens(tokens) == len(tokens)
