"""The gateway's roles, alone or in a simulated cluster."""

from __future__ import annotations

from epd.api.port import Leave
from epd.sim.cluster import GATEWAY, Cluster, Settings
from epd.sim.world import World


def test_a_gateway_is_busy_from_admission_to_the_end() -> None:
    """Also while nothing was placed yet: who shuts it down would cut a prompt in preparation."""
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    cluster.start()
    world.loop.run_until(1.0)
    node = cluster.node(GATEWAY)
    assert node is not None and node.gateway is not None
    gateway = node.gateway
    assert not gateway.is_busy()
    stream = node.process.context.run(gateway.role.admit)
    assert gateway.is_busy()
    node.process.context.run(stream.cancel, Leave.GONE, "the client left")
    world.loop.run_until(2.0)
    assert not gateway.is_busy()
    world.close()
