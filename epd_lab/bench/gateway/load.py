"""A load generator that costs little: raw HTTP/1.1 over kept-alive connections, closed loop.

Requests are bytes made once.  A connection sends one, waits for the end of the answer (by its
Content-Length or its last chunk), notes the time, sends the next.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast

LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class LoadResult:
    """What a run saw."""

    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    failures: int = 0

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.elapsed_s if self.elapsed_s else 0.0

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def post(path: str, host: str, body: bytes) -> bytes:
    """One request, whole."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection(asyncio.Protocol):
    def __init__(self, load: ConstantLoad) -> None:
        self._load = load
        self._head = bytearray()
        self._left = -1  # bytes of the body to come; -1: the head is not complete; -2: chunked
        self._tail = b""
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of a stream
        self._send()

    def _send(self) -> None:
        if not self._load.take():
            self._transport.close()
            return
        self._head.clear()
        self._left, self._tail = -1, b""
        self._sent_s = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._load.result.nbytes += len(data)
        if self._left == -1:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head, data = bytes(self._head[:end]).lower(), bytes(self._head[end + 4 :])
            if not head.startswith(b"http/1.1 200"):
                self._load.result.failures += 1
            at = head.find(b"content-length:")
            self._left = -2 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._answered()
            return
        self._tail = (self._tail + data)[-len(LAST_CHUNK) :]
        if self._tail == LAST_CHUNK:
            self._answered()

    def _answered(self) -> None:
        self._load.result.latencies_s.append(time.perf_counter() - self._sent_s)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.closed()


class ConstantLoad:
    """`total` requests over `concurrency` connections."""

    def __init__(self, host: str, port: int, request: bytes, total: int, concurrency: int) -> None:
        self.request = request
        self.result = LoadResult()
        self._host, self._port = host, port
        self._left = total
        self._open = self._concurrency = concurrency
        self._done = asyncio.Event()

    def take(self) -> bool:
        self._left -= 1
        return self._left >= 0

    def closed(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._done.set()

    async def run(self, timeout_s: float = 120.0) -> LoadResult:
        loop = asyncio.get_running_loop()
        began_s = time.perf_counter()
        for _ in range(self._concurrency):
            await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        async with asyncio.timeout(timeout_s):
            await self._done.wait()
        self.result.elapsed_s = time.perf_counter() - began_s
        return self.result
