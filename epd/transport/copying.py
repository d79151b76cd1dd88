"""Memory copies that do not hold the event loop.

A copy below `inline_nbytes` is cheaper on the loop than a trip to a thread (about 100 us).  A
bigger one runs on a pool thread, in numpy, which lets go of the interpreter lock meanwhile.  A copy
that has begun cannot be taken back: cancelling the caller leaves the thread running, so the copier
keeps every copy in `in_flight` until its thread is really done, and whoever frees memory waits for
it.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from epd.transport.region import Piece

CHECKSUM_CHUNK_NBYTES = 256 << 10  # copied and summed while it is in cache


class Copier:
    """The copy threads of one transfer engine; threads start with the first big copy."""

    def __init__(self, *, checksums: bool, inline_nbytes: int = 256 << 10) -> None:
        self.checksums = checksums
        self._inline_nbytes = inline_nbytes
        self._pool = ThreadPoolExecutor(
            max_workers=max(2, min(4, os.cpu_count() or 1)), thread_name_prefix="epd-copy"
        )
        self.in_flight: set[asyncio.Future[int]] = set()

    async def copy(
        self,
        memory: memoryview | None,
        pieces: Sequence[Piece],
        track: Callable[[asyncio.Future[int]], None] | None = None,
    ) -> int:
        """Put the pieces into `memory` (None: only sum them up); returns the checksum or 0.

        `track` is told of the future when the copy goes to a thread.
        """
        nbytes = sum(view.nbytes for _, view in pieces)
        if nbytes <= self._inline_nbytes:
            return _copy(memory, pieces, self.checksums)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._pool, _copy, memory, pieces, self.checksums)
        self.in_flight.add(future)
        future.add_done_callback(self._finished)
        if track is not None:
            track(future)
        return await asyncio.shield(future)

    async def checksum(self, views: Sequence[memoryview]) -> int:
        """What `copy` returns for these bytes, whether or not this copier computes sums."""
        pieces: list[Piece] = [(0, view) for view in views]
        if sum(view.nbytes for view in views) <= self._inline_nbytes:
            return _copy(None, pieces, checksums=True)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, _copy, None, pieces, True)

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the copies in flight; False if some are not done in time."""
        if self.in_flight:
            await asyncio.wait(self.in_flight, timeout=timeout_s)
        return not self.in_flight

    def close(self) -> None:
        """No further copies; does not wait (see `drain`)."""
        self._pool.shutdown(wait=False)

    def _finished(self, future: asyncio.Future[int]) -> None:
        self.in_flight.discard(future)
        if not future.cancelled():
            future.exception()  # seen, also when the caller was cancelled


def _copy(memory: memoryview | None, pieces: Sequence[Piece], checksums: bool) -> int:
    checksum = 0
    for offset, view in pieces:
        if not checksums:
            _copy_bytes(memory, offset, view)
            continue
        for start in range(0, view.nbytes, CHECKSUM_CHUNK_NBYTES):
            chunk = view[start : start + CHECKSUM_CHUNK_NBYTES]
            _copy_bytes(memory, offset + start, chunk)
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _copy_bytes(memory: memoryview | None, offset: int, view: memoryview) -> None:
    if memory is None:
        return
    target = np.frombuffer(memory[offset : offset + view.nbytes], dtype=np.uint8)
    np.copyto(target, np.frombuffer(view, dtype=np.uint8))
