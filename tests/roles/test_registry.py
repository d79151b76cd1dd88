"""The registry after a cut: one line, however often the instance has asked."""

from __future__ import annotations

from unittest import mock

import pytest
from msgspec.structs import replace

from epd.config import InstanceConfig
from epd.messages import PROTOCOL_VERSION, Address, Join
from epd.transport.base import Received
from epd_lab.sim import strangers
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import FINGERPRINT, GATEWAY, Cluster, Settings
from epd_lab.sim.golden import Image
from epd_lab.sim.process import SimProcess
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import World


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
    asked = Received(
        "e0",
        1,
        Join(protocol_version=PROTOCOL_VERSION, model_fingerprint=FINGERPRINT, info=lost.info),
    )
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


def set_back(world: World, cluster: Cluster, name: str) -> None:
    """Its next life is numbered below this one: the clock of its host was set back."""
    world.kill(name)
    world._epochs[name] = 5
    cluster.restart_later(name, 0.5)


@pytest.mark.parametrize("name", ["e0", "pd0", GATEWAY])
def test_a_life_that_was_numbered_lower_is_a_member(name: str) -> None:
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    for instance_id in (GATEWAY, "e0", "pd0"):
        world._epochs[instance_id] = 1000
    cluster.start()
    world.loop.run_until(1.0)
    set_back(world, cluster, name)
    world.loop.run_until(8.0)
    gateway = cluster.node(GATEWAY)
    assert gateway is not None
    assert gateway.gateway is not None
    lives = {n: 6 if n == name else 1001 for n in ("e0", "pd0")}
    members = {i.key: i.present for i in gateway.gateway.registry.instances}
    assert members == {f"{n}:{epoch}": True for n, epoch in lives.items()}
    for here, there in (("e0", "pd0"), ("pd0", "e0")):
        node = cluster.node(here)
        assert node is not None
        assert node.actor.is_listed(Address(there, lives[there], ""))
        assert node.instance is not None
        assert node.instance.member.membership.gateway_epoch == gateway.process.epoch
    clients = Clients(cluster, ())
    asked = clients.add(Ask(0, 8.0, (11, 12, 13), ((1, Image("probe")),), 3, 2))
    world.loop.run_until(10.0)
    assert asked.finish_reason
    world.close()


def test_a_late_join_of_a_life_that_was_followed_is_not_heard() -> None:
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    cluster.start()
    world.loop.run_until(1.0)
    gateway = cluster.node(GATEWAY)
    assert gateway is not None
    assert gateway.gateway is not None
    registry = gateway.gateway.registry
    (first,) = (i for i in registry.instances if i.key == "e0:1")
    world.kill("e0")
    cluster.restart_later("e0", 0.1)
    world.loop.run_until(2.0)
    world.kill("e0")  # its second life is over, too
    world.loop.run_until(6.0)
    late = Received(
        "e0",
        1,
        Join(protocol_version=PROTOCOL_VERSION, model_fingerprint=FINGERPRINT, info=first.info),
    )
    world.loop.call_soon(registry.on_join, late, context=gateway.process.context)
    world.loop.run_until(6.1)
    assert {i.key: i.present for i in registry.instances} == {"e0:2": False, "pd0:1": True}
    world.close()


@pytest.mark.parametrize(("knows", "at_once"), [(True, True), (False, False)])
def test_a_name_whose_process_the_kernel_knows_to_be_dead_is_taken_over_at_once(
    *, knows: bool, at_once: bool
) -> None:
    """F78: by a command that was started anew; of another host its silence has to tell."""
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())

    def of_parent(config: InstanceConfig, process: SimProcess) -> InstanceConfig:
        return replace(config, lineage=process.name)

    with (
        mock.patch.object(strangers, "of_parent", of_parent),
        mock.patch.object(strangers, "attend", strangers.attend if knows else mock.Mock()),
    ):
        cluster.start()
        world.loop.run_until(1.0)
        world.kill("e0")
        cluster.restart_later("e0", 0.1)
        for after_s, is_member in ((1.5, at_once), (4.0, True)):
            world.loop.run_until(after_s)
            gateway = cluster.node(GATEWAY)
            assert gateway is not None
            assert gateway.gateway is not None
            assert gateway.gateway.registry.is_present("e0", 2) == is_member
    world.close()


@pytest.mark.parametrize(("apart_s", "life"), [(4.0, 1), (9.0, 2)])
def test_who_comes_late_to_a_new_gateway_joins_anew(apart_s: float, life: int) -> None:
    """Its peers take it for living for a while, and then fence it, should they have to."""
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    cluster.start()
    world.loop.run_until(1.0)
    for ends in (("e0", GATEWAY), (GATEWAY, "e0")):
        world.network.block(*ends)
    world.kill(GATEWAY)
    cluster.restart_later(GATEWAY, 0.1)
    world.loop.run_until(1.0 + apart_s)
    world.network.heal_all()
    world.loop.run_until(4.0 + apart_s)
    gateway = cluster.node(GATEWAY)
    assert gateway is not None
    assert gateway.gateway is not None
    members = {i.key: i.present for i in gateway.gateway.registry.instances}
    assert members == {f"e0:{life}": True, "pd0:1": True}
    world.close()


@pytest.mark.parametrize("first", ["e0", "pd0"])
def test_who_a_former_registry_gave_up_joins_anew(first: str) -> None:
    """Its peers have heard that it is lost, and may have fenced it; the next registry knows nothing
    of that, and hears of it from whoever joins, before the one who was given up or after it."""
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    cluster.start()
    world.loop.run_until(1.0)
    for ends in (("pd0", GATEWAY), (GATEWAY, "pd0")):
        world.network.block(*ends)
    world.loop.run_until(1.5 + cluster.settings.timing.lost_after_s)
    e0, last = cluster.node("e0"), "e0" if first == "pd0" else "pd0"
    assert e0 is not None and ("pd0", 1) in e0.actor.lost
    world.kill(GATEWAY)
    cluster.restart_later(GATEWAY, 0.1)
    world.network.block(last, GATEWAY)
    world.network.heal(GATEWAY, "pd0")
    if first == "pd0":
        world.network.heal("pd0", GATEWAY)
    world.loop.run_until(world.loop.now_s + 2.5)
    world.network.heal_all()
    world.loop.run_until(world.loop.now_s + 4.0)
    gateway = cluster.node(GATEWAY)
    assert gateway is not None
    assert gateway.gateway is not None
    members = {i.key: i.present for i in gateway.gateway.registry.instances}
    assert members == {"e0:1": True, "pd0:2": True}
    assert e0.actor.is_listed(Address("pd0", 2, ""))
    world.close()
