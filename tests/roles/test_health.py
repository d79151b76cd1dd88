"""Health by progress at both ends: a frozen device, its self-test, its end, and what is shown."""

from __future__ import annotations

from epd.fsm.instance import S
from epd.messages import SelfTest, SelfTestResult
from epd.roles.health import ENDS
from tests.roles.desk import desk
from tests.roles.simulated import DEFAULTS, Simulated, simulated

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
