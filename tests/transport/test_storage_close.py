"""A disk that hangs does not hold the end of those who use it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from epd.transport.files.store import FileStore
from epd.transport.storage import CLOSE_TIMEOUT_S, NUM_THREADS, ThreadedStorage
from tests.patience import PATIENCE_S

KEY = "ab" * 32


@pytest.mark.parametrize("num_open", [1, 10 * NUM_THREADS])
async def test_a_disk_that_hangs_does_not_hold_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_open: int
) -> None:
    storage, goes_on = ThreadedStorage(FileStore(str(tmp_path), 25_000)), threading.Event()
    monkeypatch.setattr(storage._store, "get", lambda *_: goes_on.wait(PATIENCE_S))
    calls = [asyncio.ensure_future(storage.get(KEY, b"n", 1)) for _ in range(num_open)]
    await asyncio.sleep(0.1)
    try:
        async with asyncio.timeout(4 * CLOSE_TIMEOUT_S):
            await storage.close()
    finally:
        goes_on.set()
        for call in calls:
            call.cancel()
