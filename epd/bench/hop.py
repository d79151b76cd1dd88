"""`epd bench hop`: one item of rows from a process that has it to one that can use it.

Every cell is measured the same way: the sender writes, tells the receiver in one line over a pipe,
and the receiver answers when it has the bytes at hand and has looked at every page of them.
Latency is from "rows ready" to that answer, so it includes a message each way, like a commit and
its acknowledgement.  The references run in the same run: a memcpy within the sender, mooncake's
engine driven bare, and safetensors files on disk and in /dev/shm.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from epd.bench.hop_lines import Lines
from epd.messages import RemoteRegion
from epd.transport.base import Written
from epd.transport.mooncake_library import End, Library, Piece, missing
from epd.transport.routing import BACKENDS, BackendSettings

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
IN_FLIGHT = (1, 4, 16)
REFERENCES = ("memcpy", "mooncake-raw", "safetensors-disk", "safetensors-shm")

Send = Callable[[int], Awaitable[None]]  # one item through slot


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    max_nbytes: int = 64 * MIB  # of an item
    pool_nbytes: int = 256 * MIB  # cells whose items in flight need more are left out
    volume_nbytes: int = 256 * MIB  # moved per cell, at least `min_items`
    min_items: int = 12
    max_items: int = 300
    backends: tuple[str, ...] = (*REFERENCES, *BACKENDS)


@dataclass(frozen=True, slots=True)
class Row:
    backend: str
    nbytes: int
    in_flight: int
    latency_us: dict[str, float]
    gb_per_s: float
    cpu_s_per_gb: float
    ratio_to_memcpy: float  # of the median latency


class Sender:
    """This process's half; the other is a child."""

    def __init__(self, lines: Lines, directory: str) -> None:
        self._lines = lines
        self._directory = directory
        self._turn = asyncio.Lock()
        self.child_cpu_s = 0.0

    async def ask(self, **question: Any) -> Any:
        async with self._turn:
            self._lines.write(json.dumps(question))
            answer = json.loads(await self._lines.read() or "{}")
        self.child_cpu_s = answer["cpu_s"]
        return answer["result"]

    async def prepare(
        self, backend: str, slots: int, nbytes: int
    ) -> tuple[Send, Callable[[], Any]]:
        """How to send an item, and what to do in the end."""
        rows = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        place = await self.ask(
            do="allocate", backend=backend, directory=self._directory, slots=slots, nbytes=nbytes
        )
        if backend == "memcpy":
            return _memcpy(rows), _nothing
        if backend.startswith("safetensors"):
            where = "/dev/shm" if backend.endswith("shm") else self._directory
            return functools.partial(self._send_file, rows, where), _nothing
        if backend == "mooncake-raw":
            library = Library.acquire("127.0.0.1")
            return functools.partial(self._send_raw, library, rows, *place), library.give_back
        settings = BackendSettings("sender", time.time_ns(), directory=self._directory)
        engine = BACKENDS[backend](settings)
        target = RemoteRegion(*place)

        async def send(slot: int) -> None:
            outcome = await engine.write([rows], target, (slot,))
            if outcome != Written(nbytes, 0):
                raise RuntimeError(f"{backend}: {outcome}")
            await self.ask(do="use", slot=slot, nbytes=nbytes)

        return send, engine.close

    async def _send_file(self, rows: np.ndarray, directory: str, slot: int) -> None:
        from safetensors.numpy import save_file

        path = os.path.join(directory, f"epd-bench-{secrets.token_hex(6)}.safetensors")
        await asyncio.to_thread(save_file, {"rows": rows}, path)
        await self.ask(do="load", path=path)
        os.unlink(path)

    async def _send_raw(
        self, library: Library, rows: np.ndarray, host: str, port: int, base: int, slot: int
    ) -> None:
        source = rows.__array_interface__["data"][0]
        pieces = [Piece(source, base + slot * rows.nbytes, rows.nbytes)]
        end = await asyncio.to_thread(library.transfer, f"{host}:{port}", pieces)
        if end is not End.DONE:
            raise RuntimeError(f"mooncake-raw: {end.value}")
        await self.ask(do="note", slot=slot, nbytes=rows.nbytes)


def _memcpy(rows: np.ndarray) -> Send:
    target = np.ones_like(rows)

    async def send(slot: int) -> None:
        np.copyto(target, rows)

    return send


def _nothing() -> None:
    """No engine was made."""


async def measure(sender: Sender, plan: Plan, backend: str, nbytes: int, in_flight: int) -> Row:
    """One cell; `ratio_to_memcpy` is filled in later."""
    count = min(plan.max_items, max(plan.min_items, in_flight * 3, plan.volume_nbytes // nbytes))
    send, finish = await sender.prepare(backend, in_flight, nbytes)
    free: asyncio.Queue[int] = asyncio.Queue()
    for slot in range(in_flight):
        await send(slot)  # connects, touches, maps
        free.put_nowait(slot)
    latencies_s: list[float] = []

    async def one() -> None:
        slot = await free.get()
        began_s = time.perf_counter()
        await send(slot)
        latencies_s.append(time.perf_counter() - began_s)
        free.put_nowait(slot)

    cpu_s, began_s = time.process_time() + sender.child_cpu_s, time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    took_s = time.perf_counter() - began_s
    cpu_s = time.process_time() + sender.child_cpu_s - cpu_s
    ending = finish()
    if asyncio.iscoroutine(ending):
        await ending
    gigabytes = count * nbytes / 1e9
    ranked = sorted(latencies_s)
    latency_us = {
        "p50": round(statistics.median(ranked) * 1e6, 1),
        "p99": round(ranked[min(len(ranked) - 1, int(len(ranked) * 0.99))] * 1e6, 1),
    }
    return Row(
        backend, nbytes, in_flight, latency_us,
        round(gigabytes / took_s, 3), round(cpu_s / gigabytes, 3), 1.0,
    )  # fmt: skip


async def measure_all(plan: Plan) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as directory:
        process = _start_receiver()
        assert process.stdin is not None
        assert process.stdout is not None
        lines = await Lines.of(process.stdout, process.stdin)
        sender = Sender(lines, directory)
        rows = []
        try:
            for nbytes in (size for size in SIZES if size <= plan.max_nbytes):
                for in_flight in (n for n in IN_FLIGHT if n * nbytes <= plan.pool_nbytes):
                    rows += [
                        await measure(sender, plan, backend, nbytes, in_flight)
                        for backend in plan.backends
                        if in_flight == 1 or backend != "memcpy"
                    ]
        finally:
            lines.close()
            await asyncio.to_thread(process.wait, 30)
    return with_ratios(rows)


def _start_receiver() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "epd.bench.hop_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def with_ratios(rows: list[Row]) -> list[Row]:
    """Median latency against the memcpy of the same size."""
    memcpy = {row.nbytes: row.latency_us["p50"] for row in rows if row.backend == "memcpy"}
    found = []
    for row in rows:
        ratio = row.latency_us["p50"] / memcpy[row.nbytes]
        found.append(Row(**{**asdict(row), "ratio_to_memcpy": round(ratio, 2)}))
    return found


def table(rows: list[Row]) -> str:
    lines = ["backend               KiB  fly     p50 us     p99 us    GB/s  cpu s/GB  /memcpy"]
    lines += [
        f"{row.backend:<17}{row.nbytes // KIB:>8}{row.in_flight:>5}{row.latency_us['p50']:>11.0f}"
        f"{row.latency_us['p99']:>11.0f}{row.gb_per_s:>8.2f}{row.cpu_s_per_gb:>10.2f}"
        f"{row.ratio_to_memcpy:>9.1f}"
        for row in rows
    ]
    return "\n".join(lines)


def run(plan: Plan, *, as_json: bool) -> int:
    import uvloop

    if reason := missing():
        print(f"left out: {reason}", file=sys.stderr)
        kept = tuple(name for name in plan.backends if not name.startswith("mooncake"))
        plan = Plan(**{**asdict(plan), "backends": kept})
    rows = uvloop.run(measure_all(plan))
    print(json.dumps({"rows": [asdict(row) for row in rows]}) if as_json else table(rows))
    return 0
