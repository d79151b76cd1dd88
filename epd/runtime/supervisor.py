"""One process per instance on this host, started, watched, restarted, and always cleaned up.

What becomes of each stands in CHILD's table; here its effects are performed.  Children live in
sessions of their own, so that Ctrl-C reaches only the supervisor, which ends them in order; and
they hold the supervisor's pipe, so that they end even if it is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from epd.errors import Told
from epd.fsm.child import Child as ChildMachine
from epd.fsm.child import (
    Do,
    Ended,
    HurryRequested,
    KillDue,
    Launched,
    LaunchFailed,
    LivedLong,
    Served,
    StartDue,
    StopRequested,
)
from epd.fsm.kernel import Effect, Event
from epd.fsm.story import RecordingJournal
from epd.runtime.child import ChildSpec, StatusLine
from epd.runtime.zygote import Process, Zygote, ZygoteLost
from epd.transport.shm_segment import sweep

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
STABLE_AFTER_S = 30.0
KILL_AFTER_S = 5.0

Launch = Callable[[], Awaitable[Process]]  # a process that waits for its ChildSpec


class StartFailed(Told):
    """A child could not start; the text is its own sentence."""


class Child:
    """One supervised process over all its lives: CHILD's effects, with real processes."""

    def __init__(self, spec: ChildSpec, changed: Callable[[Child], None], launch: Launch) -> None:
        self.spec = spec
        self.state = "starting"  # in words for whoever looks: ours, or the process's own
        self.detail = ""
        self.pid = 0
        self.starts = 0
        self.served = asyncio.Event()
        self.ended = asyncio.Event()
        self.machine = ChildMachine(spec.name, RecordingJournal(time.monotonic))
        self._changed = changed
        self._launch = launch
        self._process: Process | None = None
        self._pause_s = FIRST_BACKOFF_S
        self._clock: asyncio.TimerHandle | None = None
        self._life: asyncio.Task[None] | None = None
        self._perform: dict[Effect, Callable[[Event], None]] = {
            Do.LAUNCH: self._begin_life,
            Do.ARM_LIFE: lambda event: self._arm(STABLE_AFTER_S, LivedLong()),
            Do.FIRST_PAUSE: self._pause_first,
            Do.ARM_PAUSE: self._arm_pause,
            Do.SEND_TERM: lambda event: self._send(signal.SIGTERM),
            Do.SEND_INT: lambda event: self._send(signal.SIGINT),  # of two SIGTERM one may be lost
            Do.SEND_KILL: lambda event: self._send(signal.SIGKILL),
            Do.ARM_KILL: lambda event: self._arm(self._drain_timeout_s + KILL_AFTER_S, KillDue()),
            Do.ARM_GONE: lambda event: self._arm(KILL_AFTER_S, KillDue()),
            Do.TELL_SERVED: lambda event: self.served.set(),
            Do.TELL_FAILED: self._tell_failed,
            Do.TELL_STOPPED: lambda event: self._show("stopped"),
        }

    @property
    def name(self) -> str:
        return self.spec.name

    def fire(self, event: Event) -> None:
        for effect in self.machine.fire(event):
            self._perform[effect](event)
        if self.machine.terminal and not self.ended.is_set():
            self._disarm()
            self.ended.set()

    async def stop(self, *, hurried: bool) -> None:
        """Drain it (not if `hurried`); it is killed if it does not end.  One whose process is still
        being made is not waited for: it is told when it is."""
        self.fire(StopRequested())
        if hurried:
            self.fire(HurryRequested())
        if self._process is not None:
            await self.ended.wait()

    async def over(self) -> None:
        """Until nothing of it is left."""
        if self._life is not None:
            await self._life

    def kill(self, number: int = signal.SIGKILL) -> None:
        """For drills: a signal to the present process."""
        os.kill(self.pid, number)

    # --- a life -----------------------------------------------------------------------------------

    def _begin_life(self, event: Event) -> None:
        self.starts += 1
        self._show("starting")
        self._life = asyncio.get_running_loop().create_task(self._live())

    async def _live(self) -> None:
        try:
            self._process = process = await self._launch()
        except (ZygoteLost, OSError) as error:
            self.fire(LaunchFailed(str(error)))
            return
        self.pid = process.pid
        self.fire(Launched())
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        while line := await _line_of(process.stdout):
            status = _read_status(line)
            if status is None:  # a library that prints: not ours, and no reason to end
                sys.stderr.buffer.write(line)
                continue
            self._show(status.state, status.detail)
            if status.state == "serving":
                self.fire(Served())
        exit_status = await process.wait()
        sweep()  # a killed process could not remove its own segments
        self._process = None
        self.fire(Ended(exit_status))

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    # --- what time and others do ------------------------------------------------------------------

    def _arm(self, delay_s: float, event: Event) -> None:
        self._disarm()
        self._clock = asyncio.get_running_loop().call_later(delay_s, self.fire, event)

    def _disarm(self) -> None:
        if self._clock is not None:
            self._clock.cancel()

    def _pause_first(self, event: Event) -> None:
        self._pause_s = FIRST_BACKOFF_S

    def _arm_pause(self, event: Event) -> None:
        self._show("restarting", _why(event))
        self._arm(self._pause_s, StartDue())
        self._pause_s = min(MAX_BACKOFF_S, 2 * self._pause_s)

    def _tell_failed(self, event: Event) -> None:
        self._show("failed", self.detail or _why(event))  # its own sentence, if it has said one

    def _show(self, state: str, detail: str = "") -> None:
        self.state, self.detail = state, detail
        self._changed(self)

    @property
    def _drain_timeout_s(self) -> float:
        config = self.spec.gateway or self.spec.instance
        return config.timing.drain_timeout_s if config is not None else 0.0


def _why(event: Event) -> str:
    if isinstance(event, LaunchFailed):
        return event.reason
    assert isinstance(event, Ended)
    return f"ended with exit status {event.exit_status}"


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
        self._hurried = False

    def _launch(self, spec: ChildSpec) -> Launch:
        return (
            _launch_anew if spec.instance is None else self._zygotes[spec.instance.model_dir].fork
        )

    async def start(self) -> None:
        sweep()
        for child in self.children.values():
            child.fire(StartDue())

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
        lives = (child.over() for child in self.children.values())
        await asyncio.gather(*lives, return_exceptions=True)
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
            child.fire(HurryRequested())
