"""The registry after a cut: one line, however often the instance has asked."""

from __future__ import annotations

from unittest import mock

import pytest
from msgspec.structs import replace

from epd.config import InstanceConfig
from epd.messages import PROTOCOL_VERSION, Address, InstanceInfo, Join
from epd.transport.base import Received
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import FINGERPRINT, GATEWAY, Cluster, Settings
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.planes import strangers
from epd_lab.sim.workload import Ask
from epd_lab.sim.world import World
from tests.roles.simulated import Simulated, simulated


def members(at: Simulated) -> dict[str, bool]:
    return {i.key: i.present for i in at.gateway.registry.instances}


def cut(at: Simulated, name: str) -> None:
    at.world.network.block(name, GATEWAY)
    at.world.network.block(GATEWAY, name)


def begin_anew(at: Simulated, name: str, after_s: float = 0.1) -> None:
    at.world.kill(name)
    at.cluster.restart_later(name, after_s)


def ask_late(at: Simulated, info: InstanceInfo, times: int = 1) -> None:
    """The first life of e0 asks again, as from a connection that kept what was sent."""
    join = Join(protocol_version=PROTOCOL_VERSION, model_fingerprint=FINGERPRINT, info=info)
    asked, context = Received("e0", 1, join), at.node(GATEWAY).process.context
    for _ in range(times):
        at.world.loop.call_soon(at.gateway.registry.on_join, asked, context=context)


def first_life(at: Simulated) -> InstanceInfo:
    (first,) = (i for i in at.gateway.registry.instances if i.key == "e0:1")
    return first.info


def test_a_cut_makes_one_line_and_a_new_life_joins() -> None:
    with simulated("1e1pd") as at:
        cut(at, "e0")
        at.world.loop.run_until(30.0)
        ask_late(at, first_life(at), times=900)  # what waited in the connection comes all at once
        at.world.network.heal_all()
        at.world.loop.run_until(40.0)
        assert sum("join refused" in line for line in at.node(GATEWAY).warnings) == 1
        assert members(at) == {"e0:2": True, "pd0:1": True}


def set_back(world: World, cluster: Cluster, name: str) -> None:
    """Its next life is numbered below this one: the clock of its host was set back."""
    world.kill(name)
    world.epochs[name] = 5
    cluster.restart_later(name, 0.5)


@pytest.mark.parametrize("name", ["e0", "pd0", GATEWAY])
def test_a_life_that_was_numbered_lower_is_a_member(name: str) -> None:
    world = World(1)
    cluster = Cluster(world, "1e1pd", Settings())
    for instance_id in (GATEWAY, "e0", "pd0"):
        world.epochs[instance_id] = 1000
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
        assert node.instance.member.places[0].machine.gateway_epoch == gateway.process.epoch
    clients = Clients(cluster, ())
    asked = clients.add(Ask(0, 8.0, (11, 12, 13), ((1, Image("probe")),), 3, 2))
    world.loop.run_until(10.0)
    assert asked.finish_reason
    world.close()


def test_a_late_join_of_a_life_that_was_followed_is_not_heard() -> None:
    with simulated("1e1pd") as at:
        first = first_life(at)
        begin_anew(at, "e0")
        at.world.loop.run_until(2.0)
        at.world.kill("e0")  # its second life is over, too
        at.world.loop.run_until(6.0)
        ask_late(at, first)
        at.world.loop.run_until(6.1)
        assert members(at) == {"e0:2": False, "pd0:1": True}


@pytest.mark.parametrize(("knows", "at_once"), [(True, True), (False, False)])
def test_a_name_whose_process_the_kernel_knows_to_be_dead_is_taken_over_at_once(
    *, knows: bool, at_once: bool
) -> None:
    """F78: by a command that was started anew; of another host its silence has to tell."""

    def of_parent(config: InstanceConfig, process: SimProcess) -> InstanceConfig:
        return replace(config, lineage=process.name)

    with (
        mock.patch.object(strangers, "of_parent", of_parent),
        mock.patch.object(strangers, "attend", strangers.attend if knows else mock.Mock()),
        simulated("1e1pd") as at,
    ):
        begin_anew(at, "e0")
        for after_s, is_member in ((1.5, at_once), (4.0, True)):
            at.world.loop.run_until(after_s)
            assert at.gateway.registry.is_present("e0", 2) == is_member


@pytest.mark.parametrize(("apart_s", "life"), [(4.0, 1), (9.0, 2)])
def test_who_comes_late_to_a_new_gateway_joins_anew(apart_s: float, life: int) -> None:
    """Its peers take it for living for a while, and then fence it, should they have to."""
    with simulated("1e1pd") as at:
        cut(at, "e0")
        begin_anew(at, GATEWAY)
        at.pass_time(apart_s)
        at.world.network.heal_all()
        at.pass_time(3.0)
        assert members(at) == {f"e0:{life}": True, "pd0:1": True}


@pytest.mark.parametrize("first", ["e0", "pd0"])
def test_who_a_former_registry_gave_up_joins_anew(first: str) -> None:
    """Its peers have heard that it is lost, and may have fenced it; the next registry knows nothing
    of that, and hears of it from whoever joins, before the one who was given up or after it."""
    with simulated("1e1pd") as at:
        cut(at, "pd0")
        at.world.loop.run_until(1.5 + at.settings.timing.lost_after_s)
        e0, network = at.node("e0"), at.world.network
        assert ("pd0", 1) in e0.actor.lost
        begin_anew(at, GATEWAY)
        network.block("e0" if first == "pd0" else "pd0", GATEWAY)
        network.heal(GATEWAY, "pd0")
        if first == "pd0":
            network.heal("pd0", GATEWAY)
        at.pass_time(2.5)
        network.heal_all()
        at.pass_time(4.0)
        assert members(at) == {"e0:1": True, "pd0:2": True}
        assert e0.actor.is_listed(Address("pd0", 2, ""))
