"""One end of what `test_transfers` measures, in a process on its host: rows over the transport, or
the same bytes through a plain socket.

    python -m tests.e2e.hosts.stream_child FD
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import uvloop

from epd.messages import RemoteRegion
from epd.transport.backend import BackendSettings
from epd.transport.backends import named
from epd.transport.base import Region, TransferEngine, Written
from epd_lab.bench.transports.words import answer_all

ROWS_NBYTES, IN_FLIGHT = 16 << 20, 4


class Side:
    """The names of its methods are the questions."""

    def __init__(self) -> None:
        self._engine: TransferEngine | None = None
        self._region: Region | None = None
        self._rows = np.random.default_rng(0).integers(0, 256, ROWS_NBYTES, np.uint8)

    def start(self, name: str, host: str, backend: str) -> list[Any]:
        """A region's fields, and the port of a plain reader."""
        settings = BackendSettings(name, 1, checksums=True, host=host, secret=b"of both hosts" * 3)
        self._engine = named(backend).make(settings)
        self._region = self._engine.allocate("rows", IN_FLIGHT, ROWS_NBYTES)
        listener = socket.create_server((host, 0))
        threading.Thread(target=_read_all, args=(listener,), daemon=True).start()
        return [msgspec.to_builtins(self._region.remote), listener.getsockname()[1]]

    async def write(self, target: list[Any], count: int) -> float:
        """GB/s of so many, `IN_FLIGHT` at a time."""
        assert self._engine is not None
        remote, engine = msgspec.convert(target, RemoteRegion), self._engine
        began_s = time.perf_counter()

        async def one_after_the_other(slot: int) -> None:
            for _ in range(count // IN_FLIGHT):
                outcome = await engine.write([self._rows], remote, (slot,))
                assert isinstance(outcome, Written), outcome

        await asyncio.gather(*map(one_after_the_other, range(IN_FLIGHT)))
        return count * ROWS_NBYTES / (time.perf_counter() - began_s) / 1e9

    def pour(self, host: str, port: int, count: int) -> float:
        """The same through a plain socket."""
        began_s = time.perf_counter()
        with socket.create_connection((host, port)) as stream:
            for _ in range(count):
                stream.sendall(self._rows)
            stream.shutdown(socket.SHUT_WR)
            assert stream.recv(1) == b"."
        return count * ROWS_NBYTES / (time.perf_counter() - began_s) / 1e9


def _read_all(listener: socket.socket) -> None:
    into = memoryview(bytearray(ROWS_NBYTES))
    while True:
        stream, _ = listener.accept()
        with stream:
            while stream.recv_into(into):
                pass
            stream.sendall(b".")


if __name__ == "__main__":
    uvloop.run(answer_all(int(sys.argv[1]), Side()))
