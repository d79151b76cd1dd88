"""Files of rows behind the `Storage` port: whole values of the right name, or a miss."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epd.transport.base import Storage
from epd.transport.files.store import FileStore
from epd.transport.storage import MAX_WAITING, ThreadedStorage
from tests.contract.transfer_kit import pattern
from tests.patience import PATIENCE_S

KEY = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
NOTE = b"float32 8 4"
VALUE = pattern(10_000)


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    made = ThreadedStorage(FileStore(str(tmp_path / "rows"), 1 << 20))
    yield made
    await made.close()


async def test_what_one_process_put_another_gets(storage: Storage, tmp_path: Path) -> None:
    assert await storage.put(KEY, NOTE, [VALUE[:7], VALUE[7:]])
    other = ThreadedStorage(FileStore(str(tmp_path / "rows"), 1 << 20))
    found = await other.get(KEY, NOTE, len(VALUE))
    assert bytes(found) == VALUE
    await other.close()
    assert await other.get(KEY, NOTE, len(VALUE)) is None, "closed"


async def test_a_file_under_another_name_is_a_miss(storage: Storage, tmp_path: Path) -> None:
    """F38: a restored backup, a clumsy hand."""
    await storage.put(KEY, NOTE, [VALUE])
    shutil.copytree(tmp_path / "rows" / KEY, tmp_path / "rows" / OTHER)
    assert await storage.get(OTHER, b"another note", len(VALUE)) is None
    assert await storage.get(KEY, NOTE, len(VALUE) - 1) is None, "another length"
    assert await storage.get(KEY, NOTE, len(VALUE)) is not None


async def test_another_note_replaces_the_value(storage: Storage) -> None:
    """Rows of another dtype under one hash must not stay for ever."""
    await storage.put(KEY, b"bfloat16 8 4", [VALUE[:5000]])
    assert await storage.put(KEY, NOTE, [VALUE])
    assert bytes(await storage.get(KEY, NOTE, len(VALUE)) or b"") == VALUE


async def test_a_value_does_not_depend_on_its_file(storage: Storage, tmp_path: Path) -> None:
    """Memory that is mapped would take the process with it when the file is cut."""
    await storage.put(KEY, NOTE, [VALUE])
    found = await storage.get(KEY, NOTE, len(VALUE))
    os.truncate(tmp_path / "rows" / KEY / "encoder_cache.safetensors", 0)
    assert bytes(found or b"") == VALUE
    assert await storage.get(KEY, NOTE, len(VALUE)) is None


async def test_a_directory_that_is_gone_keeps_nothing(storage: Storage, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "rows")
    (tmp_path / "rows").write_text("no directory")
    assert not await storage.put(KEY, NOTE, [VALUE])
    assert await storage.get(KEY, NOTE, len(VALUE)) is None


FULL = """
import asyncio, resource, signal, sys
from epd.transport.base import Storage
from epd.transport.files.store import FileStore
from epd.transport.storage import ThreadedStorage
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
storage = ThreadedStorage(FileStore(sys.argv[1], 1 << 20))
async def main():
    small = await storage.put("aa" * 32, b"", [bytes(1000)])
    big = await storage.put("bb" * 32, b"", [bytes(100_000)])
    again = await storage.get("aa" * 32, b"", 1000)
    print(small, big, again is not None)
asyncio.run(main())
"""


def test_a_full_disk_keeps_what_it_has(tmp_path: Path) -> None:
    """The kernel stops the write in the middle, as a full disk does; nothing of it stays."""
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "rows")],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert ended.stdout.split() == ["True", "False", "True"], ended.stderr
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["aa" * 32]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


async def test_a_disk_that_hangs_is_not_waited_for(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F4: beyond a bound of open calls every answer is a miss, at once."""
    goes_on = threading.Event()

    def hang(*_: Any) -> None:
        goes_on.wait(PATIENCE_S)

    monkeypatch.setattr(storage._store, "get", hang)
    open_calls = [asyncio.ensure_future(storage.get(KEY, NOTE, 1)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S / 2):
        assert await storage.get(KEY, NOTE, 1) is None
        assert not await storage.put(KEY, NOTE, [VALUE])
    goes_on.set()
    assert set(await asyncio.gather(*open_calls)) == {None}


async def test_usage_tells_evictions(tmp_path: Path) -> None:
    storage = ThreadedStorage(FileStore(str(tmp_path), 25_000))
    for number in range(4):
        assert await storage.put(f"{number:064x}", NOTE, [VALUE])
    usage = storage.usage()
    assert usage.evictions == 2
    assert usage.nbytes <= usage.capacity_nbytes == 25_000
    await storage.close()
