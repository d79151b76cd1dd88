"""Memory of a device between real processes that die and freeze; host memory stands for it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import msgspec
import pytest

from epd.messages import Address, RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.base import TransportError, WriteFailed, WriteUnknown, Written
from epd.transport.host import this_host_id
from tests.patience import PATIENCE_S
from tests.transport.device_family import Family, num_mapped, threads, until
from tests.transport.fake_device import FakeDevice

HERE = this_host_id()


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
    device.calls.broken = True
    assert await producer.settle(owner), "nothing is in doubt any more"
    device.calls.broken = False
    assert isinstance(await producer.write([b"z"], region.remote, (0,)), Written)


async def test_who_is_closed_leaves_neither_threads_nor_mappings(family: Family) -> None:
    others = threads()
    consumer, producer = family.device("consumer"), family.device("producer")
    region = consumer.allocate("pool", 1, 4096)
    assert num_mapped() == 1
    assert isinstance(await producer.write([b"x"], region.remote, (0,)), Written)
    assert num_mapped() == 2
    assert threads() - others
    await producer.close()
    await until(lambda: num_mapped() == 1)
    await producer.close()
    await consumer.close()
    await until(lambda: threads() <= others)


def test_a_forced_transport_that_cannot_work_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TransportError, match=r"cuda-bindings, which comes with torch|driver"):
        named("cuda").make(BackendSettings("a", 1, device="cuda:0"))
    monkeypatch.setattr("epd.transport.cuda.backend.missing", lambda: "")
    with pytest.raises(TransportError, match="start with --device cuda, or use another"):
        named("cuda").make(BackendSettings("a", 1))


async def test_a_directory_that_others_may_enter_is_refused(family: Family) -> None:
    os.chmod(family.directory, 0o755)
    with pytest.raises(TransportError, match="chmod 700"):
        family.device("a").allocate("pool", 1, 64)
