"""Numbers of constrained answers: within their bounds, exact, and read back by anyone."""

from __future__ import annotations

import contextlib
import json
import math
import random
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.api.asked.grammar import checked_grammar
from epd.api.asked.structured import Constraint
from epd.api.asked.tools import ToolUse
from epd.api.http.errors import ApiError
from epd.api.schema.rewrite import NotExact, exact
from epd.model_files.grammar import PROOF_LIMITS, Matcher
from tests.answers import GRAMMARS, admits, drawn, grammar_of, matcher_of, takes

FAR = [10**18 + 1, 2**63 - 1, 2**63, 2**64, 10**30]
bounds = st.one_of(
    st.sampled_from([1e-5, 123456789.12345679, 3.4028235e38]),
    st.sampled_from([0, 1, -1, 0.5, -0.5, 1e-9, -1e-9, 3.3e-200, 5e-324]),
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
        if takes(matcher.deep_copy(), format(number, "f")):
            assert all(compare(number, bound) for compare, bound in limits), (asked, number)


@pytest.mark.parametrize("far", [2**53 + 2, 10**16, 2**60, 2**62 + 4096])
def test_what_a_bound_excludes_is_excluded(far: int) -> None:
    """Beyond 2^53 a float holds no neighbour of the bound."""
    for sign, key in ((1, "exclusiveMaximum"), (-1, "exclusiveMinimum")):
        asked = {"type": "integer", key: sign * far}
        assert not admits(asked, sign * far) and not admits(asked, sign * (far + 1))
        assert admits(asked, sign * (far - far // 10))


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


@pytest.mark.parametrize("number", [2**53 + 1, 10**19, 123456789.12345679, 5e-324, 1e21])
def test_a_literal_that_would_change_is_refused(number: float) -> None:
    for asked in ({"const": number}, {"enum": ["x", {"a": [number]}]}):
        with pytest.raises(NotExact, match="cannot be written exactly"):
            exact(asked)


LITERALS = [2**53, -(2**53), 0.1, 1.5e-6, 123456789.1234, 0, 1e15, -7.25, 1e-9, -1e-22, 2.5e-20]


@pytest.mark.parametrize("number", LITERALS)
def test_a_literal_is_itself(number: float) -> None:
    ended = drawn(matcher_of({"const": number}), random.Random(0))
    assert ended is not None and json.loads(ended) == number


@settings(max_examples=50)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_fraction_is_itself_or_refused(number: float) -> None:
    asked = {"const": number}
    with contextlib.suppress(NotExact):
        exact(asked)
        text = drawn(matcher_of(asked), random.Random(0))
        assert text is not None and json.loads(text) == number


# --- texts ----------------------------------------------------------------------------------------

NUMBER = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer", ["number", "null"]])},
    optional={
        "minimum": st.sampled_from([-1e300, -5, 0, 0.5, 10**15]),
        "exclusiveMaximum": st.sampled_from([1e300, 2**53, 7]),
        "multipleOf": st.sampled_from([1, 7, 0.01, 2.5, 1000, 997, 0.1997, 10**6]),
    },
)
ITEMS = [{}, True, {"description": "any"}]


def _whole(number: Any, draw: random.Random) -> Any:
    """A schema whose values have numbers, as often as not in places of which it is silent."""
    item = draw.choice([number, *ITEMS])
    has_a, needs_a = {"properties": {"a": item}}, {"required": ["a"]}
    return draw.choice([
        item,
        {"type": "array", "items": item, "minItems": 1},
        {"type": "object", **has_a, "additionalProperties": draw.choice(ITEMS), "required": ["b"]},
        {"type": "object", "allOf": [has_a, needs_a]},
        {"type": "object", "anyOf": [has_a, needs_a]},
    ])  # fmt: skip


def _read(text: str) -> float:
    assert math.isfinite(float(text)), text
    if text.lstrip("-").isdigit():
        assert abs(int(text)) < 10**19
    return 0


@settings(max_examples=30)
@given(NUMBER, st.randoms(use_true_random=False), st.booleans())
def test_any_reader_takes_the_numbers_back(number: Any, draw: random.Random, closes: bool) -> None:
    """And no answer comes to where nothing can follow, though it goes on as long as it may."""
    try:
        matcher = matcher_of(_whole(number, draw), closes=closes)
    except ApiError:
        return
    if text := drawn(matcher, draw, ends=0.1, likes=b"0123456789eE+.-"):
        json.loads(text, parse_int=_read, parse_float=_read)


STEPS = st.one_of(
    st.integers(1, 4000),
    st.integers(1, 10**7),
    st.sampled_from([10**n for n in range(16)]),
    st.tuples(st.integers(1, 3000), st.integers(1, 9)).map(lambda pair: pair[0] / 10 ** pair[1]),
)


def _multiples(kind: str, steps: list[float], form: str, sides: list[tuple[str, float]]) -> Any:
    numbers: list[Any] = [{"type": kind, "multipleOf": step} for step in steps]
    numbers[0] |= dict(sides)
    if form == "one":
        return numbers[0]
    if form == "$ref":
        return {"$ref": "#/$defs/n", "allOf": [numbers[-1]], "$defs": {"n": numbers[0]}}
    return {form: numbers}


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["number", "integer"]),
    steps=st.lists(STEPS, min_size=1, max_size=3),
    form=st.sampled_from(["one", "one", "anyOf", "allOf", "$ref"]),
    sides=st.lists(st.tuples(st.sampled_from([*LOWER, *UPPER]), bounds), max_size=2),
    draw=st.randoms(use_true_random=False),
)
def test_multiples_are_refused_or_followed(
    kind: str, steps: list[float], form: str, sides: Any, draw: random.Random
) -> None:
    """With half of the fuel of an instance, over many digits."""
    asked = _multiples(kind, steps, form, sides)
    try:
        grammar = grammar_of(asked)
    except ApiError:
        return
    for _ in range(3):
        drawn(Matcher(GRAMMARS._made(grammar, PROOF_LIMITS)), draw, ends=0.1, likes=b"0123456789")


def test_a_proof_walks_through_digits() -> None:
    """What stands in Lark, or meets a vocabulary of long numbers, has this bound only."""
    for step, is_followed in ((100, True), (9973, False)):
        number = {"type": "number", "multipleOf": step, "minimum": -(2**53), "maximum": 1e15}
        both = {"a": {"type": "string"}, "b": number}
        asked = {"type": "object", "properties": both, "required": ["a", "b"]}
        reason = GRAMMARS.proof(f"start: %json {json.dumps(asked)}")
        assert not reason if is_followed else "too many expressions" in reason


@pytest.mark.parametrize("asked", [{"type": "number"}, {}, {"type": "object"}])
def test_numbers_have_exponents_that_are_finite(asked: Any) -> None:
    form = '{{"a": {}}}' if asked == {"type": "object"} else "{}"
    for text, is_finite in (
        ("6.022e23", True), ("-1.7e307", True), ("1e-7", True), ("9" * 19, True), ("0.1", True),
        ("1.7976931348623157e+308", True), ("5e-324", True), ("1e308", True),
        ("521e406759", False), ("2e308", False), ("1.8e308", False), ("10e308", False),
        ("9" * 20, False), ("9" * 400, False),
    ):  # fmt: skip
        assert admits(asked, form.format(text)) is is_finite, text


def test_a_number_that_ends_by_its_bound_ends_the_answer() -> None:
    """Its grammar would go on; the proof of every such schema failed at the end token."""
    assert not GRAMMARS.proof(grammar_of({"type": "number"}))
    matcher = matcher_of({"type": "number"})
    assert takes(matcher, "530E47") and matcher.is_stopped()


def test_arguments_have_such_numbers_too() -> None:
    """And a text beside the tools that shows a schema is what it is."""
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    choice = Constraint("choice", ['%json {"x-guidance": 1e400}'], "guided_choice")
    use = ToolUse((tool,), otherwise=choice)
    matcher = GRAMMARS._matcher(checked_grammar(use, GRAMMARS.fault))
    call = '<tool_call>\n{{"name": "f", "arguments": {{"a": {}}}}}\n</tool_call>'
    assert takes(matcher.deep_copy(), call.format("1e40"))
    assert not takes(matcher.deep_copy(), call.format("1e400"))
    assert takes(matcher, '%json {"x-guidance": 1e400}')


@pytest.mark.parametrize("step", [0, -1, -(2**31), -0.5, float("inf")])
def test_a_step_is_above_zero(step: float) -> None:
    """llguidance takes a negative one, and may not come back."""
    with pytest.raises(NotExact, match="multipleOf"):
        exact({"type": "integer", "multipleOf": step})
