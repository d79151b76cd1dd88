"""The contract of `TransferEngine` where things end: regions, lives, engines, writes, doubts.

A write may honestly be `WriteUnknown` only where a check says so.
"""

from __future__ import annotations

import asyncio
from typing import Any

from epd.messages import Address
from epd.transport.base import TransferEngine, WriteFailed, WriteUnknown, Written
from tests.contract.transfer_world import (
    GUARD,
    WAIT_S,
    Doubt,
    DoubtfulWorld,
    TransferWorld,
    guard,
    joined,
    pattern,
    write,
)


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


async def two_settles_at_once_both_answer(world: TransferWorld) -> None:
    """Fault F85: of a write that nobody waits for, and whoever asks again meanwhile."""
    producer, consumer = world.engine("producer"), world.engine("consumer")
    region = consumer.allocate("pool", 2, 8 << 20)
    doomed = asyncio.create_task(producer.write([pattern(8 << 20)], region.remote, (0,)))
    await asyncio.sleep(0)
    doomed.cancel()
    await asyncio.gather(doomed, return_exceptions=True)
    await _settled_by_two(producer, Address("consumer", 1, ""))
    assert isinstance(await write(producer, [pattern(64)], region, (1,)), Written)


async def two_settles_of_one_doubt_both_answer(world: DoubtfulWorld) -> None:
    """Likewise, of a write whose outcome the writer cannot tell."""
    doubt = await world.doubt()
    if doubt.owner_as_seen is None:  # the writer is dead
        await asyncio.gather(*(doubt.owner.fence(*doubt.writer) for _ in range(2)))
        await an_unknown_outcome_is_fenced(doubt)
    else:
        asking, (owner, _, _) = doubt.owner_as_seen
        await _settled_by_two(asking, owner)
        doubt.release()


async def _settled_by_two(engine: TransferEngine, peer: Address) -> None:
    async with asyncio.timeout(WAIT_S):
        while not all(await asyncio.gather(engine.settle(peer), engine.settle(peer))):
            await asyncio.sleep(0.01)
    assert await engine.settle(peer), "what has settled is in doubt again"


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
    await an_unknown_outcome_is_fenced(await world.doubt())


async def an_unknown_outcome_is_fenced(doubt: Doubt) -> None:
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
