"""`Storage` over a `FileStore`, whose calls block: see `storage_threads`."""

from __future__ import annotations

from collections.abc import Sequence

from epd.transport.base import Buffer, StorageUsage
from epd.transport.file_store import FileStore
from epd.transport.storage_threads import StorageThreads


class FileStorage:
    """See `Storage`.  Raises TransportError when the directory cannot be used."""

    tier = "disk"

    def __init__(self, directory: str, max_nbytes: int) -> None:
        self._store = FileStore(directory, max_nbytes)
        self._threads = StorageThreads()

    async def get(self, key: str, note: bytes, nbytes: int) -> Buffer | None:
        """See `Storage.get`."""
        found = await self._threads.run(lambda: self._store.get(key), None)
        if found is None or found[0] != note or found[1].nbytes != nbytes:
            return None
        return found[1]

    async def put(self, key: str, note: bytes, value: Sequence[Buffer]) -> bool:
        """See `Storage.put`; durable when True."""
        return await self._threads.run(lambda: self._store.put(key, value, note), otherwise=False)

    async def listing(self) -> Sequence[str] | None:
        """See `Storage.listing`."""
        return await self._threads.run(self._store.listing, None)

    def usage(self) -> StorageUsage:
        store = self._store
        return StorageUsage(store.last_nbytes, store.max_nbytes, store.num_evicted)

    async def close(self) -> None:
        """See `Storage.close`.  Idempotent."""
        await self._threads.close()
