"""A copy that has begun is owned until its thread is done, whoever has lost interest in it."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.messages import Address
from epd.transport import copying
from epd.transport.backend import BackendSettings
from epd.transport.base import TransferEngine, WriteFailed
from epd.transport.checksum import is_summed
from epd.transport.copying import Copier, share_out
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.region import Piece
from epd.transport.shm.backend import ShmTransferEngine
from tests.patience import PATIENCE_S


class Gate:
    """Copies on threads stand still until it is opened."""

    def __init__(self) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()

    def stand_still(self, *_args: object, **_kwargs: object) -> int:
        self.begun.set()
        assert self.opened.wait(PATIENCE_S)
        return 7

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, PATIENCE_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(copying, "_copy", gate.stand_still)
    return gate


async def test_settling_waits_for_a_cancelled_copy(gate: Gate) -> None:
    copier = Copier(checksums=False, inline_nbytes=0)
    memory = memoryview(bytearray(8))
    task = asyncio.create_task(copier.copy(memory, [(0, memoryview(b"x"))]))
    await gate.reached()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not await copier.settle(0.05)
    gate.opened.set()
    assert await copier.settle(PATIENCE_S)
    assert not copier.in_flight, "nothing is kept of what has ended"
    copier.close()


async def test_in_each_turn_of_the_loop_one_big_copy_is_made_on_it() -> None:
    copier, nbytes = Copier(checksums=False), 2 * copying.SMALL_NBYTES
    memory, source = (memoryview(bytearray(nbytes)) for _ in range(2))
    with mock.patch.object(copier, "_on_threads", mock.AsyncMock(return_value=0)) as others:
        for turn in (1, 2):
            await asyncio.gather(*(copier.copy(memory, [(0, source)]) for _ in range(2)))
            assert others.call_count == turn
    copier.close()


async def test_settling_waits_for_what_other_threads_have_of_a_copy_that_failed(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_first(memory: object, pieces: Sequence[Piece], checksums: bool) -> int:
        if not pieces[0][0]:
            raise MemoryError
        return gate.stand_still()

    monkeypatch.setattr(copying, "_copy", fail_at_first)
    copier, nbytes = Copier(checksums=False), 2 * copying.SHARE_NBYTES
    memory, source = (memoryview(bytearray(nbytes)) for _ in range(2))
    task = asyncio.create_task(copier.copy(memory, [(0, source)]))
    await gate.reached()
    assert not await copier.settle(0.05)
    gate.opened.set()
    with pytest.raises(MemoryError):
        await task
    assert await copier.settle(PATIENCE_S)
    copier.close()


async def test_a_fence_waits_for_a_cancelled_write(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd.transport.local.FENCE_TIMEOUT_S", 0.05)
    memory = LocalMemory()
    producer, consumer = (
        LocalTransferEngine(BackendSettings(name, 1), memory) for name in ("p", "c")
    )
    region = consumer.allocate("pool", 1, 8 << 20)
    source = [bytes(8 << 20)]
    task = asyncio.create_task(producer.write(source, region.remote, (0,)))
    await gate.reached()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not await consumer.fence(Address("p", 1, ""), "", 0)
    gate.opened.set()
    monkeypatch.setattr("epd.transport.local.FENCE_TIMEOUT_S", PATIENCE_S)
    assert await consumer.fence(Address("p", 1, ""), "", 0)
    await producer.close()
    await consumer.close()


def _local(directory: str) -> list[TransferEngine]:
    memory = LocalMemory()
    return [LocalTransferEngine(BackendSettings(name, 1), memory) for name in ("p", "c")]


def _shm(directory: str) -> list[TransferEngine]:
    return [ShmTransferEngine(BackendSettings(name, 1), directory) for name in ("p", "c")]


@pytest.mark.parametrize("kind", [_local, _shm])
async def test_a_write_into_a_region_that_is_revoked_meanwhile_has_failed(
    gate: Gate, kind: Callable[[str], list[TransferEngine]]
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="epd-test-") as directory:
        producer, consumer = kind(directory)
        region = consumer.allocate("pool", 1, 8 << 20)
        task = asyncio.create_task(producer.write([bytes(8 << 20)], region.remote, (0,)))
        await gate.reached()
        consumer.revoke(region)
        gate.opened.set()
        outcome = await task
        assert isinstance(outcome, WriteFailed)
        assert "revoked" in outcome.reason
        await producer.close()
        await consumer.close()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 6))
def test_shares_are_the_same_bytes_in_the_same_places(lengths: list[int], count: int) -> None:
    content, pieces, at = memoryview(bytes(range(1, 1 + sum(lengths)))), [], 0
    for number, nbytes in enumerate(lengths):
        at += 7 * number  # gaps between them
        pieces.append((at, content[:nbytes]))
        at, content = at + nbytes, content[nbytes:]
    shares = share_out(pieces, count)

    def laid_out(them: list[Piece]) -> bytes:
        memory = bytearray(at)
        for offset, view in them:
            memory[offset : offset + view.nbytes] = view
        return bytes(memory)

    assert laid_out([piece for share in shares for piece in share]) == laid_out(pieces)
    sizes = [sum(view.nbytes for _, view in share) for share in shares]
    assert len(shares) <= count
    assert all(sizes)
    assert max(sizes) == sizes[0], "what is left over is in the last"
    assert len(set(sizes[:-1])) <= 1


def test_what_leaves_the_host_is_summed_unless_it_is_said() -> None:
    asked = [(policy, leaves) for policy in ("always", "auto", "never") for leaves in (True, False)]
    summed = [is_summed(policy, leaves_host=leaves) for policy, leaves in asked]
    assert summed == [True, True, True, False, False, False]
