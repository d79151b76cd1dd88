"""The sending half of `epd bench hop`: one class per way.

`send` returns when the receiver could use the rows, in ns of the host's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from epd.messages import RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import BACKENDS
from epd.transport.base import TransferEngine, Written
from epd.transport.linked.leave import End, FarRegion, WritePiece
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.mooncake.library import Library
from epd_lab.bench.transports.hop_process import TAG_NBYTES, backend_of, fingerprint
from epd_lab.bench.transports.words import Remote

REFERENCES = (
    "memcpy", "mooncake-raw", "safetensors-shm", "safetensors-disk", "safetensors-fsync",
    "safetensors-medium",
)  # fmt: skip
ON_HOST = tuple(name for name, backend in BACKENDS.items() if not backend.on_device)
WAYS = ("memcpy", "local", *ON_HOST, "file-medium", *REFERENCES[1:])


def in_cache(path: str) -> None:
    """Leave a file as it was written."""


def to_disk(path: str) -> None:
    """Wait until a file is on its medium."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.close(fd)


def to_medium(path: str) -> None:
    """The same, and let whoever reads it read it from there."""
    fd = os.open(path, os.O_RDWR)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


AFTER = {
    "safetensors-shm": in_cache,
    "safetensors-disk": in_cache,
    "safetensors-fsync": to_disk,
    "safetensors-medium": to_medium,
}


class HopRows:
    """What is sent: `in_flight` items of random bytes, each tagged anew for each send."""

    def __init__(self, in_flight: int, nbytes: int) -> None:
        random = np.random.default_rng(0)
        self.items = [random.integers(0, 256, nbytes, np.uint8) for _ in range(in_flight)]
        self.fingerprints = [fingerprint(item) for item in self.items]
        self._tag = 0

    def tagged(self, slot: int) -> tuple[np.ndarray, dict[str, int]]:
        """The rows, and what the receiver must find."""
        self._tag += 1
        item = self.items[slot]
        item[:TAG_NBYTES] = item[-TAG_NBYTES:] = np.frombuffer(
            self._tag.to_bytes(TAG_NBYTES, "little"), np.uint8
        )
        return item, {"tag": self._tag, "expected": self.fingerprints[slot]}


class Sender(Protocol):
    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int: ...

    async def finish(self) -> None: ...


class Memcpy:
    """The measure of all: one copy by one thread, into memory that is warm, and no word."""

    def __init__(self, in_flight: int, nbytes: int) -> None:
        self._targets = [np.ones(nbytes, np.uint8) for _ in range(in_flight)]

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        np.copyto(self._targets[slot], rows)
        return time.perf_counter_ns()

    async def finish(self) -> None:
        self._targets.clear()


class Local:
    """Both stages in one process: a deposit by reference."""

    def __init__(self, in_flight: int, nbytes: int) -> None:
        memory = LocalMemory()
        self._engine = LocalTransferEngine(BackendSettings("sender", 1), memory)
        self._region = self._engine.allocate("rows", in_flight, nbytes, by_reference=True)

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        await self._engine.write([rows], self._region.remote, (slot,))
        self._region.views((slot,), rows.nbytes)
        usable_ns = time.perf_counter_ns()
        self._region.forget((slot,))
        return usable_ns

    async def finish(self) -> None:
        await self._engine.close()


class ByEngine:
    """A transfer engine of ours."""

    def __init__(self, way: str, receiver: Remote, directory: str, place: list[Any]) -> None:
        self._way = way
        self._receiver = receiver
        settings = BackendSettings("sender", time.time_ns(), directory=directory)
        self._engine: TransferEngine = BACKENDS[backend_of(way)].make(settings)
        self._target = msgspec.convert(place, RemoteRegion)

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        outcome = await self._engine.write([rows], self._target, (slot,))
        if not isinstance(outcome, Written):
            raise RuntimeError(f"{self._way}: {outcome}")  # noqa: TRY004 - not a type error
        await self.written()
        usable_ns: int = await self._receiver.ask(
            "use", way=self._way, slot=slot, nbytes=rows.nbytes, **seen
        )
        return usable_ns

    async def written(self) -> None:
        """Before the message to the receiver."""

    async def finish(self) -> None:
        await self._engine.close()


class FromMedium(ByEngine):
    """Our file transport as another host would see it: written through, and in no page cache."""

    def __init__(self, receiver: Remote, directory: str, place: list[Any]) -> None:
        super().__init__("file-medium", receiver, directory, place)
        self._where = os.path.join(directory, self._target.locator)

    async def written(self) -> None:
        await asyncio.to_thread(self._out_of_cache)

    def _out_of_cache(self) -> None:
        for name in os.listdir(self._where):
            if name.endswith(".rows"):
                with contextlib.suppress(FileNotFoundError):  # another item's, taken meanwhile
                    to_medium(os.path.join(self._where, name))


class RawMooncake:
    """Mooncake's engine alone: submit, sleep-polled status, and word to the receiver."""

    def __init__(self, receiver: Remote, place: list[Any]) -> None:
        self._receiver = receiver
        self._library = Library.acquire("127.0.0.1")
        host, port, self._base = place
        self._peer = f"{host}:{port}"

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        source = rows.__array_interface__["data"][0]
        pieces = [WritePiece(source, self._base + slot * rows.nbytes, rows.nbytes)]
        place = FarRegion(self._peer, self._base, rows.nbytes, slot + 1)
        moved = await asyncio.to_thread(self._library.transfer, place, pieces)
        if moved.end is not End.DONE:
            raise RuntimeError(f"mooncake-raw: {moved.end.value}")
        usable_ns: int = await self._receiver.ask(
            "use_raw", base=self._base, slot=slot, nbytes=rows.nbytes, **seen
        )
        return usable_ns

    async def finish(self) -> None:
        self._library.give_back()


class Safetensors:
    """As connectors over shared storage: a file per item.

    `after`: called with the file before the message to the receiver.
    """

    def __init__(self, receiver: Remote, directory: str, after: Callable[[str], None]) -> None:
        self._receiver = receiver
        self._directory = directory
        self._after = after

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        path = os.path.join(self._directory, f"epd-bench-{secrets.token_hex(6)}.safetensors")
        await asyncio.to_thread(self._save, rows, path)
        usable_ns: int = await self._receiver.ask("load", path=path, **seen)
        os.unlink(path)
        return usable_ns

    def _save(self, rows: np.ndarray, path: str) -> None:
        from safetensors.numpy import save_file

        save_file({"rows": rows}, path)
        self._after(path)

    async def finish(self) -> None:
        """Each file was removed behind its item."""


async def make_sender(
    way: str, receiver: Remote, directory: str, in_flight: int, nbytes: int
) -> Sender:
    """A way made ready; for ours and mooncake's the receiver has allocated its side."""
    if way == "memcpy":
        return Memcpy(in_flight, nbytes)
    if way == "local":
        return Local(in_flight, nbytes)
    if way.startswith("safetensors"):
        where = "/dev/shm" if way == "safetensors-shm" else directory
        return Safetensors(receiver, where, AFTER[way])
    place = await receiver.ask(
        "allocate", way=way, directory=directory, slots=in_flight, nbytes=nbytes
    )
    if way == "file-medium":
        return FromMedium(receiver, directory, place)
    if way == "mooncake-raw":
        return RawMooncake(receiver, place)
    return ByEngine(way, receiver, directory, place)
