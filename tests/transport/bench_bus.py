"""Round trips per second of ZmqBus between two processes: `python tests/transport/bench_bus.py`.

`--loop asyncio` measures the standard loop instead of uvloop.  Not a test: numbers depend on what
else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Coroutine
from typing import Any

import uvloop

from epd.messages import Address, Leave, StageReport
from epd.transport.base import Received
from epd.transport.bus.zmq import ZmqBus

MESSAGE = StageReport(request_id="request-1", attempt=1, spans=())
ROWS = [(1, 0, 5000), (64, 0, 50_000), (256, 0, 100_000), (8, 200 << 10, 1000), (8, 8 << 20, 50)]


def run(main: Coroutine[Any, Any, None], loop: str) -> None:
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


def make_bus(directory: str, own: str, peer: str) -> ZmqBus:
    bus = ZmqBus(own, 1, f"ipc://{directory}/{own}")
    bus.connect(Address(peer, 1, f"ipc://{directory}/{peer}"))
    return bus


async def echo(directory: str) -> None:
    bus, done = make_bus(directory, "echo", "caller"), asyncio.Event()

    def deliver(received: Received) -> None:
        if isinstance(received.message, Leave):
            done.set()
        else:
            bus.send("caller", received.message, received.payloads)

    bus.start(deliver)
    await done.wait()
    await bus.close()


def run_echo(directory: str, loop: str) -> None:
    run(echo(directory), loop)


class Caller:
    """Keeps `window` messages under way until `total` have come back."""

    def __init__(self, directory: str) -> None:
        self.bus = make_bus(directory, "caller", "echo")
        self._to_send = self._to_come = 0
        self._payloads: tuple[bytes, ...] = ()
        self._done = asyncio.Event()
        self.bus.start(self._deliver)

    async def measure(self, window: int, payload_nbytes: int, total: int) -> float:
        """Seconds."""
        self._payloads = (os.urandom(payload_nbytes),) if payload_nbytes else ()
        self._to_send, self._to_come = total - window, total
        self._done.clear()
        started_s = time.perf_counter()
        for _ in range(window):
            self.bus.send("echo", MESSAGE, self._payloads)
        await self._done.wait()
        return time.perf_counter() - started_s

    def _deliver(self, _received: Received) -> None:
        self._to_come -= 1
        if self._to_send:
            self._to_send -= 1
            self.bus.send("echo", MESSAGE, self._payloads)
        elif not self._to_come:
            self._done.set()


async def main(directory: str) -> None:
    caller = Caller(directory)
    await caller.measure(1, 0, 200)  # connected and warm
    for window, payload_nbytes, total in ROWS:
        elapsed_s = await caller.measure(window, payload_nbytes, total)
        print(
            f"in flight {window:3d}  payload {payload_nbytes:8d} B  "
            f"{total / elapsed_s:8.0f} round trips/s  {elapsed_s / total * 1e6:8.1f} us each"
        )
    caller.bus.send("echo", Leave())
    await caller.bus.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    chosen = parser.parse_args().loop
    with tempfile.TemporaryDirectory() as made:
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=run_echo, args=(made, chosen))
        child.start()
        run(main(made), chosen)
        child.join()
