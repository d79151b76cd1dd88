"""What steps cost, as placement is told: a line and a rate through what was measured of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.step_cost import Line, Rate

seconds = st.floats(1e-5, 0.1)
counts = st.lists(st.integers(1, 256), min_size=20, max_size=200).filter(
    lambda seen: max(seen) - min(seen) > 20
)


@given(at_zero_s=seconds, each_s=seconds, seen=counts)
def test_a_line_is_found_and_found_anew(at_zero_s: float, each_s: float, seen: list[int]) -> None:
    line = Line()
    for count in seen:
        line.observe(count, at_zero_s + each_s * count)
    assert line.fitted() == pytest.approx((at_zero_s, each_s), rel=1e-3, abs=1e-6)
    for count in seen * (2000 // len(seen)):  # it has changed
        line.observe(count, 2 * at_zero_s + 3 * each_s * count)
    assert line.fitted() == pytest.approx((2 * at_zero_s, 3 * each_s), rel=1e-3, abs=1e-6)


@given(count=st.integers(1, 256), took_s=st.lists(seconds, min_size=2, max_size=20))
def test_of_one_count_nothing_follows_for_others(count: int, took_s: list[float]) -> None:
    line = Line()
    for elapsed_s in took_s:
        line.observe(count, elapsed_s)
    at_zero_s, each_s = line.fitted()
    assert each_s == 0.0
    assert min(took_s) <= at_zero_s * 1.000001 and at_zero_s <= max(took_s) * 1.000001
    assert Line().fitted() == (0.0, 0.0)


@given(unit_s=seconds, seen=st.lists(st.integers(1, 4096), min_size=1, max_size=100))
def test_a_rate_weighs_steps_by_what_they_did(unit_s: float, seen: list[int]) -> None:
    rate = Rate()
    assert rate.unit_s == 0.0
    for units in seen:
        rate.observe(units, units * unit_s)
    assert rate.unit_s == pytest.approx(unit_s)
