"""The gateway's roles in a simulated cluster."""

from __future__ import annotations

from epd.api.port import Leave
from epd.sim.cluster import GATEWAY
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
