"""Every backend passes the contract of TransferEngine and leaves neither files nor descriptors."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from epd.messages import Address
from epd.transport.backend import Backend, BackendSettings
from epd.transport.backends import named
from epd.transport.base import Reference, TransferEngine, TransportError, WriteFailed, Written
from epd.transport.cuda.backend import CudaTransferEngine
from epd.transport.files.backend import FileTransferEngine
from epd.transport.host import this_host_id
from epd.transport.linked.leave import End, LeaveEngine, Moved
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.mooncake.backend import MooncakeTransferEngine
from epd.transport.mooncake.library import missing
from epd.transport.nixl.backend import NixlTransferEngine
from epd.transport.nixl.library import missing as nixl_missing
from epd.transport.region import WriteRefused
from epd.transport.routing import RoutingTransferEngine
from epd.transport.shm.backend import ShmTransferEngine
from epd.transport.tcp import TcpTransferEngine
from tests.contract.transfer_kit import (
    DOUBT_CHECKS,
    LENT_CHECKS,
    TRANSFER_CHECKS,
    Check,
    Doubt,
    half_a_gibibyte,
    name_of,
    pattern,
    sixty_four_mib,
)
from tests.patience import PATIENCE_S
from tests.transport import fake_device
from tests.transport.fake_device import FakeDevice

Make = Callable[[str, int], TransferEngine]


class World:
    """Engines of one kind, and a directory of their own in shared memory."""

    def __init__(self, make: Make, directory: str) -> None:
        self._make = make
        self._directory = directory
        self._engines: list[TransferEngine] = []

    def engine(self, instance_id: str, epoch: int = 1) -> TransferEngine:
        engine = self._make(instance_id, epoch)
        self._engines.append(engine)
        return engine

    async def dead_peer(self) -> tuple[Address, str, int]:
        code = (
            "import os, signal\n"
            "from epd.transport.backend import BackendSettings\n"
            "from epd.transport.shm.backend import ShmTransferEngine\n"
            f"engine = ShmTransferEngine(BackendSettings('casualty', 3), {self._directory!r})\n"
            "engine.allocate('pool', 2, 4096)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
        await process.wait()
        return Address("casualty", 3, ""), this_host_id(), process.pid

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


def _local(directory: str) -> Make:
    memory = LocalMemory()
    return lambda name, epoch: LocalTransferEngine(BackendSettings(name, epoch, True), memory)


def _shm(directory: str) -> Make:
    return lambda name, epoch: ShmTransferEngine(BackendSettings(name, epoch, True), directory)


def _routing(memory: Callable[[], LocalMemory], *backends: Backend) -> Make:
    return lambda name, epoch: RoutingTransferEngine(
        BackendSettings(name, epoch), memory(), backends, checksums="always"
    )


def _shm_in(directory: str) -> Backend:
    def make(its: BackendSettings) -> ShmTransferEngine:
        return ShmTransferEngine(its, directory)

    return replace(named("shm"), make=make)


def _all_in_one(directory: str) -> Make:
    memory = LocalMemory()
    return _routing(lambda: memory)


def _stages_meet(directory: str) -> Make:
    memory = LocalMemory()
    return _routing(lambda: memory, _shm_in(directory))


def _stages_apart(directory: str) -> Make:
    return _routing(LocalMemory, _shm_in(directory))  # as if each were a process of its own


def _tcp(directory: str) -> Make:
    return lambda name, epoch: TcpTransferEngine(BackendSettings(name, epoch, True))


def _file(directory: str) -> Make:
    return lambda name, epoch: FileTransferEngine(
        BackendSettings(name, epoch, True, directory=directory)
    )


def _mooncake(directory: str) -> Make:
    if reason := missing():
        pytest.skip(reason)
    return lambda name, epoch: MooncakeTransferEngine(BackendSettings(name, epoch, True))


def _nixl(directory: str) -> Make:
    if reason := nixl_missing():
        pytest.skip(reason)
    return lambda name, epoch: NixlTransferEngine(BackendSettings(name, epoch, True))


def _nixl_on_gpu(directory: str) -> Make:
    if reason := nixl_missing():
        pytest.skip(reason)
    return lambda name, epoch: fake_device.NixlOnFakeDevice(BackendSettings(name, epoch, True))


def _cuda(directory: str) -> Make:
    return lambda name, epoch: CudaTransferEngine(
        BackendSettings(name, epoch, True), FakeDevice(), directory
    )


KINDS = [
    _local, _shm, _all_in_one, _stages_meet, _stages_apart, _tcp, _file, _mooncake, _nixl,
    _nixl_on_gpu, _cuda,
]  # fmt: skip
ROUTED = (_all_in_one, _stages_meet, _stages_apart)


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="epd-test-") as made:
        yield made


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__.strip("_"))
async def world(request: pytest.FixtureRequest, directory: str) -> AsyncIterator[World]:
    descriptors_before = len(os.listdir("/proc/self/fd"))
    made = World(request.param(directory), directory)
    yield made
    await made.close()
    assert [name for name in os.listdir(directory) if "casualty" not in name] == []
    if request.param in {_mooncake, _nixl, _nixl_on_gpu}:
        return  # an engine of theirs keeps its own where somebody may still write to it
    async with asyncio.timeout(PATIENCE_S):  # a copy thread lets go of its last views late
        while len(os.listdir("/proc/self/fd")) > descriptors_before or _is_mapped(directory):
            await asyncio.sleep(0.001)


def _is_mapped(directory: str) -> bool:
    with open("/proc/self/maps", encoding="ascii") as maps:
        mapped = maps.read()
        return directory in mapped or fake_device.NAME in mapped


@pytest.mark.parametrize("check", TRANSFER_CHECKS, ids=name_of)
async def test_contract(check: Check, world: World) -> None:
    await check(world)


@pytest.mark.long
@pytest.mark.parametrize("check", [sixty_four_mib, half_a_gibibyte], ids=name_of)
async def test_contract_with_big_buffers(
    check: Check, world: World, request: pytest.FixtureRequest
) -> None:
    if check is half_a_gibibyte and request.node.callspec.params["world"] in ROUTED:
        pytest.skip("routing adds nothing to the backends, which do it themselves")
    await check(world)


# --- outcomes in doubt: only where somebody else moves the bytes ----------------------------------


class TcpDoubt(World):
    """The owner stops reading in the middle of a payload; the writer gives up."""

    async def doubt(self) -> Doubt:
        owner = TcpTransferEngine(BackendSettings("owner", 1))
        writer = TcpTransferEngine(BackendSettings("writer", 3))
        self._engines += [owner, writer]
        region = owner.allocate("pool", 1, 32 << 20)
        assert isinstance(await writer.write([b"hello"], region.remote, (0,)), Written)
        writer._stall_timeout_s = writer._answer_timeout_s = 0.2  # no write will be whole any more
        (wire,) = owner._links._inbound["writer", 3]
        wire._transport.pause_reading()

        def go_on() -> None:
            if not wire.severed:
                wire._transport.resume_reading()

        outcome = await writer.write([bytes(32 << 20)], region.remote, (0,))
        return Doubt(
            outcome, owner, region, (Address("writer", 3, ""), this_host_id(), os.getpid()), go_on,
            (writer, (Address("owner", 1, ""), this_host_id(), os.getpid())),
        )  # fmt: skip


class MoverDoubt(World):
    """The library says that a piece failed, which it also says of some that land."""

    async def doubt(self) -> Doubt:
        owner, writer = self.engine("owner"), self.engine("writer", 3)
        assert isinstance(owner, LeaveEngine) and isinstance(writer, LeaveEngine)
        region = owner.allocate("pool", 1, 1 << 20)
        transfer = writer._mover.transfer

        def broken(to: Any, pieces: Any) -> Moved:
            transfer(to, pieces)  # it did land
            return Moved(End.BROKEN)

        writer._mover.transfer = broken
        outcome = await writer.write([bytes(1 << 20)], region.remote, (0,))
        del writer._mover.transfer
        return Doubt(
            outcome, owner, region, (Address("writer", 3, ""), this_host_id(), os.getpid()),
            lambda: None, (writer, (Address("owner", 1, ""), this_host_id(), os.getpid())),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "make"), [(TcpDoubt, _tcp), (MoverDoubt, _mooncake), (MoverDoubt, _nixl)]
)
@pytest.mark.parametrize("check", DOUBT_CHECKS, ids=name_of)
async def test_contract_of_doubt(check: Check, kind: Any, make: Any, directory: str) -> None:
    world = kind(make(directory), directory)
    await check(world)
    await world.close()


@pytest.mark.parametrize("kind", [_local, _tcp, _mooncake, _nixl])
@pytest.mark.parametrize("check", LENT_CHECKS, ids=name_of)
async def test_contract_of_lending(check: Check, kind: Any, directory: str) -> None:
    world = World(kind(directory), directory)
    await check(world)
    await world.close()


# --- what only hops inside a process promise ------------------------------------------------------


@pytest.mark.parametrize("kind", [_local, _all_in_one, _stages_meet])
async def test_a_deposit_is_the_producers_own_memory(directory: str, kind: Callable) -> None:
    world = World(kind(directory), directory)
    producer, consumer = world.engine("encode"), world.engine("prefill")
    region = consumer.allocate("rows", 8, 1000, by_reference=True)
    rows = [np.full(1500, 1, np.uint8), np.full(1000, 2, np.uint8)]
    assert isinstance(await producer.write(rows, region.remote, (4, 2, 7)), Written)
    views = region.views((4, 2, 7), 2500)
    shared = [
        np.shares_memory(np.frombuffer(view, np.uint8), array)
        for view, array in zip(views, rows, strict=True)
    ]
    assert shared == [True, True]
    assert len(region._deposits) == 3  # type: ignore[attr-defined]
    region.forget((2,))
    assert len(region._deposits) == 0  # type: ignore[attr-defined]
    await world.close()


@pytest.mark.parametrize("kind", [_local, _all_in_one, _stages_meet])
async def test_a_reference_is_handed_on_as_it_is(directory: str, kind: Callable) -> None:
    """What holds the bytes may be anything; only memory of this process takes it."""
    world = World(kind(directory), directory)
    producer, consumer = world.engine("encode"), world.engine("prefill")
    region = consumer.allocate("rows", 8, 1000, by_reference=True)
    held = Reference(object(), 2500)
    assert await producer.write([held], region.remote, (4, 2, 7)) == Written(2500, 0)
    (found,) = region.views((4, 2, 7), 2500)
    assert found is held
    region.forget((2,))
    assert len(region._deposits) == 0  # type: ignore[attr-defined]
    assert isinstance(await producer.write([held], region.remote, (4, 2)), WriteFailed)
    copied = consumer.allocate("kv", 8, 1000)
    assert isinstance(await producer.write([held], copied.remote, (4, 2, 7)), WriteFailed)
    for target, takes in ((region, True), (copied, False)):
        if isinstance(producer, RoutingTransferEngine):
            assert producer.takes_references(target.remote) is takes
    await world.close()


async def test_fewer_bytes_than_asked_is_an_error(directory: str) -> None:
    world = World(_local(directory), directory)
    producer, consumer = world.engine("encode"), world.engine("prefill")
    region = consumer.allocate("rows", 8, 1000, by_reference=True)
    await producer.write([bytes(1200)], region.remote, (1, 2))
    with pytest.raises(WriteRefused, match="fewer than 1201"):
        region.views((1, 2), 1201)
    with pytest.raises(WriteRefused, match="not one of"):
        region.views((8,), 1)
    await world.close()


async def test_without_a_common_backend_the_write_fails_with_a_remedy(directory: str) -> None:
    alone = RoutingTransferEngine(BackendSettings("a", 1), LocalMemory())
    world = World(_shm(directory), directory)
    region = world.engine("b").allocate("pool", 1, 64)
    outcome = await alone.write([bytes(64)], region.remote, (0,))
    assert isinstance(outcome, WriteFailed) and "start both with the same one" in outcome.reason
    await alone.close()
    await world.close()


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(TransportError, match="'carrier-pigeon': choose one of cuda, shm"):
        named("carrier-pigeon")


async def test_a_fenced_neighbour_in_this_process_is_barred(directory: str) -> None:
    world = World(_stages_meet(directory), directory)
    producer, consumer = world.engine("encode"), world.engine("prefill")
    region = consumer.allocate("rows", 1, 64)
    assert await consumer.fence(Address("encode", 1, ""), this_host_id(), os.getpid())
    assert isinstance(await producer.write([bytes(64)], region.remote, (0,)), WriteFailed)
    reborn = world.engine("encode", 2)
    assert isinstance(await reborn.write([bytes(64)], region.remote, (0,)), Written)
    await world.close()


async def test_checksums_off_is_zero(directory: str) -> None:
    world = World(lambda *life: ShmTransferEngine(BackendSettings(*life), directory), directory)
    region = world.engine("b").allocate("pool", 1, 1 << 20)
    data = pattern(1 << 20)
    assert await world.engine("a").write([data], region.remote, (0,)) == Written(1 << 20, 0)
    assert region.buffer == data
    await world.close()
