"""What counts as progress, and the bound of a wait: measured costs, not a constant (F87)."""

from __future__ import annotations

from typing import Any

import pytest

from epd.messages import Address
from epd.roles.progress import InstanceProgress, WorkPatience
from epd.scheduling.step_cost import STALL, StepCost

PATIENCE = WorkPatience(work_s=4.0, write_s=8.0, unmeasured_s=120.0)


class At:
    now_s = 100.0


@pytest.fixture
def at() -> At:
    return At()


@pytest.fixture
def progress(at: At) -> InstanceProgress:
    return InstanceProgress(lambda: at.now_s)


def waits(progress: InstanceProgress, *silent: str) -> dict[str, tuple[float, float]]:
    told = progress.waits(PATIENCE, silent)
    return {one.what: (one.for_s, one.bound_s) for one in told}


def test_who_has_nothing_under_way_waits_for_nothing(at: At, progress: InstanceProgress) -> None:
    work = progress.steps.begin(1.0)
    assert waits(progress) == {"step": (0.0, 4.0 + STALL)}
    progress.steps.end(work)
    assert waits(progress) == {} and progress.device.moved_s == 100.0


def test_the_oldest_counts_since_one_of_its_kind_has_ended(
    at: At, progress: InstanceProgress
) -> None:
    first, _ = progress.steps.begin(0.0), progress.steps.begin(0.0)
    at.now_s = 103.0
    assert waits(progress) == {"step": (3.0, 4.0)}
    progress.steps.end(first)
    at.now_s = 105.0
    assert waits(progress) == {"step": (2.0, 4.0)}, "looking at it is no progress"
    assert waits(progress) == {"step": (2.0, 4.0)}


def test_who_shares_a_device_waits_for_all_that_is_under_way(
    at: At, progress: InstanceProgress
) -> None:
    """A step behind a vision batch of ten seconds; each that ends gives the rest more time."""
    progress.batches.begin(10.0)
    step = progress.steps.begin(0.2)
    bound_s = 4.0 + STALL * 10.2
    assert waits(progress) == {"step": (0.0, bound_s), "vision batch": (0.0, bound_s)}
    at.now_s = 130.0
    progress.steps.end(step)
    told = waits(progress)["vision batch"]
    assert told == pytest.approx((30.0, 30.0 + 4.0 + STALL * 10.0))
    at.now_s = 1000.0
    progress.steps.end(progress.steps.begin(0.2))
    assert waits(progress)["vision batch"] == pytest.approx((900.0, 120.0 + 4.0 + STALL * 10.0))


def test_a_self_test_is_behind_all_and_moves_nothing(at: At, progress: InstanceProgress) -> None:
    progress.steps.begin(1.0)
    test = progress.tests.begin(0.0)
    assert waits(progress)["self-test"] == (0.0, 4.0 + STALL)
    at.now_s = 102.0
    progress.tests.end(test)
    assert waits(progress) == {"step": (2.0, 4.0 + STALL)} and progress.tests.moved_s == 102.0


def test_what_was_never_measured_may_take_as_long_as_a_client_waits(
    progress: InstanceProgress,
) -> None:
    cost = StepCost(lambda: 0.0)
    assert cost.expected_s(0, 512) is None and cost.expected_s(4, 0) is None
    cost.observe(0, 512, 60.0)
    assert cost.expected_s(0, 1024) == 120.0 and cost.expected_s(1, 1024) is None
    cost.observe(4, 0, 0.5)
    assert cost.expected_s(4, 512) == pytest.approx(60.5)
    progress.steps.begin(cost.expected_s(0, 512))
    assert waits(progress)["step"] == (0.0, 4.0 + STALL * 60.0)
    progress.batches.begin(None)
    assert waits(progress)["step"] == (0.0, 124.0 + STALL * 60.0)


def test_what_a_silent_peer_holds_up_is_not_its_own(at: At, progress: InstanceProgress) -> None:
    peers = [Address(name, 1, "") for name in ("p0", "p1")]
    with progress.writes.work(0.1, peers[0]) as work:
        at.now_s = 105.0
        progress.writes.begin(0.1, peers[1])
        assert progress.writes.late_peers(4.0) == [peers[0]] and work.began_s == 100.0
        assert waits(progress)["write"] == (5.0, 8.0 + STALL * 0.2)
        assert waits(progress, "p0")["write"][0] == 0.0
        assert waits(progress, "p0", "p1") == {}
    assert waits(progress) == {"write": (0.0, 8.0 + STALL * 0.1)}


def test_a_turn_that_never_comes_is_seen_by_its_mark(at: At, progress: InstanceProgress) -> None:
    def look(mark: int, *, is_due: bool) -> dict[str, Any]:
        progress.turns.look(mark, is_due=is_due)
        return waits(progress)

    name = "turn of the step loop"
    assert look(1, is_due=True) == {name: (0.0, 4.0)}
    at.now_s = 103.0
    assert look(1, is_due=True) == {name: (3.0, 4.0)}
    assert look(2, is_due=True) == {name: (0.0, 4.0)}
    assert look(2, is_due=False) == {}
