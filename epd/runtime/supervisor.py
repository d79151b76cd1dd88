"""One process per instance on this host, started, watched, restarted, and always cleaned up.

A child that ends before it first served is a mistake in the configuration: everything stops, with
its sentence.  One that ends later is started anew with a back-off, as a new epoch.  Children live
in sessions of their own, so that Ctrl-C reaches only the supervisor, which ends them in order; and
they hold the supervisor's pipe, so that they end even if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from epd.errors import Told
from epd.runtime.child import ChildSpec, StatusLine
from epd.runtime.zygote import LOST, Process, Zygote, ZygoteLost
from epd.transport.shm_segment import sweep

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STABLE_AFTER_S = 30.0
KILL_AFTER_S = 5.0

Launch = Callable[[], Awaitable[Process]]  # a process that waits for its ChildSpec


class StartFailed(Told):
    """A child could not start; the text is its own sentence."""


class Child:
    """One supervised process over all its lives."""

    def __init__(self, spec: ChildSpec, changed: Callable[[Child], None], launch: Launch) -> None:
        self.spec = spec
        self.state = "starting"
        self.detail = ""
        self.pid = 0
        self.starts = 0
        self.exit_status: int | None = None
        self.served = asyncio.Event()
        self.ended = asyncio.Event()
        self._changed = changed
        self._launch = launch
        self._process: Process | None = None
        self._stopping = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    def _set(self, state: str, detail: str = "") -> None:
        self.state, self.detail = state, detail
        self._changed(self)

    async def run(self) -> None:
        """Start, watch, start again; returns when stopped or when it never served."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while not self._stopping.is_set():
                began_s = time.monotonic()
                try:
                    self.exit_status = await self._live_once()
                except ZygoteLost as lost:
                    self.exit_status, self.detail = LOST, str(lost)
                if self._stopping.is_set():
                    break
                if not self.served.is_set():
                    self._set("failed", self.detail or f"exit status {self.exit_status}")
                    break
                if time.monotonic() - began_s > STABLE_AFTER_S:
                    backoff_s = FIRST_BACKOFF_S
                self._set("restarting", f"ended with status {self.exit_status}")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
        finally:
            if self._stopping.is_set():
                self._set("stopped")
            self.ended.set()

    async def _live_once(self) -> int:
        self.starts += 1
        self._set("starting")
        self._process = process = await self._launch()
        self.pid = process.pid
        if self._stopping.is_set():  # asked while the process was being made
            process.send_signal(signal.SIGTERM)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        while line := await _line_of(process.stdout):
            status = _read_status(line)
            if status is None:  # a library that prints: not ours, and no reason to end
                sys.stderr.buffer.write(line)
                continue
            if status.state == "serving":
                self.served.set()
            self._set(status.state, status.detail)
        exit_status = await process.wait()
        sweep()  # a killed process could not remove its own segments
        return exit_status

    async def stop(self, *, hurried: bool) -> None:
        """Drain it (not if `hurried`); kill it if it does not end."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        if hurried:
            self.hurry()
        try:
            async with asyncio.timeout(self._drain_timeout_s + KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            await process.wait()

    def hurry(self) -> None:
        """If it is draining: end it now.  Another signal than SIGTERM, of which two may be one."""
        process = self._process
        if self._stopping.is_set() and process is not None and process.returncode is None:
            process.send_signal(signal.SIGINT)

    @property
    def _drain_timeout_s(self) -> float:
        config = self.spec.gateway or self.spec.instance
        return config.timing.drain_timeout_s if config is not None else 0.0

    def kill(self, number: int = signal.SIGKILL) -> None:
        """For drills: a signal to the present process."""
        os.kill(self.pid, number)


async def _line_of(stdout: asyncio.StreamReader) -> bytes:
    """Empty at the end, also of a child that died before it had read what it is to be."""
    try:
        return await stdout.readline()
    except ConnectionError:
        return b""


async def _launch_anew() -> Process:
    """An interpreter of its own: for the gateway, into which no torch may be mapped."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "epd.runtime.child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )


def _read_status(line: bytes) -> StatusLine | None:
    try:
        return msgspec.json.decode(line, type=StatusLine)
    except msgspec.MsgspecError:
        return None


class Supervisor:
    """The children of one cluster on this host."""

    def __init__(self, specs: list[ChildSpec], changed: Callable[[Child], None]) -> None:
        models = {spec.instance.model_dir for spec in specs if spec.instance is not None}
        self._zygotes = {model_dir: Zygote(model_dir) for model_dir in sorted(models)}
        self.children = {spec.name: Child(spec, changed, self._launch(spec)) for spec in specs}
        self._tasks: list[asyncio.Task[None]] = []
        self._hurried = False

    def _launch(self, spec: ChildSpec) -> Launch:
        return (
            _launch_anew if spec.instance is None else self._zygotes[spec.instance.model_dir].fork
        )

    async def start(self) -> None:
        sweep()
        self._tasks = [asyncio.create_task(child.run()) for child in self.children.values()]

    async def wait_serving(self, timeout_s: float) -> None:
        """Until every child serves.  Raises StartFailed with the words of the first that cannot."""
        try:
            async with asyncio.timeout(timeout_s):
                for child in self.children.values():
                    await self._first_of(child)
        except TimeoutError:
            states = ", ".join(f"{c.name} {c.state}" for c in self.children.values())
            raise StartFailed(f"not everything serves after {timeout_s:g} s: {states}") from None

    async def _first_of(self, child: Child) -> None:
        served = asyncio.ensure_future(child.served.wait())
        failed = asyncio.ensure_future(self.first_failure())
        done, pending = await asyncio.wait((served, failed), return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if failed in done:
            raise StartFailed(failed.result())

    async def first_failure(self) -> str:
        """The sentence of the first child that ended for good without being stopped."""
        waits = {asyncio.ensure_future(c.ended.wait()): c for c in self.children.values()}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        child = waits[next(task for task in waits if task in done)]
        return f"{child.name}: {child.detail or 'ended'}"

    async def stop(self) -> None:
        """Drain and end the gateway, whose open requests need the workers, then the workers."""
        for has_gateway in (True, False):
            group = [
                c for c in self.children.values() if (c.spec.gateway is not None) is has_gateway
            ]
            await asyncio.gather(*(child.stop(hurried=self._hurried) for child in group))
        for zygote in self._zygotes.values():
            await zygote.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._remove_left_files()

    def _remove_left_files(self) -> None:
        """What children that were killed could not remove themselves."""
        sweep()
        for child in self.children.values():
            for config in (child.spec.gateway, child.spec.instance):
                if config is not None and config.endpoint.startswith("ipc://"):
                    Path(config.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def hurry(self) -> None:
        """End at once what is draining, and do not drain the rest."""
        self._hurried = True
        for child in self.children.values():
            child.hurry()
