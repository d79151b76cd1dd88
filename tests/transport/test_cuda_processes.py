"""Memory of a device between real processes that die and freeze; host memory stands for it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.base import TransportError, WriteFailed, WriteUnknown, Written
from epd.transport.checksum import crc32
from epd.transport.cuda import BACKEND, CudaTransferEngine
from epd.transport.device import Column
from epd.transport.host import this_host_id
from epd.transport.host_memory import address_of
from tests.patience import PATIENCE_S
from tests.transport.fake_device import NAME, FakeDevice
from tests.transport.test_shm_processes import Family as ShmFamily

HERE = this_host_id()


class Family(ShmFamily):
    def device(
        self, instance_id: str, epoch: int = 1, made: FakeDevice | None = None, *,
        checksums: bool = False,
    ) -> CudaTransferEngine:  # fmt: skip
        engine = CudaTransferEngine(
            BackendSettings(instance_id, epoch, checksums), made or FakeDevice(), self.directory
        )
        self.devices.append(engine)
        return engine

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.devices: list[CudaTransferEngine] = []

    async def close(self) -> None:
        await super().close()
        for engine in self.devices:
            await engine.close()


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[Family]:
    os.chmod(tmp_path, 0o700)
    made = Family(str(tmp_path))
    yield made
    await made.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def num_mapped() -> int:
    """Mappings of a device's memory in this process."""
    return Path("/proc/self/maps").read_text().count(NAME)


async def test_a_writer_killed_in_the_middle_of_writes_is_fenced_by_its_end(family: Family) -> None:
    consumer = family.device("consumer")
    region = consumer.allocate("pool", 16, 1 << 20)
    described = msgspec.json.encode(region.remote).decode()
    pid, line = await family.child("fake-write", "producer", "4", described)
    assert line == "writing\n"
    peer = Address("producer", 4, "")
    for host_id, claimed in ((HERE, pid), ("another-boot-id", 1), (HERE, 0)):
        assert not await consumer.fence(peer, host_id, claimed), "what it says of itself is nothing"
    os.kill(pid, signal.SIGSTOP)
    assert not await consumer.fence(peer, HERE, pid), "a frozen one writes on when it thaws (F7)"
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while not await consumer.fence(peer, HERE, pid):
            await asyncio.sleep(0.01)
    region.buffer[:] = bytes([0xEE]) * region.buffer.nbytes
    await asyncio.sleep(0.1)
    assert region.buffer == bytes([0xEE]) * region.buffer.nbytes, "a byte landed after the fence"


async def test_a_fenced_life_gets_no_memory(family: Family) -> None:
    consumer, producer = family.device("consumer"), family.device("producer")
    region = consumer.allocate("pool", 1, 4096)
    assert await consumer.fence(Address("producer", 1, ""), HERE, os.getpid()), "it has none yet"
    outcome = await producer.write([b"x"], region.remote, (0,))
    assert isinstance(outcome, WriteFailed) and "fenced" in outcome.reason
    reborn = family.device("producer", 2)
    assert isinstance(await reborn.write([b"x"], region.remote, (0,)), Written)


async def test_a_dead_owners_memory_comes_back_unasked(family: Family) -> None:
    """No write is under way, and nobody asks for a fence."""
    producer = family.device("producer")
    pid, line = await family.child("fake-own", "consumer", "1")
    target = msgspec.json.decode(line, type=RemoteRegion)
    assert isinstance(await producer.write([bytes(64)], target, (3,)), Written)
    assert num_mapped() == 1
    os.kill(pid, signal.SIGKILL)
    await until(lambda: num_mapped() == 0)
    outcome = await producer.write([bytes(64)], target, (3,))
    assert isinstance(outcome, WriteFailed)
    sockets = [name for name in family.files() if name.endswith(".sock")]
    assert sockets == [target.locator], "a dead owner's socket stays"
    _, line = await family.child("fake-own", "consumer", "2")
    assert target.locator not in family.files(), "until the next owner sweeps"
    target = msgspec.json.decode(line, type=RemoteRegion)
    assert isinstance(await producer.write([bytes(64)], target, (3,)), Written)


async def test_an_owner_killed_in_the_middle_of_writes(family: Family) -> None:
    """The writer's outcomes are definite, and its own memory is not harmed."""
    producer = family.device("producer")
    pid, line = await family.child("fake-own", "consumer", "1")
    target = msgspec.json.decode(line, type=RemoteRegion)
    data = [bytes([7]) * (1 << 20)]
    writes = [asyncio.create_task(producer.write(data, target, (slot % 4,))) for slot in range(200)]
    await writes[0]
    os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*writes)
    assert {type(outcome) for outcome in outcomes} <= {Written, WriteFailed}
    await until(lambda: num_mapped() == 0)


async def test_what_is_revoked_under_a_write_is_unmapped_behind_it(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, producer = family.device("consumer"), family.device("producer")
    waits, passed = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        passed.wait(PATIENCE_S)

    monkeypatch.setattr(producer._device, "mark", lambda: wait)
    region = consumer.allocate("pool", 1, 4096)
    write = asyncio.create_task(producer.write([b"x"], region.remote, (0,)))
    await until(waits.is_set)
    consumer.revoke(region)
    await until(lambda: not producer._mapped)
    await asyncio.sleep(0.05)
    assert num_mapped() == 1, "a copy that is queued still goes there"
    passed.set()
    assert isinstance(await write, WriteFailed)
    await until(lambda: num_mapped() == 0)


@pytest.mark.parametrize(
    "locator", ["../0123456789abcdef.sock", "0123456789abcdef.sock/..", "pool.sock", ""]
)
async def test_a_locator_is_a_name_in_our_directory_and_no_path(
    family: Family, locator: str
) -> None:
    region = family.device("consumer").allocate("pool", 1, 4096)
    target = msgspec.structs.replace(region.remote, locator=locator)
    outcome = await family.device("producer").write([], target, ())
    assert isinstance(outcome, WriteFailed)
    assert outcome.reason == f"{target.locator!r} is not the socket of an owner"


async def test_a_region_keeps_its_description(family: Family) -> None:
    region = family.device("consumer").allocate("pool", 2, 4096)
    producer = family.device("producer")
    assert isinstance(await producer.write([b"x"], region.remote, (0,)), Written)
    larger = msgspec.structs.replace(region.remote, num_slots=200)
    outcome = await producer.write([b"y"], larger, (150,))
    assert isinstance(outcome, WriteFailed) and "described differently" in outcome.reason


async def test_what_could_not_be_mapped_is_tried_again(family: Family) -> None:
    consumer, device = family.device("consumer"), FakeDevice()
    producer = family.device("producer", made=device)
    region = consumer.allocate("pool", 3, 4096)
    device.calls.broken = True
    outcome = await producer.write([b"x"], region.remote, (2,))
    assert isinstance(outcome, WriteFailed) and "is not mapped" in outcome.reason
    device.calls.broken = False
    assert isinstance(await producer.write([b"x"], region.remote, (2,)), Written)


async def test_nothing_is_left_open_of_what_was_revoked(family: Family) -> None:
    consumer, producer = family.device("consumer"), family.device("producer")
    opened = []
    for _ in range(5):
        region = consumer.allocate("pool", 1, 4096)
        assert isinstance(await producer.write([b"x"], region.remote, (0,)), Written)
        consumer.revoke(region)
        del region
        await until(lambda: num_mapped() == 0)
        await asyncio.sleep(0.02)
        opened.append(len(os.listdir("/proc/self/fd")))
    assert max(opened) == min(opened), "a connection to the owner for each region"


async def test_a_device_that_fails_leaves_a_doubt_until_it_has_passed(family: Family) -> None:
    consumer = family.device("consumer")
    device = FakeDevice()
    producer = family.device("producer", made=device)
    region = consumer.allocate("pool", 1, 4096)
    assert isinstance(await producer.write([b"x"], region.remote, (0,)), Written)
    device.calls.broken = True
    assert isinstance(await producer.write([b"y"], region.remote, (0,)), WriteUnknown)
    owner = Address("consumer", 1, "")
    for _ in range(2):  # however often it is asked
        assert not await producer.settle(owner)
        assert not await producer.fence(owner, HERE, os.getpid())
    device.calls.broken = False
    assert await producer.settle(owner)
    assert isinstance(await producer.write([b"z"], region.remote, (0,)), Written)


class Slots:
    """See `device.Scattered`."""

    addresses: Column = np.empty(0, np.uint64)

    def __init__(self, memory: memoryview, slots: Sequence[int], slot_nbytes: int = 1000) -> None:
        self.slot_nbytes = slot_nbytes
        self.addresses = np.array(slots, np.uint64) * slot_nbytes + address_of(memory)
        self.nbytes = len(slots) * slot_nbytes


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize(
    ("slots", "granted", "expected"),
    [
        ([], [], 0),
        ([4], [7], 1),
        ([6, 2, 4], [1, 11, 5], 3),
        ([6, 7, 8, 1], [3, 4, 5, 6], 2),  # neighbours at both ends are one copy
        ([6, 7, 8, 1], [3, 4, 9, 10], 3),
        ([6, 2], [3, 5, 7, 9], 2),  # there is more room
        (list(range(0, 600, 2)), list(range(300)), 300),
    ],
)
async def test_what_is_scattered_is_copied_slot_by_slot(
    family: Family, slots: list[int], granted: list[int], expected: int, checksums: bool
) -> None:
    device = FakeDevice()
    consumer = family.device("consumer")
    producer = family.device("producer", made=device, checksums=checksums)
    region = consumer.allocate("kv", 300, 1000)
    memory = memoryview(bytearray(os.urandom(600_000)))
    wanted = b"".join(memory[1000 * slot : 1000 * slot + 1000] for slot in slots)
    outcome = await producer.write([Slots(memory, slots)], region.remote, granted)
    assert outcome == Written(len(wanted), crc32(wanted) if checksums else 0)
    assert b"".join(region.views(granted, len(wanted))) == wanted
    assert sum(device.calls.num_copies) == expected
    assert max(device.calls.num_copies, default=0) <= 128, "others get the lock in between"


class Rows:
    """Rows of a device, side by side."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.nbytes = len(memory)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"data": (address_of(self._memory), False)}

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self._memory[part])


@pytest.mark.parametrize(("granted", "expected"), [([4, 5, 6], 0), ([4, 6, 5], 3), ([7, 0, 1], 2)])
@pytest.mark.parametrize("checksums", [False, True])
async def test_rows_of_a_device_are_copied_to_where_there_is_room(
    family: Family, granted: list[int], expected: int, checksums: bool
) -> None:
    device = FakeDevice()
    region = family.device("consumer").allocate("rows", 8, 1000)
    rows = memoryview(bytearray(os.urandom(2500)))
    writer = family.device("producer", made=device, checksums=checksums)
    outcome = await writer.write([Rows(rows)], region.remote, granted)
    assert outcome == Written(2500, crc32(rows) if checksums else 0)
    assert b"".join(region.views(granted, 2500)) == rows
    assert sum(device.calls.num_copies) == expected, "several are not queued one by one"


@pytest.mark.parametrize("checksums", [False, True])
async def test_what_lies_on_a_device_and_in_the_host_is_written_as_one(
    family: Family, checksums: bool
) -> None:
    device = FakeDevice()
    region = family.device("consumer").allocate("rows", 8, 1000)
    data = memoryview(bytearray(os.urandom(3500)))
    source = [Rows(data[:1700]), data[1700:2100], Rows(data[2100:])]
    writer = family.device("producer", made=device, checksums=checksums)
    outcome = await writer.write(source, region.remote, [6, 1, 2, 4])
    assert outcome == Written(3500, crc32(data) if checksums else 0)
    assert b"".join(region.views([6, 1, 2, 4], 3500)) == data


@pytest.mark.parametrize(
    ("source", "granted", "on_loop"),
    [
        (lambda data: [Rows(data[:1000])], [1], True),
        (lambda data: [Rows(data[:256_000])], range(1, 512, 2), True),
        (lambda data: [Rows(data[:257_000])], range(1, 514, 2), False),
        (lambda data: [data[:1000]], [1], False),  # is read while it is queued
        (lambda data: [Rows(data[:1000]), data[:1000]], [1, 5], False),
        (lambda data: [Slots(data, range(0, 512, 2))], range(1, 512, 2), True),
        (lambda data: [Slots(data, range(0, 514, 2))], range(1, 514, 2), False),
    ],
)
async def test_what_takes_long_is_not_queued_on_the_loop(
    family: Family, source: Callable[[memoryview], list[object]], granted: Sequence[int],
    on_loop: bool,
) -> None:  # fmt: skip
    device = FakeDevice()
    region = family.device("consumer").allocate("rows", 600, 1000)
    data = memoryview(bytearray(600_000))
    writer = family.device("producer", made=device)
    outcome = await writer.write(source(data), region.remote, granted)
    assert isinstance(outcome, Written)
    (name,) = device.calls.queueing
    assert (name == threading.current_thread().name) is on_loop
    assert on_loop or name.startswith("epd-cuda")


async def test_what_cannot_be_queued_has_failed_and_the_next_write_has_not(family: Family) -> None:
    device = FakeDevice()
    region = family.device("consumer").allocate("kv", 8, 1000)
    memory = memoryview(bytearray(os.urandom(8000)))
    writer = family.device("producer", made=device)
    device.calls.failing = "cuMemcpyBatchAsync_v2"
    outcome = await writer.write([Slots(memory, [0, 2])], region.remote, [1, 3])
    assert isinstance(outcome, WriteFailed)
    assert "could not be queued" in outcome.reason
    device.calls.failing = ""
    assert isinstance(await writer.write([Slots(memory, [4])], region.remote, [1]), Written)
    assert region.views([1], 1000)[0] == memory[4000:5000]


@pytest.mark.parametrize(
    ("source", "granted", "expected"),
    [
        ([0, 500], [0, 1], "into some of their size"),
        ([0], [0, 0], "named twice"),
        ([0], [12], "not one of the region's 12"),
        ([0, 1], [3], "do not fit 1 slots"),
    ],
)
async def test_scattered_slots_that_do_not_fit_are_refused(
    family: Family, source: list[int], granted: list[int], expected: str
) -> None:
    device = FakeDevice()
    region = family.device("consumer").allocate("kv", 12, 1000)
    memory = memoryview(bytearray(os.urandom(2000)))
    slots = Slots(memory, source, 500 if 500 in source else 1000)
    writer = family.device("producer", made=device)
    outcome = await writer.write([slots], region.remote, granted)
    assert isinstance(outcome, WriteFailed)
    assert expected in outcome.reason
    assert device.calls.num_copies == []
    assert bytes(region.buffer) == bytes(12_000)


def test_a_forced_transport_that_cannot_work_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match=r"cuda-bindings, which comes with torch|driver"):
        BACKEND.make(BackendSettings("a", 1, device="cuda:0"))
    monkeypatch.setattr("epd.transport.cuda.missing", lambda: "")
    with pytest.raises(TransportError, match="start with --device cuda, or use another"):
        BACKEND.make(BackendSettings("a", 1))


async def test_a_directory_that_others_may_enter_is_refused(family: Family) -> None:
    os.chmod(family.directory, 0o755)
    with pytest.raises(TransportError, match="chmod 700"):
        family.device("a").allocate("pool", 1, 64)
