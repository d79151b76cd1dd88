"""The contract of `TransferEngine`: every implementation passes every check.

A check is a coroutine that gets a `TransferWorld`, which makes engines that can reach each other's
memory and closes them in the end.  It uses asyncio alone, so it runs on a virtual clock as well.
A write may honestly be `WriteUnknown` only where a check says so: with nobody dying and nothing
revoked, the outcome is definite.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from epd.messages import Address
from epd.transport.base import (
    Region,
    TransferEngine,
    WriteFailed,
    WriteOutcome,
    WriteUnknown,
    Written,
)

WAIT_S = 10.0
GUARD = 0xEE  # what untouched memory looks like


class TransferWorld(Protocol):
    def engine(self, instance_id: str, epoch: int = 1) -> TransferEngine:
        """A new engine with checksums on."""
        ...

    async def dead_peer(self) -> tuple[Address, str, int]:
        """Address, host id and pid of a peer of this world that died without cleaning up."""
        ...


@dataclass(frozen=True)
class Doubt:
    """A write whose outcome nobody knows.

    `release` lets go of what held it up: from then on its bytes would land if nothing stopped them.
    """

    outcome: WriteOutcome
    owner: TransferEngine
    region: Region
    writer: tuple[Address, str, int]  # as `fence` wants it
    release: Callable[[], None]
    owner_as_seen: tuple[TransferEngine, tuple[Address, str, int]] | None = None  # if it can ask


class DoubtfulWorld(TransferWorld, Protocol):
    async def doubt(self) -> Doubt:
        """A write that this backend honestly cannot tell the end of."""
        ...


Check = Callable[[Any], Awaitable[None]]


def pattern(nbytes: int, salt: int = 0) -> bytes:
    """Bytes in which a shift, a swap or a stale copy shows: the period is prime."""
    period = bytes((i * 7 + salt * 13 + i // 5) % 251 for i in range(1009))
    return (period * (nbytes // 1009 + 1))[:nbytes]


def joined(region: Region, slots: Sequence[int], nbytes: int) -> bytes:
    return b"".join(region.views(slots, nbytes))


def guard(region: Region) -> None:
    region.buffer[:] = bytes([GUARD]) * region.buffer.nbytes


async def write(
    engine: TransferEngine, source: Sequence[Any], region: Region, slots: Sequence[int]
) -> WriteOutcome:
    async with asyncio.timeout(WAIT_S):
        return await engine.write(source, region.remote, slots)


async def check_size(world: TransferWorld, nbytes: int) -> None:
    """Bytes and checksum of one write, cut at odd places, into scattered slots, last one partial;
    the slots around them stay as they were."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    slot_nbytes = max(1, -(-nbytes // 5) + 3)
    region = consumer.allocate("pool", 8, slot_nbytes)
    guard(region)
    data = pattern(nbytes)
    third = nbytes // 3
    source = [data[:third], memoryview(data)[third : third + 1], b"", bytearray(data[third + 1 :])]
    slots = (6, 1, 2, 0, 5)
    outcome = await write(producer, source, region, slots)
    assert outcome == Written(nbytes, zlib.crc32(data))
    assert joined(region, slots, nbytes) == data
    rest = bytes([GUARD])
    landed = bytearray(rest * region.buffer.nbytes)
    for index, slot in enumerate(slots):
        part = data[index * slot_nbytes : (index + 1) * slot_nbytes]
        landed[slot * slot_nbytes : slot * slot_nbytes + len(part)] = part
    assert region.buffer == landed


async def one_byte(world: TransferWorld) -> None:
    await check_size(world, 1)


async def one_page(world: TransferWorld) -> None:
    await check_size(world, 4096)


async def three_hundred_kib(world: TransferWorld) -> None:
    await check_size(world, (300 << 10) + 1)


async def seven_mib(world: TransferWorld) -> None:
    await check_size(world, (7 << 20) + 11)


async def sixty_four_mib(world: TransferWorld) -> None:
    await check_size(world, 64 << 20)


async def nothing_at_all(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 2, 16)
    assert await write(producer, [], region, ()) == Written(0, 0)
    assert await write(producer, [b""], region, (1,)) == Written(0, 0)


async def both_ends_compute_the_same_checksum(world: TransferWorld) -> None:
    """Over the bytes alone, however they are cut into buffers and slots."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 8, 100_000)
    for nbytes in (0, 1, 250_001, 799_999):
        data = pattern(nbytes)
        slots = range(8)
        outcome = await write(producer, [data[:77], data[77:]], region, slots)
        found = await consumer.checksum(region.views(slots, nbytes))
        assert outcome == Written(nbytes, found)
        assert found == zlib.crc32(data)
    region.buffer[5] ^= 1
    assert await consumer.checksum(region.views(range(8), 799_999)) != found


async def exactly_full_and_again(world: TransferWorld) -> None:
    """Slots are reused: the second tenant's bytes replace the first's."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 4, 1000)
    for salt, slots in enumerate([(0, 1), (1, 2), (0, 3), (2, 3)]):
        data = pattern(2000, salt)
        assert isinstance(await write(producer, [data], region, slots), Written)
        assert joined(region, slots, 2000) == data
        region.forget(slots)


async def memory_begins_as_zeros(world: TransferWorld) -> None:
    region = world.engine("consumer").allocate("pool", 3, 5000)
    assert region.buffer.nbytes == 15000 and region.buffer == bytes(15000)


async def two_regions_do_not_overlap(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    rows, kv = consumer.allocate("rows", 2, 4096), consumer.allocate("kv", 2, 4096)
    await write(producer, [pattern(8192, 1)], rows, (0, 1))
    await write(producer, [pattern(8192, 2)], kv, (0, 1))
    assert rows.buffer == pattern(8192, 1) and kv.buffer == pattern(8192, 2)


async def impossible_writes_fail_and_move_nothing(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 4, 64)
    guard(region)
    one = bytes(64)
    scattered = memoryview(bytes(64))[::2]
    attempts: list[tuple[list[Any], tuple[int, ...]]] = [
        ([one], (4,)),
        ([one], (-1,)),
        ([one], (1 << 60,)),
        ([one, one], (0, 0)),
        ([one, b"x"], (0,)),
        ([one], ()),
        ([one * 5], (0, 1, 2, 3)),
        ([one, scattered], (0, 1)),
        ([one, "text"], (0, 1)),
    ]
    for source, slots in attempts:
        outcome = await write(producer, source, region, slots)
        assert isinstance(outcome, WriteFailed) and outcome.reason, (source, slots, outcome)
    assert bytes(region.buffer) == bytes([GUARD]) * 256


async def concurrent_writers(world: TransferWorld) -> None:
    consumer = world.engine("consumer")
    producers = [world.engine("producer-1"), world.engine("producer-2")]
    slot_nbytes = 400_000
    region = consumer.allocate("pool", 16, slot_nbytes)
    outcomes = await asyncio.gather(
        *(
            write(producers[slot % 2], [pattern(slot_nbytes - slot, slot)], region, (slot,))
            for slot in range(16)
        )
    )
    for slot, outcome in enumerate(outcomes):
        data = pattern(slot_nbytes - slot, slot)
        assert outcome == Written(len(data), zlib.crc32(data))
        assert joined(region, (slot,), len(data)) == data


async def by_reference_reads_the_same(world: TransferWorld) -> None:
    """Copied or deposited, `views` gives what was written, also for part of the slots."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 8, 1000, by_reference=True)
    data = pattern(2500)
    slots = (5, 0, 3)
    outcome = await write(producer, [data[:700], data[700:]], region, slots)
    assert outcome == Written(2500, zlib.crc32(data))
    assert joined(region, slots, 2500) == data
    assert joined(region, slots, 1200) == data[:1200]
    assert joined(region, (0,), 1000) == data[1000:2000]
    region.forget(slots)
    again = pattern(1500, 3)
    await write(producer, [again], region, (3, 5))
    assert joined(region, (3, 5), 1500) == again


async def a_revoked_region_fails(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region, other = consumer.allocate("pool", 2, 64), consumer.allocate("other", 2, 64)
    remote = region.remote
    assert isinstance(await producer.write([bytes(64)], remote, (0,)), Written)
    still_read = region.buffer  # as an engine that keeps its pool would
    consumer.revoke(region)
    consumer.revoke(region)
    for writer in (producer, world.engine("latecomer")):
        assert isinstance(await writer.write([bytes(64)], remote, (0,)), WriteFailed)
    assert isinstance(await write(producer, [bytes(64)], other, (0,)), Written)
    assert bytes(still_read) == bytes(128)


async def a_restarted_owner_is_not_written_to(world: TransferWorld) -> None:
    """Fault F44: the descriptor of an earlier life fails and never lands in the new one."""
    producer, consumer = world.engine("producer"), world.engine("consumer", 1)
    region = consumer.allocate("pool", 2, 64)
    old = region.remote
    assert isinstance(await producer.write([bytes(64)], old, (0,)), Written)
    await consumer.close()
    reborn = world.engine("consumer", 2)
    fresh = reborn.allocate("pool", 2, 64)
    guard(fresh)
    for writer in (producer, world.engine("latecomer")):
        assert isinstance(await writer.write([bytes(64)], old, (0,)), WriteFailed)
    assert bytes(fresh.buffer) == bytes([GUARD]) * 128
    assert isinstance(await write(producer, [bytes(64)], fresh, (0,)), Written)


async def a_forged_descriptor_fails(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 2, 64)
    assert isinstance(await write(producer, [bytes(64)], region, (1,)), Written)  # it is known now
    guard(region)
    fields = {name: getattr(region.remote, name) for name in region.remote.__struct_fields__}
    changes: list[dict[str, Any]] = [
        {"num_slots": 4},
        {"slot_nbytes": 128},
        {"slot_nbytes": 0, "num_slots": 0},
        {"region_id": "nothing"},
        {"instance_id": "nobody"},
        {"epoch": 2},
        {"locator": "../../etc/passwd"},
        {"backend": "nonsense"},
    ]
    for change in changes:
        forged = type(region.remote)(**{**fields, **change})
        outcome = await producer.write([bytes(64)], forged, (0,))
        assert isinstance(outcome, WriteFailed), (change, outcome)
    assert bytes(region.buffer) == bytes([GUARD]) * 128


async def closing_with_writes_in_flight(world: TransferWorld) -> None:
    """Every write gets its outcome, nothing hangs, and later writes fail."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    nbytes = 4 << 20
    region = consumer.allocate("pool", 8, nbytes)
    data = pattern(nbytes)
    remote = region.remote
    writes = [asyncio.create_task(producer.write([data], remote, (slot,))) for slot in range(8)]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await producer.close()
        outcomes = await asyncio.gather(*writes)
    for slot, outcome in enumerate(outcomes):
        assert isinstance(outcome, Written | WriteFailed | WriteUnknown)
        if isinstance(outcome, Written):
            assert joined(region, (slot,), nbytes) == data
    await producer.close()
    assert isinstance(await producer.write([data], remote, (0,)), WriteFailed)


async def closing_the_owner_under_writes(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    nbytes = 4 << 20
    remote = consumer.allocate("pool", 4, nbytes).remote
    data = pattern(nbytes)
    writes = [asyncio.create_task(producer.write([data], remote, (slot,))) for slot in range(4)]
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await consumer.close()
        outcomes = await asyncio.gather(*writes)
    assert all(isinstance(o, Written | WriteFailed | WriteUnknown) for o in outcomes)
    assert isinstance(await producer.write([data], remote, (0,)), WriteFailed)


async def a_cancelled_write_moves_only_its_own_bytes(world: TransferWorld) -> None:
    """A cancelled writer leaves its slots in doubt, its neighbours in peace, the engine working."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    nbytes = 4 << 20
    region = consumer.allocate("pool", 3, nbytes)
    guard(region)
    doomed = asyncio.create_task(producer.write([pattern(nbytes)], region.remote, (1,)))
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    data = pattern(nbytes, 9)
    assert isinstance(await write(producer, [data], region, (2,)), Written)
    await producer.close()
    assert joined(region, (2,), nbytes) == data
    assert set(bytes(joined(region, (0,), nbytes))) == {GUARD}


async def a_late_grant_finds_its_rows(world: TransferWorld) -> None:
    """The descriptor may come long after rows, engines and connections: nothing is tied to time."""
    producer = world.engine("producer")
    source = [pattern(300_000, 4)]
    await asyncio.sleep(0.2)
    consumer = world.engine("consumer")
    early = consumer.allocate("early", 1, 300_000)
    assert isinstance(await write(producer, source, early, (0,)), Written)
    await asyncio.sleep(0.2)
    late = consumer.allocate("late", 2, 300_000)
    guard(late)
    assert isinstance(await write(producer, source, late, (1,)), Written)
    assert joined(late, (1,), 300_000) == joined(early, (0,), 300_000) == source[0]
    assert set(joined(late, (0,), 300_000)) == {GUARD}


async def cancelled_at_any_moment(world: TransferWorld) -> None:
    """Before it begins, nothing moves; during, its slot alone is in doubt; after, it is Written."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    nbytes = 1 << 20
    region = consumer.allocate("pool", 8, nbytes)
    guard(region)
    data = pattern(nbytes, 2)
    for slot, turns in enumerate((0, 1, 2, 3, 5, 8)):
        task = asyncio.create_task(producer.write([data], region.remote, (slot,)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    done = asyncio.create_task(producer.write([data], region.remote, (6,)))
    await asyncio.wait((done,), timeout=WAIT_S)
    assert not done.cancel()
    assert isinstance(done.result(), Written)
    await producer.close()  # whatever was under way has ended now
    assert set(joined(region, (0,), nbytes)) == {GUARD}
    assert joined(region, (6,), nbytes) == data
    assert set(joined(region, (7,), nbytes)) == {GUARD}
    before = bytes(region.buffer)
    await asyncio.sleep(0.1)
    assert bytes(region.buffer) == before


async def revoking_under_a_write(world: TransferWorld) -> None:
    """The write ends, with whatever outcome, and never in memory that came after."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    nbytes = 8 << 20
    region = consumer.allocate("pool", 1, nbytes)
    under_way = asyncio.create_task(producer.write([pattern(nbytes)], region.remote, (0,)))
    await asyncio.sleep(0)
    consumer.revoke(region)
    successor = consumer.allocate("pool", 1, nbytes)
    guard(successor)
    async with asyncio.timeout(WAIT_S):
        outcome = await under_way
    assert isinstance(outcome, Written | WriteFailed | WriteUnknown)
    await asyncio.sleep(0.1)
    assert set(joined(successor, (0,), nbytes)) == {GUARD}


async def the_loop_runs_on_during_a_big_write(world: TransferWorld) -> None:
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 1, 32 << 20)
    task = asyncio.create_task(write(producer, [bytes(32 << 20)], region, (0,)))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert isinstance(task.result(), Written)
    assert turns > 5


async def what_has_settled_moves_no_more_and_nobody_is_barred(world: TransferWorld) -> None:
    """Fault F8: the source of a write that nobody waits for is free once the engine has settled."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    nbytes = 8 << 20
    region, back = consumer.allocate("pool", 2, nbytes), producer.allocate("back", 1, 64)
    assert await producer.settle(Address("consumer", 1, ""))
    source = bytearray(pattern(nbytes))
    doomed = asyncio.create_task(producer.write([source], region.remote, (0,)))
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    async with asyncio.timeout(WAIT_S):
        while not await producer.settle(Address("consumer", 1, "")):
            await asyncio.sleep(0.01)
    landed = joined(region, (0,), nbytes)
    source[:] = bytes([GUARD]) * nbytes
    await asyncio.sleep(0.02)
    assert joined(region, (0,), nbytes) == landed
    assert isinstance(await write(producer, [pattern(64)], region, (1,)), Written)
    assert isinstance(await write(consumer, [pattern(64)], back, (0,)), Written)


async def a_dead_peer_is_fenced(world: TransferWorld) -> None:
    consumer = world.engine("consumer")
    peer, host_id, pid = await world.dead_peer()
    async with asyncio.timeout(WAIT_S):
        while not await consumer.fence(peer, host_id, pid):
            await asyncio.sleep(0.1)


async def once_fenced_a_peer_writes_no_more(world: TransferWorld) -> None:
    """Fault F7: if the answer for a living peer is True, no byte of its later writes lands."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 2, 4 << 20)
    under_way = asyncio.create_task(producer.write([pattern(4 << 20)], region.remote, (0,)))
    await asyncio.sleep(0)
    fenced = await consumer.fence(Address("producer", 1, ""), "", 0)
    if fenced:
        guard(region)
        assert isinstance(await write(producer, [bytes(64)], region, (1,)), WriteFailed)
    await under_way
    if fenced:
        assert bytes(region.buffer) == bytes([GUARD]) * region.buffer.nbytes


async def an_unknown_outcome_is_owned_until_it_is_fenced(world: DoubtfulWorld) -> None:
    """Faults F6 to F8: only the fence frees, and after it nothing lands, whatever wakes up."""
    doubt = await world.doubt()
    assert isinstance(doubt.outcome, WriteUnknown), doubt.outcome
    async with asyncio.timeout(WAIT_S):
        if doubt.owner_as_seen is not None:
            asking, owner = doubt.owner_as_seen
            while not await asking.fence(*owner):
                await asyncio.sleep(0.05)
        while not await doubt.owner.fence(*doubt.writer):
            await asyncio.sleep(0.05)
    guard(doubt.region)
    doubt.release()
    await asyncio.sleep(0.3)
    assert set(bytes(doubt.region.buffer)) == {GUARD}, "a byte landed after the fence"


async def half_a_gibibyte(world: TransferWorld) -> None:
    """512 MiB as one write of three buffers into four slots; the fifth stays as it was."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    slot_nbytes, nbytes = 128 << 20, 512 << 20
    region = consumer.allocate("pool", 5, slot_nbytes)
    memory = region.buffer
    memory[2 * slot_nbytes : 3 * slot_nbytes] = bytes([GUARD]) * slot_nbytes
    untouched = await consumer.checksum([memory[2 * slot_nbytes : 3 * slot_nbytes]])
    data = memoryview(pattern(nbytes))
    async with asyncio.timeout(60):
        outcome = await producer.write(
            [data[:7], data[7 : 300 << 20], data[300 << 20 :]], region.remote, (4, 0, 3, 1)
        )
    assert outcome == Written(nbytes, await producer.checksum([data]))
    assert await consumer.checksum(region.views((4, 0, 3, 1), nbytes)) == outcome.checksum
    assert await consumer.checksum([memory[2 * slot_nbytes : 3 * slot_nbytes]]) == untouched


TRANSFER_CHECKS: list[Check] = [
    one_byte,
    one_page,
    three_hundred_kib,
    seven_mib,
    nothing_at_all,
    both_ends_compute_the_same_checksum,
    exactly_full_and_again,
    memory_begins_as_zeros,
    two_regions_do_not_overlap,
    impossible_writes_fail_and_move_nothing,
    concurrent_writers,
    by_reference_reads_the_same,
    a_revoked_region_fails,
    a_restarted_owner_is_not_written_to,
    a_forged_descriptor_fails,
    closing_with_writes_in_flight,
    closing_the_owner_under_writes,
    a_cancelled_write_moves_only_its_own_bytes,
    a_late_grant_finds_its_rows,
    cancelled_at_any_moment,
    revoking_under_a_write,
    the_loop_runs_on_during_a_big_write,
    what_has_settled_moves_no_more_and_nobody_is_barred,
    a_dead_peer_is_fenced,
    once_fenced_a_peer_writes_no_more,
]
BIG_TRANSFER_CHECKS: list[Check] = [sixty_four_mib, half_a_gibibyte]
DOUBT_CHECKS: list[Check] = [an_unknown_outcome_is_owned_until_it_is_fenced]  # not for all backends


def name_of(check: Check) -> str:
    return check.__name__
