"""`Storage` over a store whose calls block, on threads of its own, bounded.

A disk or a store that hangs holds its threads, not the loop and not the encoder.  When
`MAX_WAITING` calls are open, further reads are misses and further writes are not made, at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from epd.transport.base import Buffer, StorageUsage, TransportError

NUM_THREADS = 2
MAX_WAITING = 64
CLOSE_TIMEOUT_S = 2.0

KEY = re.compile(r"[0-9a-f]{16,128}")
T = TypeVar("T")


def check_key(key: str) -> None:
    """Raises TransportError for what is no key of a store."""
    if not KEY.fullmatch(key):
        raise TransportError(f"{key[:80]!r} is no key of a store: give 16 to 128 hex digits")


class Store(Protocol):
    """What blocks; see `Storage` for what each call promises."""

    tier: str

    def find(self, key: str, note: bytes, nbytes: int) -> memoryview | None: ...

    def put(self, key: str, value: Sequence[Buffer], note: bytes) -> bool: ...

    def listing(self) -> Sequence[str] | None: ...

    def usage(self) -> StorageUsage: ...

    def close(self) -> None: ...


class ThreadedStorage:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.tier = store.tier
        self.usage = store.usage
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-storage")
        self._open: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def get(self, key: str, note: bytes, nbytes: int) -> Buffer | None:
        return await self._run(lambda: self._store.find(key, note, nbytes), None)

    async def put(self, key: str, note: bytes, value: Sequence[Buffer]) -> bool:
        return await self._run(lambda: self._store.put(key, value, note), otherwise=False)

    async def listing(self) -> Sequence[str] | None:
        return await self._run(self._store.listing, None)

    async def _run(self, call: Callable[[], T], otherwise: T) -> T:
        """What `call` returns, or `otherwise`: it cannot be made.  A cancelled caller leaves it
        running."""
        if self._closed or len(self._open) >= MAX_WAITING:
            return otherwise
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return await asyncio.shield(future)

    async def close(self) -> None:
        """Wait briefly for open calls; make none from now on.  Idempotent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):  # threads may all hang
                await self._run(self._store.close, None)
        self._closed = True
        if self._open:
            await asyncio.wait(self._open, timeout=CLOSE_TIMEOUT_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
