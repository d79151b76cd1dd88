"""Rows in Mooncake Store: whole values of the right name or a miss, whatever the store does.

With a real master and real clients over TCP where the library is installed, else skipped.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd.config import MOONCAKE_OVER_TCP
from epd.transport.base import TransportError
from epd.transport.mooncake import store as mooncake_store
from epd.transport.mooncake.library import missing
from epd.transport.mooncake.store import PREFIX, MooncakeStore
from epd.transport.storage import ThreadedStorage
from tests.contract.transfer_kit import pattern
from tests.patience import PATIENCE_S

KEY = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
NOTE = b"float32 8 4"
VALUE = pattern(100_000)
MIB = 1 << 20

real = pytest.mark.skipif(bool(missing()), reason="needs mooncake")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    import mooncake

    binary = Path(mooncake.__path__[0]) / "mooncake_master"
    port, metrics = free_port(), free_port()
    with (tmp_path / "master.log").open("wb") as log:
        process = subprocess.Popen(
            [binary, f"-rpc_port={port}", "-rpc_address=127.0.0.1", f"-metrics_port={metrics}",
             "-metrics_host=127.0.0.1"],
            stdout=log, stderr=log,
        )  # fmt: skip
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield f"127.0.0.1:{port}", process
    process.kill()
    process.wait()


def opened(master: str, nbytes: int = 32 * MIB) -> ThreadedStorage:
    return ThreadedStorage(MooncakeStore(master, "127.0.0.1", nbytes, MOONCAKE_OVER_TCP))


CHILD = """
import asyncio, sys
from tests.patience import PATIENCE_S
from epd.config import MOONCAKE_OVER_TCP
from epd.transport.mooncake.store import MooncakeStore
from epd.transport.storage import ThreadedStorage
storage = ThreadedStorage(MooncakeStore(sys.argv[1], "127.0.0.1", 16 << 20, MOONCAKE_OVER_TCP))
async def main():
    found = await storage.get(sys.argv[2], sys.argv[3].encode(), int(sys.argv[4]))
    print("found", sum(found) if found is not None else None)
    await storage.close()
asyncio.run(main())
"""


@real
async def test_what_one_process_put_another_gets_and_a_dead_master_is_a_miss(
    master: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_store, "REST_S", 600.0)  # however slow the machine is
    address, process = master
    storage = opened(address)
    assert await storage.get(KEY, NOTE, len(VALUE)) is None, "never put"
    assert await storage.put(KEY, NOTE, [VALUE[:7], VALUE[7:]])
    other = subprocess.run(
        [sys.executable, "-c", CHILD, address, KEY, NOTE.decode(), str(len(VALUE))],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert f"found {sum(VALUE)}" in other.stdout, other.stderr
    assert storage.usage().nbytes == len(VALUE)
    assert await storage.get(OTHER, NOTE, len(VALUE)) is None

    process.kill()
    process.wait()
    assert await storage.get(KEY, NOTE, len(VALUE)) is None
    store, client = storage._store, storage._store._client
    store._client = None  # whoever asked it would fail: it is left alone for a while
    assert not await storage.put(OTHER, NOTE, [VALUE])
    assert await storage.get(KEY, NOTE, len(VALUE)) is None
    store._client = client
    began_s = time.monotonic()
    await storage.close()
    assert time.monotonic() - began_s < 30, "who is gone is not waited for"
    assert await storage.get(KEY, NOTE, len(VALUE)) is None, "closed"


@real
async def test_what_is_not_the_value_is_removed(
    master: tuple[str, subprocess.Popen[bytes]],
) -> None:
    """F32, F38: rows of another dtype, torn bytes, and somebody else's value under the name."""
    storage = opened(master[0])
    client: Any = storage._store._client

    async def puts_and_gets() -> bool:
        assert await storage.put(KEY, NOTE, [VALUE])
        found = await storage.get(KEY, NOTE, len(VALUE))
        return found is not None and bytes(found) == VALUE

    assert await puts_and_gets()
    assert await storage.get(KEY, b"bfloat16 8 4", len(VALUE)) is None
    assert await puts_and_gets(), "the other note's value was in the way"
    for spoiled in (b"", b"no value of ours", bytes(client.get(PREFIX + KEY))[:-1] + b"\0"):
        client.remove(PREFIX + KEY, True)
        client.put(PREFIX + KEY, spoiled)
        assert await storage.get(KEY, NOTE, len(VALUE)) is None
        assert await puts_and_gets()
    assert not await storage.put(OTHER, NOTE, [bytes(40 * MIB)]), "larger than the store"
    await storage.close()


@real
def test_a_master_that_is_not_there_is_told_at_once() -> None:
    began_s = time.monotonic()
    for address in (f"127.0.0.1:{free_port()}", "nowhere", "127.0.0.1:master"):
        with pytest.raises(TransportError, match=r"no mooncake_master answers at .*--rpc_port"):
            opened(address)
    assert time.monotonic() - began_s < 30, "the library itself would try for 90 s"


async def test_no_key_is_a_path() -> None:
    storage = ThreadedStorage(MooncakeStore.__new__(MooncakeStore))
    with pytest.raises(TransportError, match="hex digits"):
        await storage.get("../../etc/passwd", NOTE, 1)
    with pytest.raises(TransportError, match="hex digits"):
        await storage.put("", NOTE, [b"x"])


def test_a_build_without_a_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "load", lambda: None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(TransportError, match="has no store"):
        mooncake_store._client_class()
