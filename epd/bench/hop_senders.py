"""The sending half of `epd bench hop`: one class per way.

`send` returns when the receiver could use the rows, in ns of the host's monotonic clock.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from typing import Any, Protocol

import numpy as np

from epd.bench.hop_process import TAG_NBYTES, fingerprint
from epd.bench.words import Remote
from epd.messages import RemoteRegion
from epd.transport.base import TransferEngine, Written
from epd.transport.local import LocalMemory, LocalTransferEngine
from epd.transport.mooncake_library import End, Library, Piece
from epd.transport.routing import BACKENDS, BackendSettings

REFERENCES = (
    "memcpy", "mooncake-raw", "safetensors-shm", "safetensors-disk", "safetensors-fsync",
)  # fmt: skip
WAYS = ("memcpy", "local", *BACKENDS, *REFERENCES[1:])


class Rows:
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
        self._engine = LocalTransferEngine("sender", 1, memory)
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

    def __init__(self, backend: str, receiver: Remote, directory: str, place: list[Any]) -> None:
        self._backend = backend
        self._receiver = receiver
        settings = BackendSettings("sender", time.time_ns(), directory=directory)
        self._engine: TransferEngine = BACKENDS[backend](settings)
        self._target = RemoteRegion(*place)

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        outcome = await self._engine.write([rows], self._target, (slot,))
        if not isinstance(outcome, Written):
            raise RuntimeError(f"{self._backend}: {outcome}")  # noqa: TRY004 - not a type error
        usable_ns: int = await self._receiver.ask(
            "use", backend=self._backend, slot=slot, nbytes=rows.nbytes, **seen
        )
        return usable_ns

    async def finish(self) -> None:
        await self._engine.close()


class RawMooncake:
    """Mooncake's engine alone: submit, sleep-polled status, and word to the receiver."""

    def __init__(self, receiver: Remote, place: list[Any]) -> None:
        self._receiver = receiver
        self._library = Library.acquire("127.0.0.1")
        host, port, self._base = place
        self._peer = f"{host}:{port}"

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        source = rows.__array_interface__["data"][0]
        pieces = [Piece(source, self._base + slot * rows.nbytes, rows.nbytes)]
        end = await asyncio.to_thread(self._library.transfer, self._peer, pieces)
        if end is not End.DONE:
            raise RuntimeError(f"mooncake-raw: {end.value}")
        usable_ns: int = await self._receiver.ask(
            "use_raw", base=self._base, slot=slot, nbytes=rows.nbytes, **seen
        )
        return usable_ns

    async def finish(self) -> None:
        self._library.give_back()


class Safetensors:
    """What connectors over shared storage do: a file per item."""

    def __init__(self, receiver: Remote, directory: str, *, durable: bool) -> None:
        self._receiver = receiver
        self._directory = directory
        self._durable = durable

    async def send(self, slot: int, rows: np.ndarray, seen: dict[str, int]) -> int:
        path = os.path.join(self._directory, f"epd-bench-{secrets.token_hex(6)}.safetensors")
        await asyncio.to_thread(self._save, rows, path)
        usable_ns: int = await self._receiver.ask("load", path=path, **seen)
        os.unlink(path)
        return usable_ns

    def _save(self, rows: np.ndarray, path: str) -> None:
        from safetensors.numpy import save_file

        save_file({"rows": rows}, path)
        if self._durable:
            fd = os.open(path, os.O_RDWR)
            os.fsync(fd)
            os.close(fd)

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
        return Safetensors(receiver, where, durable=way == "safetensors-fsync")
    place = await receiver.ask(
        "allocate", backend=way, directory=directory, slots=in_flight, nbytes=nbytes
    )
    if way == "mooncake-raw":
        return RawMooncake(receiver, place)
    return ByEngine(way, receiver, directory, place)
