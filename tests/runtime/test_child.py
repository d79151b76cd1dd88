"""A supervised child over its lives: what is started, told, waited for and killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from unittest import mock

import msgspec
import pytest

from epd.fsm.child import TABLE, Do, Ended, HurryRequested, KillDue, Launched, S, StartDue
from epd.fsm.kernel import Event
from epd.runtime import supervisor
from epd.runtime.child import ChildSpec, StatusLine
from epd.runtime.supervisor import Child
from epd.runtime.zygote import Process, ZygoteLost
from tests.patience import PATIENCE_S
from tests.sim.planting import row

SHORT_S = 0.01


class Played:
    """A process that does what a test says."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = mock.Mock()
        self.stdout: asyncio.StreamReader | None = asyncio.StreamReader()
        self.signals: list[int] = []
        self.dies_of: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await self._ended

    def send_signal(self, signal: int) -> None:
        self.signals.append(signal)
        if signal in self.dies_of:
            self.end(-signal)

    def say(self, state: str, detail: str = "") -> None:
        assert self.stdout is not None
        self.stdout.feed_data(msgspec.json.encode(StatusLine(state, detail)) + b"\n")

    def end(self, exit_status: int) -> None:
        assert self.stdout is not None
        self.stdout.feed_eof()
        self._ended.set_result(exit_status)


class Stage:
    """A child, its processes in order, and what was shown of it."""

    def __init__(self) -> None:
        self.made: list[Played] = []
        self.shown: list[str] = []
        self.may_launch = asyncio.Event()
        self.may_launch.set()
        self.lost = False
        self.child = Child(ChildSpec("e0"), self._changed, self._launch)

    def _changed(self, child: Child) -> None:
        self.shown.append(f"{child.state} {child.detail}".strip())

    async def _launch(self) -> Process:
        await self.may_launch.wait()
        if self.lost:
            raise ZygoteLost
        self.made.append(Played(len(self.made) + 1))
        return self.made[-1]

    async def until(self, state: S, num_made: int = 0) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.child.machine.state is not state or len(self.made) < num_made:
                await asyncio.sleep(0)

    async def serves(self) -> Played:
        """It is started, or started again, and serves."""
        if self.child.machine.state is S.PENDING:
            self.child.fire(StartDue())
        num_made = len(self.made) + (self.child.machine.state is not S.RESTARTING)
        async with asyncio.timeout(PATIENCE_S):
            while len(self.made) < num_made:
                await asyncio.sleep(0)
        self.made[-1].say("serving")
        await self.until(S.SERVING)
        return self.made[-1]


@pytest.fixture(autouse=True)
def swept() -> Iterator[mock.Mock]:
    with mock.patch.object(supervisor, "sweep") as sweep:
        yield sweep


@contextlib.contextmanager
def pauses(first_s: float = SHORT_S, stable_s: float = 30.0, kill_s: float = 5.0) -> Iterator[None]:
    with (
        mock.patch.object(supervisor, "FIRST_BACKOFF_S", first_s),
        mock.patch.object(supervisor, "STABLE_AFTER_S", stable_s),
        mock.patch.object(supervisor, "KILL_AFTER_S", kill_s),
    ):
        yield


async def test_who_ends_before_it_served_is_not_started_again() -> None:
    at = Stage()
    at.child.fire(StartDue())
    await at.until(S.STARTING, 1)
    at.made[0].say("failed", "there is no such model")
    at.made[0].end(2)
    await at.until(S.FAILED)
    assert at.child.ended.is_set() and not at.child.served.is_set()
    assert at.shown[-1] == "failed there is no such model" and at.child.starts == 1


async def test_who_says_nothing_before_it_ends_is_told_by_its_exit_status() -> None:
    at = Stage()
    at.child.fire(StartDue())
    await at.until(S.STARTING, 1)
    at.made[0].end(139)
    await at.until(S.FAILED)
    assert at.shown == ["starting", "failed ended with exit status 139"]


async def test_what_cannot_be_made_at_first_says_why() -> None:
    at = Stage()
    at.lost = True
    at.child.fire(StartDue())
    await at.until(S.FAILED)
    assert "the process that forks workers ended" in at.child.detail


async def test_who_served_is_started_again_after_pauses_that_grow(swept: mock.Mock) -> None:
    with pauses():
        at = Stage()
        for life in range(3):
            process = await at.serves()
            assert at.child.pid == process.pid == life + 1
            assert process.stdin.write.call_args.args[0].startswith(b'{"name":"e0"')
            process.end(1)
            await at.until(S.PAUSED)
            assert at.child._pause_s == pytest.approx(SHORT_S * 2 ** (life + 1))
        assert at.shown.count("restarting ended with exit status 1") == 3
        assert swept.call_count == 3
        await at.until(S.RESTARTING, 4)
        at.made[3].end(1)  # it served before, so this is no mistake in the configuration
        await at.until(S.PAUSED)
        await at.child.stop(hurried=False)
        assert at.child.machine.state is S.STOPPED and at.shown[-1] == "stopped"


async def test_pauses_have_a_bound_and_begin_anew_after_a_long_life() -> None:
    with pauses(stable_s=SHORT_S), mock.patch.object(supervisor, "MAX_BACKOFF_S", 2.5 * SHORT_S):
        at = Stage()
        at.child._pause_s = 8 * SHORT_S
        process = await at.serves()
        await asyncio.sleep(3 * SHORT_S)
        process.end(1)
        await at.until(S.PAUSED)
        assert at.child._pause_s == 2 * SHORT_S, "of the first one"
        at.child._pause_s = 2 * SHORT_S
        await at.until(S.RESTARTING, 2)
        at.made[1].end(1)
        await at.until(S.PAUSED)
        assert at.child._pause_s == 2.5 * SHORT_S
        await at.child.stop(hurried=False)


async def test_who_is_stopped_drains_and_is_killed_if_it_does_not_end() -> None:
    with pauses(kill_s=SHORT_S):
        at = Stage()
        process = await at.serves()
        process.dies_of = ()
        stopping = asyncio.ensure_future(at.child.stop(hurried=False))
        await at.until(S.KILLING)
        async with asyncio.timeout(PATIENCE_S):
            while process.signals.count(signal.SIGKILL) < 2:
                await asyncio.sleep(SHORT_S)
        assert process.signals[:2] == [signal.SIGTERM, signal.SIGKILL] and not stopping.done()
        process.end(-9)
        await asyncio.wait_for(stopping, PATIENCE_S)
        assert at.child.machine.state is S.STOPPED and at.child._clock is not None
        assert at.child._clock.cancelled()


async def test_who_is_hurried_is_interrupted_once_it_was_asked_to_stop() -> None:
    at = Stage()
    process = await at.serves()
    at.child.fire(HurryRequested())
    assert not process.signals
    process.dies_of = (signal.SIGINT,)
    await at.child.stop(hurried=True)
    assert process.signals == [signal.SIGTERM, signal.SIGINT]


async def test_whose_process_is_still_being_made_is_told_when_it_is() -> None:
    at = Stage()
    at.may_launch.clear()
    at.child.fire(StartDue())
    await at.child.stop(hurried=False)
    assert at.child.machine.state is S.STOPPING, "nobody waits for it"
    at.may_launch.set()
    await asyncio.wait_for(at.child.over(), PATIENCE_S)
    assert at.made[0].signals == [signal.SIGTERM] and at.child.machine.state is S.STOPPED


async def test_what_is_not_made_any_more_is_stopped() -> None:
    at = Stage()
    at.may_launch.clear()
    at.child.fire(StartDue())
    await at.child.stop(hurried=False)
    at.lost = True
    at.may_launch.set()
    await asyncio.wait_for(at.child.over(), PATIENCE_S)
    assert at.child.machine.state is S.STOPPED and not at.made


Story = Callable[[], Awaitable[None]]
MUTANTS: dict[str, tuple[tuple[S, type[Event], S, tuple[Do, ...]], Story]] = {
    "who served fails for good": (
        (S.SERVING, Ended, S.FAILED, (Do.TELL_FAILED,)),
        test_pauses_have_a_bound_and_begin_anew_after_a_long_life,
    ),
    "who is to end is not told when it is made": (
        (S.STOPPING, Launched, S.STOPPING, ()),
        test_whose_process_is_still_being_made_is_told_when_it_is,
    ),
    "who does not drain is not killed": (
        (S.STOPPING, KillDue, S.STOPPING, (Do.ARM_KILL,)),
        test_who_is_stopped_drains_and_is_killed_if_it_does_not_end,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_bug_put_back_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, story = MUTANTS[name]
    monkeypatch.setattr("tests.runtime.test_child.PATIENCE_S", 0.3)
    with row(TABLE, *cell), pytest.raises((AssertionError, TimeoutError)):
        await story()
