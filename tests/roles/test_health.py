"""Health by progress: what counts as one, bounds by measured costs, self-tests and ends (F87)."""

from __future__ import annotations

from typing import Any

import pytest

from epd.fsm.instance import S
from epd.messages import Address, SelfTest, SelfTestResult
from epd.roles.health import ENDS
from epd.roles.progress import InstanceProgress, WorkPatience
from epd.scheduling.step_cost import STALL, StepCost
from tests.roles.desk import desk
from tests.roles.simulated import DEFAULTS, Simulated, simulated

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


TIMING = DEFAULTS.timing
BOUND_S = 2 * TIMING.suspect_after_s
BEAT_S = TIMING.heartbeat_interval_s


def warm(cluster: Simulated) -> None:
    """Each kind of step was measured."""
    cluster.ask()
    cluster.pass_time(1.0)


def freeze(cluster: Simulated, name: str = "d0") -> None:
    cluster.node(name).devices[0].hung = True


def test_a_frozen_device_is_out_of_placement_and_ready_names_it() -> None:
    with simulated("1e1p1d") as cluster:
        warm(cluster)
        assert cluster.gateway.role.ready().stages["decode"] == ["d0"]
        freeze(cluster)
        record = cluster.ask()
        cluster.pass_time(BOUND_S + 2 * BEAT_S)
        assert cluster.registered("d0").state is S.STUCK
        told = cluster.gateway.role.ready()
        assert not told.ok and told.stages == {"encode": ["e0"], "prefill": ["p0"], "decode": []}
        assert "no healthy instance has the role decode; d0 makes no progress: step" in told.reason
        (d0,) = (one for one in told.instances if one["instance"] == "d0")
        assert d0["waits"][0]["what"] == "step"
        assert d0["waits"][0]["for_s"] > d0["waits"][0]["bound_s"] >= BOUND_S
        samples = {(s.name, dict(s.labels).get("what")): s for s in cluster.gateway.role.metrics()}
        assert samples["epd_wait_seconds", "step"].value > BOUND_S
        assert samples["epd_wait_bound_seconds", "step"].value >= BOUND_S
        cluster.node("d0").devices[0].release()
        cluster.pass_time(2 * BEAT_S)
        assert cluster.registered("d0").state is S.HEALTHY and cluster.gateway.role.ready().ok
        cluster.pass_time(1.0)
        assert record.tokens and record.error is None
        assert cluster.gateway.actor.counters["instances_stuck"] == 1


def test_an_idle_device_is_tested_and_its_process_ends_beyond_a_second_bound() -> None:
    with simulated("2e1p1d") as cluster:
        freeze(cluster, "e0")
        cluster.pass_time(TIMING.lost_after_s + BOUND_S + 3 * BEAT_S)
        assert cluster.registered("e0").state is S.STUCK
        assert "self-test" in cluster.registered("e0").reason
        reasons: list[str] = []
        cluster.node("e0").actor.on_device_lost = reasons.append
        cluster.pass_time(ENDS * BOUND_S)
        (reason,) = reasons
        assert reason.startswith("no progress: self-test for 10.")


def test_who_asks_for_a_self_test_gets_one_outcome_of_the_device() -> None:
    with desk("1e1p1d", "e0", "health") as at:
        node = at.cluster.node("e0")
        node.devices[0].hung = True
        assert at.tell("on_self_test", SelfTest(serial=7), "gateway") == []
        at.cluster.pass_time(0.1)
        assert at.tell("on_self_test", SelfTest(serial=8), "gateway") == []
        node.devices[0].release()
        at.cluster.pass_time(0.1)
        assert at.messages() == [SelfTestResult(serial=8)]


def test_a_self_test_that_finds_a_lost_device_ends_the_life_and_any_other_is_told() -> None:
    with desk("1e1p1d", "e0", "health") as at:
        node = at.cluster.node("e0")
        reasons: list[str] = []
        at.actor.on_device_lost = reasons.append
        node.devices[0].fail_next = 1
        at.tell("on_self_test", SelfTest(serial=1), "gateway")
        at.cluster.pass_time(0.1)
        (told,) = at.messages()
        assert isinstance(told, SelfTestResult) and "out of memory" in told.reason
        assert reasons == []
        node.devices[0].lost = True
        at.tell("on_self_test", SelfTest(serial=2), "gateway")
        at.cluster.pass_time(0.1)
        assert len(reasons) == 1 and "illegal memory access" in reasons[0]
        assert at.actor.counters["faults"] == 2
