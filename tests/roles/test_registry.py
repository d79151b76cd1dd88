"""The registry after a cut: one line, however often the instance has asked."""

from __future__ import annotations

from epd.messages import PROTOCOL_VERSION, Join
from epd.sim.cluster import FINGERPRINT, GATEWAY, Cluster, Settings
from epd.sim.world import World
from epd.transport.base import Received


def test_a_cut_makes_one_line_and_a_new_life_joins() -> None:
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    cluster.start()
    world.loop.run_until(1.0)
    for ends in (("e0", GATEWAY), (GATEWAY, "e0")):
        world.network.block(*ends)
    world.loop.run_until(30.0)
    gateway = cluster.node(GATEWAY)
    assert gateway is not None
    assert gateway.gateway is not None
    (lost,) = (i for i in gateway.gateway.registry.instances if i.key == "e0:1")
    asked = Received("e0", 1, Join(PROTOCOL_VERSION, FINGERPRINT, lost.info))
    for _ in range(900):  # what waited in the connection comes all at once
        world.loop.call_soon(
            gateway.gateway.registry.on_join, asked, context=gateway.process.context
        )
    world.network.heal_all()
    world.loop.run_until(40.0)
    assert sum("join refused" in line for line in gateway.warnings) == 1
    members = {i.key: i.present for i in gateway.gateway.registry.instances}
    assert members == {"e0:2": True, "pd0:1": True}
    world.close()
