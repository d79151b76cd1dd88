"""What an instance does with the registry's message."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.fsm.instance import Instance
from epd.fsm.kernel import Event
from epd.messages import (
    Address,
    EncodeRequest,
    MediaItem,
    Membership,
    PrefillRequest,
    SamplingParams,
    Welcome,
)
from epd.roles.gateway.registry import Registry
from epd.transport.base import Received
from epd_lab.sim.client import Clients
from epd_lab.sim.cluster import GATEWAY, Cluster, Settings
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import Ask, mm_hash_of
from epd_lab.sim.world import World
from tests.roles.desk import desk
from tests.roles.simulated import Simulated, simulated


def told(cluster: Simulated, name: str, lost: tuple[Address, ...] = ()) -> None:
    """The registry says again who is there, and who is lost."""
    member = cluster.instance(name).member
    present = tuple(i.info for i in cluster.gateway.registry.instances if i.present)
    epoch = cluster.gateway.actor.address.epoch
    message = Membership(version=member.places[0].version + 1, instances=present, lost=lost)
    cluster.item(name, member.on_membership, Received(GATEWAY, epoch, message))


def test_who_is_lost_is_told_to_every_role_once() -> None:
    with simulated("1e1p1d") as cluster:
        actor = cluster.instance("e0").actor
        role = mock.Mock(live=dict)
        actor.components.append(role)
        gone = Address("p9", 1, "")
        told(cluster, "e0", (gone,))
        told(cluster, "e0", (gone,))
        role.peer_lost.assert_called_once_with(gone)
        assert actor.is_lost(gone)


def test_peers_are_connected_once_and_nobody_to_itself() -> None:
    with simulated("1e1p1d") as cluster:
        actor = cluster.instance("e0").actor
        met = [name for name in ("p0", "d0", "e0") if actor.is_lost(Address(name, 0, ""))]
        assert met == ["p0", "d0"], "an earlier life of these would be over"
        with mock.patch.object(actor, "connect") as connect:
            told(cluster, "e0")
        connect.assert_not_called()


@pytest.mark.parametrize("name", ["e0", "p0", "d0"])
def test_who_was_not_told_the_time_takes_no_work(name: str) -> None:
    """Its welcomes are lost for a while, and its own clock is a day ahead."""
    world = World(1)
    world.set_s[name] = 86400.0
    cluster = Cluster(world, "1e1p1d", Settings())
    welcome = Registry.welcome

    def lost(registry: Registry, instance: Instance, event: Event) -> None:
        if instance.info.address.instance_id != name or world.loop.now_s > 1.0:
            welcome(registry, instance, event)

    with mock.patch.object(Registry, "welcome", lost):
        cluster.start()
        world.loop.run_until(0.5)
        asked = Clients(cluster, ()).add(Ask(0, 0.5, (11, 12, 13), ((1, Image("one")),), 3, 2))
        world.loop.run_until(10.0)
    world.close()
    assert asked.finish_reason and asked.error is None


@pytest.mark.parametrize("down_s", [0.1, 4.0])
def test_a_new_gateway_counts_anew(down_s: float) -> None:
    """What it lists is news, though the former one had come to a higher number."""
    with simulated("1e1p1d") as cluster:
        world = cluster.world
        for _ in range(3):
            world.kill("e0")
            cluster.cluster.restart_later("e0", 0.1)
            cluster.pass_time(1.0)
        for name in (GATEWAY, "e0"):
            world.kill(name)
            cluster.cluster.restart_later(name, down_s)
        cluster.pass_time(down_s + 3.0)
        gateway = cluster.gateway.registry
        for name in ("p0", "d0"):
            assert cluster.instance(name).member.places[0].version == gateway.version
            assert cluster.instance(name).actor.is_listed(Address("e0", 5, ""))
            assert not cluster.instance(name).actor.is_listed(Address("e0", 4, ""))


@pytest.mark.parametrize("word", ["welcome", "publish"])
def test_a_former_gateway_is_lost_whatever_its_successor_says_first(word: str) -> None:
    with simulated("1e1p1d") as cluster:
        member = cluster.instance("d0").member
        epoch = cluster.gateway.actor.address.epoch
        role = mock.Mock(live=dict)
        member.actor.components.append(role)
        words = {
            "welcome": (
                member.on_welcomed,
                Welcome(epoch=1, heartbeat_interval_s=0.4, cluster_s=0.0, wall_s=0.0),
            ),
            "publish": (member.on_membership, Membership(version=1, instances=(), lost=())),
        }
        for handler, message in (words[word], *words.values()):
            cluster.item("d0", handler, Received(GATEWAY, epoch + 1, message))
        former = mock.call(Address(GATEWAY, epoch, ""))
        assert role.peer_lost.call_args_list.count(former) == 1


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.parametrize("kind", ["prefill", "encode"])
def test_what_a_former_gateway_asks_is_not_begun(kind: str, epoch: int) -> None:
    """Nobody reads the answer, and whom it names nobody may ever declare lost."""
    name, encoder, shown = f"{kind[0]}0", Address("e0", 1, ""), Image("one")
    with desk("1e1p1d", name, kind) as at:
        member = at.cluster.instance(name).member
        at.do(
            member.on_welcomed,
            Received(
                GATEWAY, 3, Welcome(epoch=1, heartbeat_interval_s=0.4, cluster_s=0.0, wall_s=0.0)
            ),
        )
        decode, gateway = Address("d0", 1, ""), Address(GATEWAY, epoch, "")
        key, grid, rows = mm_hash_of(shown), shown.grid_thw, shown.num_rows
        item = MediaItem(
            index=0,
            mm_hash=key,
            offset=1,
            num_rows=rows,
            grid_thw=grid,
            room="r/1/0",
            encoder=encoder,
        )
        tokens = (11, *(golden.IMAGE_TOKEN,) * rows, 12)
        sampling = SamplingParams(max_tokens=5)
        prompt = PrefillRequest(
            request_id="r",
            attempt=1,
            token_ids=tokens,
            num_emitted=0,
            items=(item,),
            sampling=sampling,
            decode=decode,
            gateway=gateway,
            deadline_s=20.0,
        )
        image = EncodeRequest(
            request_id="r",
            attempt=1,
            room="r/1/0",
            mm_hash=key,
            num_rows=rows,
            grid_thw=grid,
            consumer=Address("p0", 1, ""),
            first_token_deadline_s=20.0,
        )
        asked, payloads = (prompt, ()) if kind == "prefill" else (image, (shown.image(),))
        at.tell(f"on_{kind}_request", asked, GATEWAY, *payloads, epoch=epoch)
        assert bool(at.said) == (epoch == 3)
        owned = at.cluster.node(name).live()
        assert any(owned.values()) == (epoch == 3), owned
