"""Hedges: what is late is measured; a second encoder is asked for few, and where it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.messages import StageCosts
from epd.scheduling.backlog import Backlog
from epd.scheduling.hedging import BURST, MARGIN, REMEMBERED, HedgeBudget, LoadTimes, pays

TIMES = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=300)
STEPS = st.lists(
    st.one_of(st.integers(1, 40), st.none()), max_size=200
)  # images sent; None: a hedge


def timed(times: dict[str, list[float]], min_loads: int = 1, floor_s: float = 1e-6) -> LoadTimes:
    made = LoadTimes(min_loads, floor_s)
    for encoder, each in times.items():
        for took_s in each:
            made.note(encoder, 1, took_s)
    return made


@given(TIMES)
def test_late_is_what_hardly_any_of_the_youngest_took(times: list[float]) -> None:
    late_s = timed({"e0": times}).late_after_s(1)
    assert late_s is not None
    youngest = times[-REMEMBERED:]
    later = [took_s for took_s in youngest if took_s > late_s / MARGIN * 1.000001]
    assert len(later) <= 0.01 * len(youngest) + 1
    assert late_s <= MARGIN * max(youngest)


@given(TIMES, TIMES)
def test_a_slow_encoder_excuses_nobody(some: list[float], others: list[float]) -> None:
    late_s = timed({"e0": some, "e1": others}).late_after_s(1)
    alone = [timed({"e": times}).late_after_s(1) for times in (some, others)]
    assert late_s == min(one for one in alone if one is not None)


@given(st.floats(0.001, 1.0), st.integers(1, 4000))
def test_it_goes_with_the_size_and_has_a_floor(row_s: float, num_rows: int) -> None:
    times = LoadTimes(1, 0.25)
    times.note("e0", 100, 100 * row_s)
    assert times.late_after_s(num_rows) == pytest.approx(max(0.25, MARGIN * row_s * num_rows))


def test_what_is_usual_is_looked_up_again_with_each_load() -> None:
    times = timed({"e0": [1.0]})
    assert times.late_after_s(1) == MARGIN
    times.note("e0", 1, 0.5)
    assert times.late_after_s(1) == 0.5 * MARGIN


def test_of_few_loads_nothing_is_known() -> None:
    assert timed({"e0": [1.0] * 19, "e1": [1.0]}, 20).late_after_s(1) is None
    assert timed({"e0": [1.0] * 20}, 20).late_after_s(1) is not None


@given(st.floats(0.0, 1.0), STEPS)
def test_hedges_are_at_most_a_burst_and_a_share(share: float, steps: list[int | None]) -> None:
    budget, num_sent, num_hedged = HedgeBudget(share), 0, 0
    for step in steps:
        if step is None:
            num_hedged += budget.take()
        else:
            budget.sent(step)
            num_sent += step
        assert num_hedged <= (BURST if share else 0) + share * num_sent + 1e-6


@given(st.floats(0.01, 1.0), st.integers(0, 50))
def test_whoever_was_refused_may_again_after_so_many_images(share: float, num_asked: int) -> None:
    budget = HedgeBudget(share)
    for _ in range(num_asked):
        budget.take()
    budget.sent(int(1.0 / share) + 1)
    assert budget.take()


def test_quiet_hours_save_no_more_than_a_burst() -> None:
    budget = HedgeBudget(0.1)
    budget.sent(10**6)
    assert [budget.take() for _ in range(BURST + 1)] == [True] * BURST + [False]


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 10**5), st.floats(0.0, 5.0))
def test_whoever_is_busy_is_not_asked(
    num_patches: int, num_ready: int, more: int, waited_s: float
) -> None:
    costs = StageCosts(patch_s=3e-6, token_s=1e-5, step_s=0.0, sequence_s=0.0, nbyte_s=0.0)
    backlog = Backlog(num_patches=num_patches, num_ready=num_ready)
    done_s = 3e-6 * (num_patches + more) + 1e-5 * num_ready
    assert pays(backlog, costs, more, waited_s) == (done_s <= waited_s)
    if pays(backlog, costs, more, waited_s):
        assert pays(Backlog(), costs, more, waited_s) and pays(backlog, costs, more, waited_s + 1)


def test_who_is_gone_measures_nothing() -> None:
    times = timed({"e0": [0.001] * 20, "e1": [1.0] * 20}, 20)
    times.forget("e0")
    assert times.late_after_s(1) == pytest.approx(MARGIN)
    times.forget("e1")
    assert times.late_after_s(1) is None
