"""What /metrics says of the bus of each process."""

from __future__ import annotations

from epd.sim.cluster import GATEWAY, Cluster, Settings
from epd.sim.world import World


def test_what_a_bus_drops_is_counted_per_instance() -> None:
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    cluster.start()
    world.loop.run_until(1.0)
    dropped = {"e0": "malformed", "pd0": "queue_full", GATEWAY: "stale_target"}
    for name, kind in dropped.items():
        node = cluster.node(name)
        assert node is not None
        node.ports.bus.dropped[kind] += 3
    world.loop.run_until(2.0)
    gateway = cluster.node(GATEWAY)
    assert gateway is not None
    assert gateway.gateway is not None
    samples = gateway.gateway.role.metrics()
    found = {s.labels: s.value for s in samples if s.name == "epd_bus_dropped_total"}
    assert found == {(("instance", n), ("kind", kind)): 3 for n, kind in dropped.items()}
    world.close()
