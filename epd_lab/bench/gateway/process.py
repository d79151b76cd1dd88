"""The two processes of `epd bench gateway`, each on one core: the gateway, and a null worker.

The gateway process also serves an echo on the next port, by the same server and event loop: what an
answer costs with nothing behind it.  With `time_machines` every `Machine.fire` is timed, for the
state machines' share of the process's CPU time; that run's throughput is not reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator

import msgspec
import uvicorn
import uvloop

from epd.api.http.exchange import Receive, Scope, Send
from epd.config import GatewayConfig, InstanceConfig
from epd.fsm.kernel import Effect, Event, Machine
from epd.model_files.fingerprint import model_fingerprint
from epd.roles.compose import Engines
from epd.runtime.front import serve_gateway
from epd.runtime.worker import Ending, serve_instance
from epd_lab.bench.gateway.null_engine import NullLanguage, NullVision


class Spec(msgspec.Struct, frozen=True):
    """What this process is to be."""

    core: int
    gateway: GatewayConfig | None = None
    instance: InstanceConfig | None = None
    echo_port: int = 0
    time_machines: bool = False


class FireTimer:
    """Sums the time spent in `Machine.fire`."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.calls = 0

    def install(self) -> None:
        inner = Machine.fire
        clock = time.perf_counter_ns

        def fire(machine: Machine, event: Event) -> tuple[Effect, ...]:
            began_ns = clock()
            try:
                return inner(machine, event)
            finally:
                self.total_ns += clock() - began_ns
                self.calls += 1

        Machine.fire = fire  # type: ignore[method-assign, assignment]


ECHO = json.dumps(
    {"choices": [{"message": {"role": "assistant", "content": "a" * 16}}] * 1}
).encode()


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body and answers."""
    if scope["type"] != "http":
        return
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ECHO))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ECHO})


class _Server(uvicorn.Server):
    """A server that leaves the signals to the process that it serves in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(spec: Spec) -> None:
    timer = FireTimer()
    if spec.time_machines:
        timer.install()
    ending = Ending()
    ending.watch_signals()
    echo_server = None

    def say(state: str, detail: str) -> None:
        print(json.dumps({"state": state, "detail": detail}), flush=True)

    if spec.gateway is not None:
        if spec.echo_port:
            config = uvicorn.Config(
                echo, port=spec.echo_port, http="httptools", log_config=None, access_log=False
            )
            echo_server = _Server(config)
            serving = asyncio.ensure_future(echo_server.serve())
        await serve_gateway(spec.gateway, ending, say)
        if echo_server is not None:
            echo_server.should_exit = True
            await serving
    elif spec.instance is not None:
        engines = Engines(NullVision(), NullLanguage())
        fingerprint = model_fingerprint(spec.instance.model_dir)
        await serve_instance(spec.instance, engines, fingerprint, ending, say)
    used = {"fire_s": timer.total_ns / 1e9, "calls": timer.calls, "cpu_s": time.process_time()}
    print(json.dumps({"state": "ended", **used}), flush=True)


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=Spec)
    if spec.core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {spec.core})
    uvloop.run(_run(spec))


if __name__ == "__main__":
    main()
