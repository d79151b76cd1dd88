"""`Storage` over a `FileStore`: its blocking calls on threads of their own, bounded.

A disk that hangs holds its threads, not the loop and not the encoder: when `MAX_WAITING` calls are
open, further reads are misses and further writes are not made, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from epd.transport.base import Buffer, StorageUsage
from epd.transport.file_store import FileStore

NUM_THREADS = 2
MAX_WAITING = 64
CLOSE_TIMEOUT_S = 2.0

T = TypeVar("T")


class FileStorage:
    """See `Storage`.  Raises TransportError when the directory cannot be used."""

    def __init__(self, directory: str, max_nbytes: int) -> None:
        self._store = FileStore(directory, max_nbytes)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="epd-storage")
        self._open: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def get(self, key: str, note: bytes, nbytes: int) -> Buffer | None:
        """See `Storage.get`."""
        found = await self._run(lambda: self._store.get(key), None)
        if found is None or found[0] != note or found[1].nbytes != nbytes:
            return None
        return found[1]

    async def put(self, key: str, note: bytes, value: Sequence[Buffer]) -> bool:
        """See `Storage.put`; durable when True."""
        return await self._run(lambda: self._store.put(key, value, note), otherwise=False)

    def usage(self) -> StorageUsage:
        store = self._store
        return StorageUsage(store.last_nbytes, store.max_nbytes, store.num_evicted)

    async def close(self) -> None:
        """See `Storage.close`.  Idempotent."""
        self._closed = True
        if self._open:
            await asyncio.wait(self._open, timeout=CLOSE_TIMEOUT_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, call: Callable[[], T], otherwise: T) -> T:
        if self._closed or len(self._open) >= MAX_WAITING:
            return otherwise
        future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return await asyncio.shield(future)
