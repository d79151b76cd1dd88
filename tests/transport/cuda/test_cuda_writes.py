"""How a write to another device is cut into copies, who queues them, and what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from epd.transport.base import WriteFailed, Written
from epd.transport.checksum import crc32
from epd.transport.cuda.device import Column
from epd.transport.host_memory import address_of
from tests.transport.device_family import Family
from tests.transport.fake_device import FakeDevice


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
    device.calls.told_by_bindings.clear()
    outcome = await writer.write(source(data), region.remote, granted)
    assert isinstance(outcome, Written)
    (name,) = device.calls.queueing
    assert (name == threading.current_thread().name) is on_loop
    assert on_loop or name.startswith("epd-cuda")
    is_of_host = any(isinstance(view, memoryview) for view in source(data))
    assert ("cuMemcpyAsync" in device.calls.told_by_bindings) is is_of_host, "it may block"


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
