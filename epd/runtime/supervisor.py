"""One process per instance on this host, started, watched, restarted, and always cleaned up.

What becomes of each stands in CHILD's table; here its effects are performed, each whatever becomes
of the others (fault F69).  Children live in sessions of their own, so that Ctrl-C reaches only the
supervisor, which ends them in order.  They hold the supervisor's socket, so that they end even if
it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from epd.config import Timing
from epd.errors import Told
from epd.fsm.child import (
    Answered,
    AskDue,
    DeclaredLost,
    Do,
    Drained,
    Ended,
    HurryRequested,
    KillDue,
    Launched,
    LaunchFailed,
    Patience,
    Served,
    StartDue,
    StopRequested,
    Waits,
)
from epd.fsm.child import Child as ChildMachine
from epd.fsm.kernel import Effect, Event
from epd.fsm.story import RecordingJournal
from epd.runtime import lines
from epd.runtime.child import ChildSpec, StatusLine
from epd.runtime.claim import own_life, read_claim
from epd.runtime.worker import ALIVE, EXIT_DRAINED, LOST, MEETING, ROLES
from epd.runtime.zygote import Process, Zygote
from epd.transport.endpoint import ipc_path, is_answered
from epd.transport.shm.segment import sweep

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
KILL_AFTER_S = 5.0
ASKS_BEFORE_SILENT = 4
HUNG_AFTER_LOST = 2  # times as long as until a gateway takes it for lost, where none says so
STUCK_AFTER_S = 600.0  # while it loads: the last stretch of which it says nothing
LONG_LIFE_S = 10.0
LAST_WORDS_S = 1.0  # for what a process wrote before it ended
MAX_LINE_NBYTES = 1 << 16
WAITING = "waiting"  # a gateway answers from then on, if only that it waits; a worker does not

Launch = Callable[[], Awaitable[Process]]  # a process that waits for its ChildSpec


class StartFailed(Told):
    """A child could not start; the text is its own sentence."""


class Child:
    """One supervised process over all its lives: CHILD's effects, with real processes."""

    def __init__(
        self,
        spec: ChildSpec,
        changed: Callable[[Child], None],
        launch: Launch,
        tell_lost: Callable[[str], None] = lambda pid: None,
    ) -> None:
        self.spec = spec
        self.state = "starting"  # in words for whoever looks: ours, or the process's own
        self.detail = ""
        self.pid = 0
        self.starts = 0
        self._served = 0  # number of the last start that came to serve
        self._former: ChildSpec | None = None  # with former roles, until one serves with others
        self.served = asyncio.Event()
        self.ended = asyncio.Event()
        timing = _timing_of(spec)
        self._ask_s = timing.suspect_after_s / ASKS_BEFORE_SILENT
        patience = _patience(timing, self._ask_s)
        self.machine = ChildMachine(spec.name, RecordingJournal(time.monotonic), patience)
        self._changed = changed
        self._launch = launch
        self._tell_lost = tell_lost
        self._process: Process | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._life: asyncio.Task[None] | None = None
        move_s = timing.move_timeout_s if spec.instance is not None else 0.0
        drain_s = timing.drain_timeout_s + move_s
        self._perform: dict[Effect, Callable[[Event], None]] = {
            Do.LAUNCH: self._begin_life,
            Do.ASK: self._ask,
            Do.ARM_PAUSE: self._arm_pause,
            Do.SEND_TERM: lambda event: self._send(signal.SIGTERM),
            Do.SEND_INT: lambda event: self._send(signal.SIGINT),  # of two SIGTERM one may be lost
            Do.SEND_KILL: lambda event: self._send(signal.SIGKILL),
            Do.ARM_KILL: lambda event: self._arm(drain_s + KILL_AFTER_S, KillDue()),
            Do.ARM_GONE: lambda event: self._arm(KILL_AFTER_S, KillDue()),
            Do.TELL_SERVED: self._tell_served,
            Do.TELL_SILENT: lambda event: self._show("silent", "does not answer its supervisor"),
            Do.TELL_HUNG: lambda event: self._show("hung", "killed, to be started again"),
            Do.TELL_FAILED: lambda event: self._show("failed", self.detail or _why(event)),
            Do.TELL_STOPPED: lambda event: self._show("stopped"),
        }

    @property
    def name(self) -> str:
        return self.spec.name

    def fire(self, event: Event) -> None:
        for effect in self.machine.fire(event):
            try:
                self._perform[effect](event)
            except Exception as error:
                lines.say(f"{self.name}: {effect.name} failed: {error!r}")
        if self.machine.terminal and not self.ended.is_set():
            self._disarm()
            self.ended.set()

    async def stop(self, *, hurried: bool) -> None:
        """Drain it (not if `hurried`); it is killed if it does not end.  One whose process is still
        being made is not waited for: it gets the signal then."""
        self.fire(StopRequested())
        if hurried:
            self.fire(HurryRequested())
        if self._process is not None:
            await self.ended.wait()

    async def over(self) -> None:
        """Until nothing of it is left."""
        if self._life is not None:
            await self._life

    # --- a life -----------------------------------------------------------------------------------

    def _begin_life(self, event: Event) -> None:
        self.starts += 1
        self._life = asyncio.get_running_loop().create_task(self._live())
        self._show("restarting" if self.served.is_set() else "starting", _why(event))

    async def _live(self) -> None:
        """Whatever goes wrong here is an end of the child, and an event of its table."""
        try:
            self._process = process = await self._launch()
        except Exception as error:
            self.fire(LaunchFailed(str(error) or type(error).__name__))
            return
        self.pid = process.pid
        self.fire(Launched())
        hearing = asyncio.ensure_future(self._hear(process))
        exit_status = await process.wait()
        await asyncio.wait((hearing,), timeout=LAST_WORDS_S)  # others may hold its stdout
        hearing.cancel()
        if process.stdin is not None:
            process.stdin.close()
        self.pid, self._process = 0, None
        with contextlib.suppress(OSError):
            sweep()  # a killed process could not remove its own segments
        if self._served < self.starts and self._former is not None:
            self.spec, self._former = self._former, None
        self.fire(Drained() if exit_status == EXIT_DRAINED else Ended(exit_status))

    async def _hear(self, process: Process) -> None:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(self.spec) + b"\n")
            async for line in _lines_of(process.stdout):
                self._take(line)
        except Exception as error:
            lines.say(f"{self.name}: it cannot be followed and is killed: {error!r}")
            self._send(signal.SIGKILL)

    def _take(self, line: bytes) -> None:
        status = _read_status(line)
        if status is None:  # a library that prints: not ours, and no reason to end
            lines.say(line)
        elif status.state == LOST:
            self._tell_lost(status.detail)
        elif status.state == ALIVE:
            self.fire(Answered())
        elif status.state == ROLES:
            self._former, self.spec = self.spec, self.spec.having(status.detail.split("+"))
        else:
            self._show(status.state, status.detail)
            serves = status.state == "serving" or (status.state == WAITING and self.spec.gateway)
            meets = status.state == MEETING
            if serves and self._served < self.starts:
                self._served, self._former = self.starts, None
            self.fire(Served() if serves else Waits() if meets else Answered())

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    # --- what time and others do ------------------------------------------------------------------

    def _arm(self, delay_s: float, event: Event) -> None:
        self._disarm()
        self._clock = asyncio.get_running_loop().call_later(delay_s, self.fire, event)

    def _disarm(self) -> None:
        if self._clock is not None:
            self._clock.cancel()

    def _ask(self, event: Event) -> None:
        self._arm(self._ask_s, AskDue())
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"\n")

    def _arm_pause(self, event: Event) -> None:
        longer = 2 ** min(self.machine.num_pauses - 1, 30)
        self._arm(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * longer), StartDue())
        self._show("restarting", _why(event))

    def _tell_served(self, event: Event) -> None:
        self.served.set()
        if self.state not in ("serving", WAITING):
            self._show("serving")

    def _show(self, state: str, detail: str = "") -> None:
        self.state, self.detail = state, detail
        try:
            self._changed(self)
        except Exception as error:
            lines.say(f"{self.name}: {state} cannot be shown: {error!r}")


def _timing_of(spec: ChildSpec) -> Timing:
    config = spec.gateway or spec.instance
    return config.timing if config is not None else Timing()


def _patience(timing: Timing, ask_s: float) -> Patience:
    return Patience(
        silent=ASKS_BEFORE_SILENT,
        hung=round(HUNG_AFTER_LOST * timing.lost_after_s / ask_s),
        stuck=round(STUCK_AFTER_S / ask_s),
        long_life=round(LONG_LIFE_S / ask_s),
    )


def _why(event: Event) -> str:
    if isinstance(event, LaunchFailed):
        return event.reason
    if isinstance(event, Ended):
        return f"ended with exit status {event.exit_status}"
    return ""


async def _lines_of(stdout: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Until the end, which may come before it has read its task.  A line without an end comes in
    pieces."""
    rest = b""
    with contextlib.suppress(ConnectionError):
        while data := await stdout.read(MAX_LINE_NBYTES):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line
            if len(rest) > MAX_LINE_NBYTES:
                yield rest
                rest = b""
    if rest:
        yield rest


async def _launch_anew() -> Process:
    """An interpreter of its own: for the gateway, into which no torch may be mapped.  Over a socket
    and not pipes of asyncio, which waits for these, and others may hold them when it has ended."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "epd.runtime.child",
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    process.stdout, process.stdin = await asyncio.open_connection(sock=ours)
    return process


def _read_status(line: bytes) -> StatusLine | None:
    try:
        return msgspec.json.decode(line, type=StatusLine)
    except msgspec.MsgspecError:
        return None


class Supervisor:
    def __init__(self, specs: list[ChildSpec], changed: Callable[[Child], None]) -> None:
        models = {spec.instance.model_dir for spec in specs if spec.instance is not None}
        self._zygotes = {model_dir: Zygote(model_dir) for model_dir in sorted(models)}
        self.children = {
            spec.name: Child(
                spec,
                changed,
                self._launch(spec),
                self._note_lost if spec.gateway is not None else lambda pid: None,
            )
            for spec in specs
        }
        self._hurried = False

    def _launch(self, spec: ChildSpec) -> Launch:
        return (
            _launch_anew if spec.instance is None else self._zygotes[spec.instance.model_dir].fork
        )

    def _note_lost(self, pid: str) -> None:
        """A gateway of ours has declared a process of this host lost."""
        for child in self.children.values():
            if pid == str(child.pid) and child.pid:
                child.fire(DeclaredLost())

    async def start(self) -> None:
        sweep()
        for child in self.children.values():
            child.fire(StartDue())

    async def wait_serving(self, timeout_s: float | None) -> None:
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
            raise StartFailed(failed.result() or "all processes were stopped")

    async def first_failure(self) -> str:
        """The sentence of the first child that failed; empty: all were stopped."""
        waits = {asyncio.ensure_future(c.ended.wait()): c for c in self.children.values()}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for child in [waits.pop(task) for task in list(waits) if task in done]:
                    if child.state != "stopped":
                        return f"{child.name}: {child.detail or 'ended'}"
        finally:
            for task in waits:
                task.cancel()
        return ""

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
        """What children that were killed could not remove themselves, and nobody else has."""
        sweep()
        own = own_life()
        for child in self.children.values():
            claim = read_claim(Path(child.spec.claim))
            if claim is not None and claim.supervisor == own:
                Path(child.spec.claim).unlink(missing_ok=True)
            for config in (child.spec.gateway, child.spec.instance):
                path = ipc_path(config.endpoint) if config is not None else ""
                if path and not is_answered(path):
                    Path(path).unlink(missing_ok=True)

    def hurry(self) -> None:
        """End at once what is draining, and do not drain the rest."""
        self._hurried = True
        for child in self.children.values():
            child.fire(HurryRequested())
