"""The gateway's roles in a simulated cluster."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.frontend import Leave, Refused
from epd.fsm import generation as fsm
from epd.roles.gateway.registry import Registry
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import Ask
from tests.roles.simulated import simulated


def test_a_gateway_is_busy_from_admission_to_the_end() -> None:
    """Also while nothing was placed yet: who shuts it down would cut a prompt in preparation."""
    with simulated("1e1pd") as cluster:
        gateway = cluster.gateway
        assert not gateway.is_busy()
        stream = cluster.within(GATEWAY, gateway.role.admit)
        assert gateway.is_busy()
        cluster.within(GATEWAY, stream.cancel, Leave.GONE, "the client left")
        cluster.pass_time(1.0)
        assert not gateway.is_busy()


def test_who_waits_for_the_conclusion_is_told_of_it() -> None:
    with simulated("1e1pd") as cluster:
        stream = cluster.within(GATEWAY, cluster.gateway.role.admit)
        told: list[bool] = []
        stream.on_concluded = lambda: told.append(True)
        cluster.pass_time(0.5)
        assert not told
        cluster.within(GATEWAY, stream.cancel, Leave.GONE, "the client left")
        cluster.pass_time(1.0)
        assert told == [True]


def test_an_image_that_takes_long_is_asked_for_once() -> None:
    """A stage that ends with rows: the encoder has accepted, so silence is no reason to go on."""
    with simulated("2e1pd") as cluster:
        role = cluster.gateway.role
        for name in ("e0", "e1"):
            cluster.node(name).devices[0].hung = True
        ask = Ask(1, 0.0, (11, 12, 13), ((1, Image("slow")),), 3, 1)
        stream = cluster.within(GATEWAY, role.submit, ask.generation("encode"))
        machine = role.current(stream.request_id, 1)
        assert machine is not None
        cluster.pass_time(2 * cluster.settings.timing.accept_timeout_s)
        assert machine.attempt == 1
        for name in ("e0", "e1"):
            cluster.within(name, cluster.node(name).devices[0].release)
        cluster.pass_time(1.0)
        assert machine.terminal and machine.attempt == 1


def test_who_does_not_confirm_an_abort_is_not_waited_for() -> None:
    with simulated("1e1p1d") as cluster:
        timing = cluster.settings.timing
        cluster.node("d0").devices[0].hung = True
        stream = cluster.within(
            GATEWAY, cluster.gateway.role.submit, Ask(1, 0.0, (11,), (), 30, 1).generation()
        )
        cluster.pass_time(0.3)
        for name in ("p0", "d0"):  # silent, and not yet lost
            cluster.world.network.block(name, GATEWAY)
        cluster.within(GATEWAY, stream.cancel, Leave.GONE, "the client left")
        cluster.pass_time(0.5 * timing.abort_timeout_s)
        assert cluster.gateway.is_busy()
        cluster.pass_time(0.7 * timing.abort_timeout_s)
        assert not cluster.gateway.is_busy()


def test_who_has_left_is_not_watched() -> None:
    with simulated("2e1pd") as cluster:
        watches = [f"INSTANCE e0:1 {mark}" for mark in ("HeartbeatMissed", "HeartbeatsEnded")]
        assert {*watches} <= {*cluster.gateway.actor.timers}
        cluster.within("e0", cluster.instance("e0").member.leave)
        cluster.pass_time(0.1)
        assert not {*watches} & {*cluster.gateway.actor.timers}


def test_a_loss_after_an_attempt_is_not_blamed_for_it() -> None:
    """Who is lost while the next attempt waits has not failed the one before: its successor may
    be the only instance where none has failed."""
    with simulated("1e1p1d") as cluster:
        ask = Ask(1, 0.0, (11, 12, 13), (), 3, 1)
        stream = cluster.within(GATEWAY, cluster.gateway.role.submit, ask.generation())
        machine = cluster.gateway.role.current(stream.request_id, 1)
        assert machine is not None
        for name in ("d0", "p0"):
            cluster.world.kill(name)
            cluster.pass_time(cluster.settings.timing.lost_after_s + 0.5)
            assert machine.state is fsm.S.AWAITING_TOPOLOGY  # there is no other
        assert machine.avoided == {"d0"}


def test_nobody_waits_for_a_first_instance_that_is_not_started() -> None:
    with simulated("1e1pd") as cluster:
        role, dispatcher = cluster.gateway.role, cluster.gateway.dispatcher
        dispatcher.first_join_within_s = 0.0
        cluster.within(GATEWAY, role.admit)  # who has joined may be back
        with mock.patch.object(Registry, "instances", ()):
            with pytest.raises(Refused, match="no instance has joined") as refusal:
                cluster.within(GATEWAY, role.admit)
            assert refusal.value.status == 503 and role.outcomes == {"rejected": 1}
            dispatcher.first_join_within_s = cluster.world.loop.now_s + 1.0
            cluster.within(GATEWAY, role.submit, Ask(1, 0.0, (11,), (), 3, 1).generation())
            assert role.open_ones()[-1].state is fsm.S.AWAITING_TOPOLOGY
        cluster.pass_time(1.0)
        assert role.outcomes == {"rejected": 1, "finished": 1}
