"""What is checked at the join: layouts and transports; a mismatch is refused with both values."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from epd.messages import TransportOffer
from epd.roles.compose import Engines, Instance
from epd_lab.bench.gateway.null_engine import CONTRACT, LAYOUT, NullLanguage, NullVision
from tests.patience import PATIENCE_S
from tests.roles.topologies.cluster import SMALL, Cluster

HERE, THERE = (
    TransportOffer(name="shm", domain="host-a"),
    TransportOffer(name="shm", domain="host-b"),
)
FAR = TransportOffer(name="tcp", domain="")


def language(**layout: Any) -> Engines:
    engine = NullLanguage()
    engine.kv_layout = msgspec.structs.replace(LAYOUT, **layout)
    engine.num_blocks = 64
    return Engines(language=engine)


async def answer_to(cluster: Cluster, instance: Instance) -> str:
    """Join: the reason of the refusal, or "welcome"."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    instance.member.on_rejected = heard.put_nowait
    instance.member.on_welcome = lambda: heard.put_nowait("welcome")
    instance.start()
    async with asyncio.timeout(PATIENCE_S):
        return await heard.get()


async def close(cluster: Cluster) -> None:
    for instance in cluster.instances.values():
        await instance.close()
    await cluster.gateway.close()


@pytest.mark.parametrize("other", [{"block_size": 32}, {"dtype": "float8_e4m3fn"}])
async def test_another_layout_is_refused_with_both(other: dict[str, Any]) -> None:
    cluster = Cluster()
    cluster.gateway.start()
    prefill = cluster.add("p0", ("prefill",), language(), engine=SMALL)
    decode = cluster.add("d0", ("decode",), language(**other), engine=SMALL)
    assert await answer_to(cluster, prefill) == "welcome"
    reason = await answer_to(cluster, decode)
    assert "kv_layout differs: p0" in reason
    for layout in (LAYOUT, msgspec.structs.replace(LAYOUT, **other)):
        assert all(f"{name}={getattr(layout, name)!r}" in reason for name in other)
    assert [i.info.address.instance_id for i in cluster.gateway.registry.instances] == ["p0"]
    await close(cluster)


async def test_other_rows_are_refused_with_both_contracts() -> None:
    cluster = Cluster()
    cluster.gateway.start()
    vision = NullVision()
    vision.contract = msgspec.structs.replace(CONTRACT, num_deepstack=3, row_width=64)
    assert await answer_to(cluster, cluster.add("p0", ("prefill",), language())) == "welcome"
    reason = await answer_to(cluster, cluster.add("e0", ("encode",), Engines(vision)))
    assert "row_contract differs" in reason
    assert "num_deepstack=0" in reason and "num_deepstack=3" in reason
    await close(cluster)


async def test_a_pair_without_a_common_transport_is_refused_with_both_lists() -> None:
    cluster = Cluster()
    cluster.gateway.start()
    prefill = cluster.add("p0", ("prefill",), language(), offers=(HERE,))
    encode = cluster.add("e0", ("encode",), Engines(NullVision()), offers=(THERE, FAR))
    assert await answer_to(cluster, prefill) == "welcome"
    reason = await answer_to(cluster, encode)
    assert "p0 offers shm (host-a); e0 offers shm (host-b), tcp" in reason
    await close(cluster)


async def test_each_pair_has_a_transport_of_its_own_and_ready_shows_it() -> None:
    cluster = Cluster()
    cluster.gateway.start()
    for name, offers in (("e0", (HERE, FAR)), ("e1", (THERE, FAR)), ("p0", (HERE, FAR))):
        role = "encode" if name[0] == "e" else "prefill"
        engines = Engines(NullVision()) if role == "encode" else language()
        instance = cluster.add(name, (role,), engines, offers=offers)
        assert await answer_to(cluster, instance) == "welcome"
    shown = {i["instance"]: i["transports"] for i in cluster.gateway.role.ready().instances}
    assert shown == {
        "e0": {"p0": "shm"},
        "e1": {"p0": "tcp"},
        "p0": {"e0": "shm", "e1": "tcp"},
    }
    await close(cluster)
