"""What is put together: what an instance says of itself, how it leaves, and how it ends."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.failure import Failure, FailureKind
from epd.messages import InstanceInfo
from epd.roles.compose import IDLE_CHECK_S, Engines
from epd.roles.prefill.held_prompts import HeldPrompts
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.golden import Image
from tests.roles.desk import desk
from tests.roles.simulated import DEFAULTS, Simulated, simulated

IMAGE = Image("one")
STORED = dataclasses.replace(
    DEFAULTS, encode=msgspec.structs.replace(DEFAULTS.encode, cache_dir="/rows")
)


def info_of(cluster: Simulated, name: str) -> InstanceInfo:
    return cluster.registered(name).info


def test_what_an_instance_says_of_itself_when_it_joins() -> None:
    with simulated("1e1p1d1epd") as cluster:
        slots, rows, kv = 12, golden.ROW_CONTRACT, golden.KV_LAYOUT
        for name, roles, num_slots, num_blocks, contract, layout in (
            ("e0", ("encode",), 0, 0, rows, None),
            ("p0", ("prefill",), slots, 64, rows, kv),
            ("d0", ("decode",), 0, 64, None, kv),
            ("epd0", ("encode", "prefill", "decode"), slots, 64, rows, kv),
        ):
            info = info_of(cluster, name)
            assert (info.address.instance_id, info.roles) == (name, roles)
            assert (info.num_slots, info.num_kv_blocks) == (num_slots, num_blocks), name
            assert (info.row_contract, info.kv_layout) == (contract, layout), name
            actor = cluster.instance(name).actor
            assert info.address == actor.address
            assert info.transports == actor.ports.transfers.offers != ()
            assert (info.host_id, info.pid) == ("sim", cluster.node(name).process.pid)
            assert info.max_queue == DEFAULTS.prefill.max_queue and not info.finds_rows


def test_who_finds_rows_in_storage_says_so() -> None:
    with simulated("1e1p1d1epd", STORED) as cluster:
        found = {name: info_of(cluster, name).finds_rows for name in ("e0", "p0", "d0", "epd0")}
        assert found == {"e0": False, "p0": True, "d0": False, "epd0": False}
        assert cluster.instance("p0").encode is not None
        assert cluster.instance("d0").encode is None


def test_what_a_heartbeat_tells_of_the_load() -> None:
    with simulated("1epd", STORED) as cluster:
        instance = cluster.instance("epd0")
        cluster.ask(IMAGE, max_tokens=3)
        cluster.pass_time(0.5)
        idle = instance.load()
        assert idle.open_requests == 0
        assert not any(dict(idle.live).values())
        cluster.node("epd0").devices[0].hung = True
        cluster.ask(Image("two"), max_tokens=3)
        instance.actor.counters.update({"odd": 7, "another": 1})
        instance.actor.bus.dropped["full"] = 3
        cluster.pass_time(0.2)
        with mock.patch.object(instance.links, "silent", return_value=("p9",)):
            load = instance.load()
        requests, encode = instance.requests, instance.encode
        assert requests is not None and encode is not None
        assert (load.open_requests, load.num_encoded) == (1, 1)
        assert load.free_kv_blocks == requests.pool.num_free > 0
        assert load.live == tuple(sorted(instance.live().items()))
        assert dict(load.live)["requests"] == 1
        assert dict(load.totals)["prefix_cache_queried_tokens"] > 0
        assert load.totals == tuple(sorted(requests.totals.items()))
        assert load.cache_sequence == encode.events.sequence > 0
        assert dict(load.events)["odd"] == 7 and list(load.events) == sorted(load.events)
        assert load.cache == encode.tiers.report() != ()
        assert load.silent_peers == ("p9",)
        assert dict(load.dropped)["full"] == 3
        assert load.histograms == instance.actor.times.told() != ()


def test_who_lacks_a_part_has_nothing_to_tell_of_it() -> None:
    with simulated("1e1p1d") as cluster:
        e0, d0 = cluster.instance("e0").load(), cluster.instance("d0").load()
        assert (e0.free_kv_blocks, e0.totals) == (0, ())
        assert (d0.cache, d0.num_encoded, d0.cache_sequence) == ((), 0, 0)
        assert d0.free_kv_blocks == 64


def drained(cluster: Simulated, name: str) -> list[bool]:
    """What draining comes to, when it has."""
    told: list[bool] = []

    async def leaves() -> None:
        told.append(await cluster.instance(name).drain())

    cluster.within(name, cluster.world.loop.create_task, leaves())
    return told


def test_who_drains_waits_for_what_is_open_and_then_leaves() -> None:
    with simulated("1epd") as cluster:
        instance = cluster.instance("epd0")
        record = cluster.ask(IMAGE, max_tokens=30, stops_at_eos=False)
        cluster.pass_time(0.02)
        assert instance.is_busy()
        let_go = mock.patch.object(HeldPrompts, "drained")
        leaves = mock.patch.object(instance.member, "leave", wraps=instance.member.leave)
        with leaves as leave, let_go as lets_go:
            told = drained(cluster, "epd0")
            cluster.pass_time(0.01)
            assert instance.member.places[0].machine.is_draining and lets_go.called
            for role in ("encode", "prefill", "decode"):
                refusal = instance.actor.refusal("gateway", role, 0, 1)
                assert refusal == Failure(FailureKind.AWAY, f"the {role} instance is draining")
            while not record.ended:
                assert not told and not leave.called
                cluster.pass_time(0.01)
            cluster.pass_time(2 * IDLE_CHECK_S + 0.1)
        assert told == [True] and leave.called and record.finish_reason


def test_what_came_before_the_drain_is_waited_for() -> None:
    with simulated("1epd") as cluster:
        instance = cluster.instance("epd0")
        busy = mock.patch.object(instance, "is_busy", return_value=True)

        async def both() -> None:
            instance.actor.mailbox.put("work", busy.start)  # in the same turn
            await instance.drain()

        with mock.patch.object(instance.member, "leave") as leave:
            cluster.within("epd0", cluster.world.loop.create_task, both())
            cluster.pass_time(0.01)
            assert instance.is_busy() and not leave.called
        busy.stop()


def test_what_does_not_end_in_time_is_left() -> None:
    with simulated("1epd") as cluster:
        cluster.node("epd0").devices[0].hung = True
        cluster.ask(IMAGE)
        cluster.pass_time(0.1)
        told = drained(cluster, "epd0")
        cluster.pass_time(DEFAULTS.timing.drain_timeout_s + DEFAULTS.timing.move_timeout_s - 0.1)
        assert not told
        cluster.pass_time(0.2)
        assert told == [False]


def test_a_doubt_keeps_nobody_busy() -> None:
    with simulated("1e1p1d") as cluster:
        instance = cluster.instance("p0")
        peer = cluster.instance("e0").actor.address
        cluster.within("p0", instance.links.doubt, peer)
        assert instance.live()["links_doubted"] == 1 and not instance.is_busy()


@pytest.mark.parametrize("stored", [True, False])
def test_an_instance_ends_its_roles_its_device_its_storage_and_then_its_memory(
    *, stored: bool
) -> None:
    closes = mock.AsyncMock()
    engines = mock.patch("epd_lab.sim.cluster.Engines", partial(Engines, close=closes.engines))
    with engines, simulated("1e1p1d", STORED if stored else DEFAULTS) as cluster:
        instance = cluster.instance("e0")
        ports: Any = instance.actor.ports
        instance.actor.close = closes.actor  # type: ignore[method-assign]
        ports.transfers.close = closes.memory
        if stored:
            ports.storage.close = closes.storage
        cluster.within("e0", cluster.world.loop.create_task, instance.close())
        cluster.pass_time(0.01)
        order = ["actor", "engines", *(["storage"] if stored else []), "memory"]
        assert [name for name, *_ in closes.mock_calls] == order


def test_a_gateway_without_affinity_serves_as_well() -> None:
    with simulated("1e1pd", dataclasses.replace(DEFAULTS, prefix_affinity=False)) as cluster:
        assert cluster.gateway.affinity is None
        record = cluster.ask(IMAGE, max_tokens=3)
        cluster.pass_time(0.5)
        assert record.finish_reason
        assert "prefix_keys" not in cluster.gateway.live()


def test_what_a_gateway_owns() -> None:
    with desk("2e2p2d", GATEWAY, "role") as at:
        gateway = at.cluster.gateway
        at.cluster.ask(IMAGE)
        at.cluster.pass_time(0.0)
        at.cluster.within(GATEWAY, gateway.links.doubt, at.cluster.instance("e0").actor.address)
        live = gateway.live()
        assert (live["generations"], live["assigned"]) == (1, 3)
        assert (live["links_doubted"], live["prefix_keys"]) == (1, 1)
