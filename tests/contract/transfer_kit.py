"""The contract of `TransferEngine`: every implementation passes every check.

A check is a coroutine that gets a `TransferWorld`, which makes engines that can reach each other's
memory and closes them in the end.  Here are those about bytes; those about the end of regions,
writes and processes are in `transfer_ends`.  With nobody dying and nothing revoked, an outcome is
definite.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from epd.shares import cut
from epd.transport.base import WriteFailed, Written
from tests.contract import transfer_ends as ends
from tests.contract.transfer_world import (
    GUARD,
    Check,
    Doubt,
    PlaneWorld,
    TransferWorld,
    guard,
    joined,
    pattern,
    write,
)
from tests.patience import PATIENCE_S


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


async def only_who_was_lent_a_slot_writes_to_it(world: TransferWorld) -> None:
    """A life of a peer, its ranks too, for as long as the room has the slot."""
    consumer = world.engine("consumer")
    writers = {name: world.engine(name) for name in ("producer", "producer.1", "other")}
    region: Any = consumer.allocate("pool", 4, 8)
    guard(region)
    lent, data = region.lent, bytes(8)
    lent.guard()

    async def may(name: str, *slots: int) -> bool:
        outcome = await write(writers[name], [data] * len(slots), region, slots)
        return isinstance(outcome, Written)

    assert not await may("producer", 0)
    lent.lend(("producer", 1), "room", (0, 1))
    assert not await may("other", 0) and not await may("producer", 1, 2)
    assert bytes(region.buffer) == bytes([GUARD]) * 32
    assert await may("producer", 1, 0) and await may("producer.1", 0)
    lent.take_back("another room")
    assert await may("producer", 0)
    lent.lend(("other", 1), "next", (1,))
    lent.take_back("room")
    assert not await may("producer", 0) and not await may("producer", 1)
    assert await may("other", 1)
    lent.lend(("other", 2), "later life", (2,))
    assert not await may("other", 2)


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


async def half_a_gibibyte(world: TransferWorld) -> None:
    """512 MiB as one write of three buffers into four slots; the fifth stays as it was."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    slot_nbytes, nbytes = 128 << 20, 512 << 20
    region = consumer.allocate("pool", 5, slot_nbytes)
    memory = region.buffer
    memory[2 * slot_nbytes : 3 * slot_nbytes] = bytes([GUARD]) * slot_nbytes
    untouched = await consumer.checksum([memory[2 * slot_nbytes : 3 * slot_nbytes]])
    data = memoryview(pattern(nbytes))
    async with asyncio.timeout(PATIENCE_S):
        outcome = await producer.write(
            [data[:7], data[7 : 300 << 20], data[300 << 20 :]], region.remote, (4, 0, 3, 1)
        )
    assert outcome == Written(nbytes, await producer.checksum([data]))
    assert await consumer.checksum(region.views((4, 0, 3, 1), nbytes)) == outcome.checksum
    assert await consumer.checksum([memory[2 * slot_nbytes : 3 * slot_nbytes]]) == untouched


async def memory_that_was_taken_before_has_what_came(world: TransferWorld) -> None:
    """As an engine does whose KV pool this is: it never asks for the buffer again."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("kv", 6, 4096)
    memory = region.buffer
    first, second = pattern(2 * 4096), bytes(reversed(pattern(3 * 4096)))
    assert isinstance(await write(producer, [first], region, (4, 1)), Written)
    assert isinstance(await write(producer, [second], region, (0, 5, 2)), Written)
    assert region.views((), 0) == []  # a look
    found = {slot: bytes(memory[slot * 4096 : (slot + 1) * 4096]) for slot in range(6)}
    assert found[4] + found[1] == first
    assert found[0] + found[5] + found[2] == second
    assert found[3] == bytes(4096)


async def heads_land_where_slots_are_cut_into_them(world: PlaneWorld) -> None:
    """Two ranks write each their heads of the same slots, over a region that is also written whole:
    the memory that was taken before has every head in its place, and nothing beside them."""
    consumer = world.consumer()
    slots, shares, nbytes = (4, 1, 2), (range(1), range(1, 3)), 500
    region = consumer.allocate("kv", 6, 3 * nbytes)
    consumer.mirror(region)
    fine = consumer.recut(region, 3)
    assert consumer.recut(region, 3) is fine
    whole, landed = (consumer.landing(each, world.transport) for each in (region, fine))
    guard(whole)
    expected = bytearray(whole.buffer)
    memory = whole.buffer
    there, finer = (consumer.descriptor(each, world.transport) for each in (region, fine))
    producers = [world.producer(f"producer-{rank}") for rank in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        for turn, its_slots in enumerate((slots, slots[::-1])):  # leased again by the next request
            sent = [pattern(3 * len(own) * nbytes, 2 * turn + own.start) for own in shares]
            cells = [cut(its_slots, own, 3) for own in shares]
            outcomes = await asyncio.gather(
                *(
                    producer.write([data[:77], data[77:]], finer, at)
                    for producer, data, at in zip(producers, sent, cells, strict=True)
                )
            )
            for data, at, outcome in zip(sent, cells, outcomes, strict=True):
                assert outcome == Written(len(data), zlib.crc32(data))
                assert await consumer.checksum(landed.views(at, len(data))) == outcome.checksum
                for index, cell in enumerate(at):
                    part = data[index * nbytes : (index + 1) * nbytes]
                    expected[cell * nbytes : (cell + 1) * nbytes] = part
            assert memory == expected
        data = pattern(2 * 3 * nbytes, 9)
        outcome = await producers[1].write([data], there, (1, 5))
        assert outcome == Written(len(data), zlib.crc32(data))
        assert joined(whole, (1, 5), len(data)) == data
        expected[3 * nbytes : 6 * nbytes] = data[: 3 * nbytes]
        expected[15 * nbytes :] = data[3 * nbytes :]
        assert memory == expected
        consumer.revoke(region)
        for target in (there, finer):
            assert isinstance(await producers[0].write([b"x"], target, (0,)), WriteFailed)


TRANSFER_CHECKS: list[Check] = [
    one_byte,
    memory_that_was_taken_before_has_what_came,
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
    ends.a_revoked_region_fails,
    ends.a_restarted_owner_is_not_written_to,
    ends.a_forged_descriptor_fails,
    ends.closing_with_writes_in_flight,
    ends.closing_the_owner_under_writes,
    ends.a_cancelled_write_moves_only_its_own_bytes,
    a_late_grant_finds_its_rows,
    ends.cancelled_at_any_moment,
    ends.revoking_under_a_write,
    the_loop_runs_on_during_a_big_write,
    ends.what_has_settled_moves_no_more_and_nobody_is_barred,
    ends.two_settles_at_once_both_answer,
    ends.a_dead_peer_is_fenced,
    ends.once_fenced_a_peer_writes_no_more,
]
LENT_CHECKS: list[Check] = [only_who_was_lent_a_slot_writes_to_it]  # where the owner is asked
DOUBT_CHECKS: list[Check] = [
    ends.an_unknown_outcome_is_owned_until_it_is_fenced,
    ends.two_settles_of_one_doubt_both_answer,
]  # not for all backends


def name_of(check: Check) -> str:
    return check.__name__


__all__ = [
    "DOUBT_CHECKS",
    "GUARD",
    "LENT_CHECKS",
    "TRANSFER_CHECKS",
    "Check",
    "Doubt",
    "guard",
    "half_a_gibibyte",
    "heads_land_where_slots_are_cut_into_them",
    "name_of",
    "pattern",
    "sixty_four_mib",
]
