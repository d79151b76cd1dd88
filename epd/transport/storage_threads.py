"""Blocking calls of a storage on threads of their own, bounded.

A disk or a store that hangs holds its threads, not the loop and not the encoder: when `MAX_WAITING`
calls are open, further reads are misses and further writes are not made, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

NUM_THREADS = 2
MAX_WAITING = 64
CLOSE_TIMEOUT_S = 2.0

T = TypeVar("T")


class StorageThreads:
    """Of one storage."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-storage")
        self._open: set[asyncio.Future[Any]] = set()
        self.closed = False

    async def run(self, call: Callable[[], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise` where it cannot be made.  A cancelled caller leaves
        it running."""
        if self.closed or len(self._open) >= MAX_WAITING:
            return otherwise
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Wait briefly for open calls; make none from now on.  Idempotent."""
        self.closed = True
        if self._open:
            await asyncio.wait(self._open, timeout=CLOSE_TIMEOUT_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
