"""Memory copies that do not hold the event loop for long.

Measured: a trip to a thread and back takes 90 us, as long as copying 2 MiB.  So up to 256 KiB a
copy is made on the loop; up to `inline_nbytes` (0.3 ms) too, but only one in each turn of the loop.
All further and bigger copies go to threads, in numpy, which lets go of the interpreter lock
meanwhile.  A copy of several `SHARE_NBYTES` is shared out among the threads if they are idle: one
core alone does not fill the memory's bandwidth.

A copy that has begun cannot be taken back: cancelling the caller leaves it running.  So the copier
keeps every copy in `in_flight` until its last byte has moved, and whoever frees memory waits for
it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from epd.transport.checksum import checksum_of, crc32
from epd.transport.region import Piece

SETTLE_TIMEOUT_S = 0.8  # `settle` answers within about a second
SUMMED_NBYTES = 256 << 10  # copied and summed while it is in cache
SMALL_NBYTES = 256 << 10
INLINE_NBYTES = 4 << 20
SHARE_NBYTES = 4 << 20


class Copier:
    """The copy threads of one transfer engine; threads start with the first big copy."""

    def __init__(self, *, checksums: bool, inline_nbytes: int = INLINE_NBYTES) -> None:
        self.checksums = checksums
        self._inline_nbytes = inline_nbytes
        self._num_threads = max(2, min(4, os.cpu_count() or 1))
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="epd-copy")
        self._held = False
        self.in_flight: set[asyncio.Future[int]] = set()

    async def copy(
        self,
        memory: memoryview | None,
        pieces: Sequence[Piece],
        track: Callable[[asyncio.Future[int]], None] | None = None,
    ) -> int:
        """Put the pieces into `memory` (None: only sum them up); returns the checksum or 0.

        `track` gets the future of a copy that is not done at once.
        """
        nbytes = sum(view.nbytes for _, view in pieces)
        if nbytes <= self._inline_nbytes and (nbytes <= SMALL_NBYTES or self._may_hold_the_loop()):
            return _copy(memory, pieces, self.checksums)
        work = self._on_threads(memory, pieces, nbytes)
        future = asyncio.get_running_loop().create_task(work)
        self.in_flight.add(future)
        future.add_done_callback(self._finished)
        if track is not None:
            track(future)
        return await asyncio.shield(future)

    def _may_hold_the_loop(self) -> bool:
        """Once in each of its turns."""
        if self._held:
            return False
        self._held = True
        asyncio.get_running_loop().call_soon(self._let_go)
        return True

    def _let_go(self) -> None:
        self._held = False

    async def _on_threads(
        self, memory: memoryview | None, pieces: Sequence[Piece], nbytes: int
    ) -> int:
        loop = asyncio.get_running_loop()
        alone = len(self.in_flight) <= 1
        count = min(self._num_threads, nbytes // SHARE_NBYTES)
        if self.checksums or count < 2 or not alone:  # a sum is made from front to back
            return await loop.run_in_executor(self._pool, _copy, memory, pieces, self.checksums)
        shares = share_out(pieces, count)
        copies = [loop.run_in_executor(self._pool, _copy, memory, s, False) for s in shares]
        await asyncio.wait(copies)  # all of them, also when one has failed
        return sum(copy.result() for copy in copies)

    async def checksum(self, views: Sequence[memoryview]) -> int:
        """What `copy` returns for these bytes, whether or not this copier computes sums."""
        if sum(view.nbytes for view in views) <= self._inline_nbytes:
            return checksum_of(views)
        return await asyncio.get_running_loop().run_in_executor(self._pool, checksum_of, views)

    async def settle(self, timeout_s: float) -> bool:
        """Wait for the copies that are in flight now; False if some are not done in time."""
        begun = set(self.in_flight)
        return not begun or not (await asyncio.wait(begun, timeout=timeout_s))[1]

    def close(self) -> None:
        """No further copies; does not wait (see `settle`)."""
        self._pool.shutdown(wait=False)

    def _finished(self, future: asyncio.Future[int]) -> None:
        self.in_flight.discard(future)
        if not future.cancelled():
            future.exception()  # seen, also when the caller was cancelled


def share_out(pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
    """The same bytes to the same places, in about equal shares, each contiguous."""
    share_nbytes = -(-sum(view.nbytes for _, view in pieces) // count)
    shares: list[list[Piece]] = [[]]
    room = share_nbytes
    for offset, view in pieces:
        while view.nbytes:
            if not room:
                shares.append([])
                room = share_nbytes
            step = min(room, view.nbytes)
            shares[-1].append((offset, view[:step]))
            offset, view, room = offset + step, view[step:], room - step
    return shares


def _copy(memory: memoryview | None, pieces: Sequence[Piece], checksums: bool) -> int:
    checksum = 0
    for offset, view in pieces:
        if not checksums:
            _copy_bytes(memory, offset, view)
            continue
        for start in range(0, view.nbytes, SUMMED_NBYTES):
            chunk = view[start : start + SUMMED_NBYTES]
            _copy_bytes(memory, offset + start, chunk)
            checksum = crc32(chunk, checksum)
    return checksum


def _copy_bytes(memory: memoryview | None, offset: int, view: memoryview) -> None:
    if memory is None:
        return
    target = np.frombuffer(memory[offset : offset + view.nbytes], dtype=np.uint8)
    np.copyto(target, np.frombuffer(view, dtype=np.uint8))
