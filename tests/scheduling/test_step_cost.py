"""What steps cost, as placement is told: a line and a rate through what was measured of late."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.predicted_rule import ALIKE
from epd.scheduling.step_cost import MIN_SEEN, RECENT_S, STALL, Line, Measured, Rate, StepCost

seconds = st.floats(1e-5, 0.1)
counts = st.lists(st.integers(1, 256), min_size=20, max_size=200).filter(
    lambda seen: max(seen) - min(seen) > 20
)
kinds = st.sampled_from([Line, Rate])
Make = Callable[[Callable[[], float]], Measured]


def at_once() -> float:
    return 0.0


def after(make: Make, count: int, took_s: Iterable[float]) -> Measured:
    """So many each time."""
    measured = make(at_once)
    for elapsed_s in took_s:
        measured.observe(count, elapsed_s)
    return measured


@given(at_zero_s=seconds, each_s=seconds, seen=counts)
def test_a_line_is_found_and_found_anew(at_zero_s: float, each_s: float, seen: list[int]) -> None:
    line = Line(at_once)
    often = seen * (1500 // len(seen))  # though the first ones may be of one count, and few
    for count in often:
        line.observe(count, at_zero_s + each_s * count)
    assert line.fitted() == pytest.approx((at_zero_s, each_s), rel=1e-3, abs=1e-6)
    for count in often:  # it has changed
        line.observe(count, 2 * at_zero_s + 3 * each_s * count)
    assert line.fitted() == pytest.approx((2 * at_zero_s, 3 * each_s), rel=1e-3, abs=1e-6)


def test_a_line_expects_what_lies_on_it() -> None:
    line = Line(at_once)
    for count in (10, 50, 90, 130):
        line.observe(count, 0.004 + 0.0001 * count)
    for count in (10, 70, 250):
        assert line.expected_s(count) == pytest.approx(0.004 + 0.0001 * count, rel=1e-3)


@pytest.mark.parametrize(
    ("counts_seen", "is_known"), [((10,) * 9 + (11,), False), ((10, 12), True)]
)
def test_what_each_adds_is_known_from_counts_that_differ(
    counts_seen: tuple[int, ...], is_known: bool
) -> None:
    line = Line(at_once)
    for count in counts_seen * 4:
        line.observe(count, 0.001 * count)
    assert line.fitted()[1] == pytest.approx(0.001 if is_known else 0.0, rel=1e-3)


def test_who_does_less_is_not_faster() -> None:
    """Only who is much faster than the line and the mean makes the first ones look held up."""
    line = Line(at_once)
    for count in (1, 100, 1):
        line.observe(count, 0.001 * count)
    assert line.fitted()[1] == pytest.approx(0.001)
    rate = Rate(at_once)
    for elapsed_s in (0.02, 0.02, 0.0):  # what prompts add to a step may come to nothing
        rate.observe(100, elapsed_s)
    assert rate.unit_s > 0.0001


def test_steps_are_told_apart_by_what_is_in_them() -> None:
    """Of prompts beside decodes counts what they add to a step of decodes alone."""
    cost = StepCost(at_once)
    cost.observe(8, 0, 0.005)
    assert cost.decodes.expected_s(8) == cost.decode_s == 0.005 and not cost.prompts.unit_s
    cost.observe(0, 100, 0.020)
    assert cost.prompts.unit_s == pytest.approx(0.0002) and not cost.token_s
    assert cost.decodes.expected_s(8) == cost.decode_s == 0.005
    cost.observe(8, 300, 0.065)
    assert cost.prompts.unit_s == pytest.approx(0.0002) == cost.token_s
    assert cost.decodes.expected_s(8) == cost.decode_s == 0.005


@given(count=st.integers(1, 256), took_s=st.lists(seconds, min_size=2, max_size=20))
def test_of_one_count_nothing_follows_for_others(count: int, took_s: list[float]) -> None:
    line = Line(at_once)
    for elapsed_s in took_s:
        line.observe(count, elapsed_s)
    at_zero_s, each_s = line.fitted()
    assert each_s == 0.0
    assert min(took_s) <= at_zero_s * 1.000001 and at_zero_s <= max(took_s) * 1.000001
    assert Line(at_once).fitted() == (0.0, 0.0)


@given(unit_s=seconds, seen=st.lists(st.integers(1, 4096), min_size=1, max_size=100))
def test_a_rate_weighs_steps_by_what_they_did(unit_s: float, seen: list[int]) -> None:
    rate = Rate(at_once)
    assert rate.unit_s == 0.0
    for units in seen:
        rate.observe(units, units * unit_s)
    assert rate.unit_s == pytest.approx(unit_s)


@given(
    make=kinds, each_s=seconds, num_seen=st.integers(12, 300), count=st.integers(1, 256),
    held_up_s=st.floats(0.5, 100.0),
)  # fmt: skip
def test_who_was_held_up_once_counts_as_fast_as_before(
    make: Make, each_s: float, num_seen: int, count: int, held_up_s: float
) -> None:
    """A driver stood still for a second, and for minutes nothing was placed there."""
    measured = after(make, count, [each_s] * num_seen + [each_s + held_up_s])
    assert each_s <= measured.expected_s(count) < ALIKE * each_s


@given(
    make=kinds, each_s=seconds, num_held_up=st.integers(1, 3), count=st.integers(1, 256),
    factor=st.floats(1.0, 1e4),
)  # fmt: skip
def test_who_begins_slowly_is_as_fast_as_others_when_it_is_sure(
    make: Make, each_s: float, num_held_up: int, count: int, factor: float
) -> None:
    """The first ones load what is not loaded yet, after a pause they wake a device."""
    measured = after(make, count, [factor * each_s] * num_held_up)
    while not measured.is_sure:
        measured.observe(count, each_s)
    slowest = 1.0 + num_held_up * (STALL - 1.0) / MIN_SEEN
    assert 0.999 * each_s <= measured.expected_s(count) <= slowest * each_s


def test_few_may_take_as_long_as_many() -> None:
    """A step has its least time: with one token of a prompt it is not held up."""
    rate = Rate(at_once)
    for _ in range(300):
        rate.observe(1000, 1.0)
    for _ in range(30):
        rate.observe(1, 0.9)
    assert rate.unit_s > 1.25e-3


@given(make=kinds, each_s=seconds, count=st.integers(1, 256), factor=st.floats(2.0, 1000.0))
def test_who_is_slower_from_now_on_is_believed(
    make: Make, each_s: float, count: int, factor: float
) -> None:
    measured = after(make, count, [each_s] * 200 + [factor * each_s] * 800)
    assert measured.expected_s(count) == pytest.approx(factor * each_s, rel=0.01)


@given(make=kinds, was_s=seconds, is_s=seconds, count=st.integers(1, 256))
def test_what_is_old_gives_way_to_what_is_new(
    make: Make, was_s: float, is_s: float, count: int
) -> None:
    now = [0.0]
    measured = make(lambda: now[0])
    assert not measured.is_sure, "nothing was measured"
    for _ in range(50):
        measured.observe(count, was_s)
    now[0] += RECENT_S
    assert measured.is_sure
    now[0] += 0.1
    assert not measured.is_sure
    assert measured.expected_s(count) == pytest.approx(was_s), "it is all that is known"
    measured.observe(count, is_s)
    assert measured.expected_s(count) == pytest.approx(is_s)
    for _ in range(int(MIN_SEEN)):
        assert not measured.is_sure, "a few say little"
        measured.observe(count, is_s)
    assert measured.is_sure
