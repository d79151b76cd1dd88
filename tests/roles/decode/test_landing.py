"""KV that comes to a pool as of a GPU: through a few slots of host memory, or from another device
straight into its blocks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.language.engine import TorchLanguageEngine
from epd.failure import Failure, FailureKind
from epd.fsm import incoming
from epd.fsm import request as fsm
from epd.messages import KvLayout
from epd.roles.compose import Engines
from epd.roles.decode.landing import Landing
from epd.roles.ports import Ports
from epd.tiny import CHECKPOINT
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.cuda.backend import CudaTransferEngine
from epd.transport.cuda.driver import CudaMemory
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.routing import RoutingTransferEngine
from epd_lab.sim.cluster import Settings
from epd_lab.sim.engine.golden import BLOCK_SIZE, KV_LAYOUT
from tests.roles.desk import desk
from tests.roles.prefill.test_hand_over import kv_state, offered
from tests.roles.topologies.cluster import Cluster
from tests.roles.topologies.golden import answer, assert_exact, question
from tests.roles.topologies.test_exactness import SMALL
from tests.transport.fake_device import FakeDevice

SLOTS = 8


class Staged:
    """A language engine whose pool only itself can reach, with a few blocks to land in."""

    kv_in_place = False

    def __init__(
        self,
        engine: TorchLanguageEngine,
        num_slots: int = SLOTS,
        kv_memory: CudaMemory | None = None,
    ) -> None:
        self._engine = engine
        self.num_landing_blocks = num_slots
        self.kv_memory = kv_memory
        if kv_memory is not None:
            engine.pool.attach(kv_memory.whole)
        self.num_landed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def attach_kv(self, buffer: memoryview) -> None:
        """What lands is named."""

    async def fetch_kv(
        self, slots: Sequence[int], *, in_place: bool, heads: range | None = None
    ) -> list[memoryview]:
        await asyncio.sleep(0.002)
        return [memoryview(bytes(view)) for view in self._engine.pool.slot_views(slots)]

    async def land_kv(
        self,
        memory: memoryview,
        slots: Sequence[int],
        blocks: Sequence[int],
        *,
        by_head: bool = False,
    ) -> None:
        await asyncio.sleep(0.002)
        nbytes = self._engine.kv_layout.block_nbytes
        targets = self._engine.pool.views(blocks)
        for slot, target in zip(slots, targets, strict=True):
            target[:] = memory[slot * nbytes : (slot + 1) * nbytes]
        self.num_landed += len(slots)


async def test_answers_are_exact_and_slots_come_back() -> None:
    """More requests than slots, with and without images, each one token by token as alone."""
    executor = build_executor(SMALL)
    cluster = Cluster()
    vision = build_vision(CHECKPOINT, SMALL, executor)
    cluster.add("e0", ("encode",), Engines(vision=vision), engine=SMALL)
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        engine: Any = Staged(build_language(CHECKPOINT, SMALL, executor))
        cluster.add(name, (role,), Engines(language=engine), engine=SMALL)
    asked = [await question(f"question {i}", i % 3, seed=i) for i in range(8)]
    async with cluster.running() as gateway:
        said = await asyncio.gather(*(answer(gateway, one) for one in asked))
        await cluster.settle()
    for tokens, one in zip(said, asked, strict=True):
        assert_exact(tokens, one)
    requests = cluster.instances["d0"].requests
    assert requests is not None
    staged: Any = requests.engine
    assert staged.num_landed > SLOTS, "slots were used again"
    await executor.close()


class Pooled:
    """As much of an engine as a landing needs."""

    kv_in_place = False
    num_landing_blocks = 4
    kv_layout = KvLayout(
        num_layers=3,
        block_size=16,
        num_kv_heads=1,
        head_dim=8,
        dtype="float32",
        block_nbytes=3 * 1024,
    )


def test_the_queue_is_in_order_and_lets_go() -> None:
    engine: Any = Pooled()
    landing = Landing(engine)
    assert engine.kv_layout.slots_per_block == 3
    for room, count in (("a", 3), ("b", 2), ("c", 1)):
        landing.join(room, tuple(range(10 * count, 11 * count)))
    leased = dict(landing.grants())
    assert list(leased) == ["a"], "b is first in the queue: c must not overtake it"
    assert leased["a"] == tuple(range(9)), "three slots of each of three blocks"
    landing.leave("b")
    leased |= landing.grants()
    assert leased["c"] == (9, 10, 11)
    for room in leased:
        landing.release(room)
    assert landing.num_leased == 0
    assert landing.fits(4) and not landing.fits(5)


@pytest.mark.parametrize("how", ["arrived", "failed", "called off", "leaves the line"])
def test_who_waits_for_memory_to_land_in_is_woken(how: str) -> None:
    """When some of it is free again, or who was first in line has left."""
    with desk("1e1p1d", "d0", "decode", Settings(num_landing_blocks=4)) as at:
        rooms = at.cluster.instance("d0").incoming
        (_, first), (second, line), (_, last) = (
            offered(at, 3 * BLOCK_SIZE, key="a"),
            offered(at, 3 * BLOCK_SIZE, key="b"),
            offered(at, BLOCK_SIZE, key="c"),
        )
        waits = incoming.S.AWAITING_LANDING
        assert [room.state is waits for room in (first, line, last)] == [False, True, True]
        num_leased = at.whole.requests.pool.num_leased
        if how == "arrived":
            first.kv = kv_state()
            with mock.patch.object(at.whole.requests, "fire"):
                at.do(lambda: at.role.concluded(first, None))
        elif how == "failed":
            failure = Failure(FailureKind.ENGINE, "because")
            at.do(rooms.fire, first, incoming.AbortReceived(failure))
        elif how == "called off":
            at.do(rooms.fire, first, incoming.CancelRequested())
            at.do(rooms.fire, first, incoming.CancelAcked())
        else:
            at.do(at.whole.requests.fire, second, fsm.AbortReceived())
        assert line.state is not waits and last.state is not waits
        assert how != "failed" or at.whole.requests.pool.num_leased == num_leased - 4


def test_who_is_near_waits_for_no_memory_to_land_in() -> None:
    """Its slots are those of its blocks, however many, and come back with these."""
    settings = Settings(num_landing_blocks=1, near=("p0", "d0"))
    with desk("1e1p1d", "d0", "decode", settings) as at:
        pool, rooms = at.whole.requests.pool, at.cluster.instance("d0").incoming
        (_, room), size = offered(at, 3 * BLOCK_SIZE, key="a"), KV_LAYOUT.slots_per_block
        assert room.state is incoming.S.RESERVED
        blocks = room.blocks[:3]
        assert [slot // size for slot in room.slots[::size]] == [*blocks]
        grant = at.role.grant(room)
        assert grant.region.backend == "near" and grant.slots == room.slots
        at.do(rooms.fire, room, incoming.CancelRequested())
        assert pool.holds(blocks), "it may still be written"
        at.do(rooms.fire, room, incoming.CancelAcked())
        assert not any(pool.holds((block,)) for block in blocks)


async def test_answers_are_exact_over_the_memory_of_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each instance with a table and a (fake) device of its own: rows go from the one's memory to
    the other's mirror, and KV to its pool, of any length.  None passes through host memory."""
    os.chmod(tmp_path, 0o700)
    monkeypatch.setattr(LocalTransferEngine, "domain", property(lambda self: str(id(self))))
    executor = build_executor(SMALL)
    cluster = Devices(tmp_path)
    cluster.add(
        "e0", ("encode",), Engines(vision=build_vision(CHECKPOINT, SMALL, executor)), engine=SMALL
    )
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        built = build_language(CHECKPOINT, SMALL, executor)
        engine: Any = Staged(built, 1, FakeDevice().allocate(built.pool.nbytes))
        cluster.add(name, (role,), Engines(language=engine), engine=SMALL)
    asked = [await question(f"question {i}", i % 3, seed=i) for i in range(6)]
    async with cluster.running() as gateway:
        said = await asyncio.gather(*(answer(gateway, one) for one in asked))
        await cluster.settle()
        decode, prefill = cluster.instances["d0"].requests, cluster.instances["p0"].embeddings
        assert decode is not None and prefill is not None
        for region in (decode.kv.own.region, prefill.region):
            assert bytes(region.buffer) == bytes(region.buffer.nbytes), "host memory is as it was"
        staged: Any = decode.engine
        assert staged.num_landed == 0
    for tokens, one in zip(said, asked, strict=True):
        assert_exact(tokens, one)
    await executor.close()


class Devices(Cluster):
    """Instances as in processes of their own, each with a device."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)
        super().__init__()

    def _ports(self, name: str, epoch: int) -> Ports:
        def make(its: BackendSettings) -> CudaTransferEngine:
            return CudaTransferEngine(its, FakeDevice(), self._directory)

        transfers = RoutingTransferEngine(
            BackendSettings(name, epoch, device="cuda"),
            LocalMemory(),
            [replace(named("cuda"), make=make)],
            checksums="always",
        )
        return replace(super()._ports(name, epoch), transfers=transfers)
