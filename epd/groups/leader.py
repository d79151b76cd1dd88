"""The ranks of an instance: GROUP's effects, commands, and a follower.

Theory of operation
-------------------
What the leader's roles ask of their engines (`groups/engines.py`) runs on the leader's own rank and
goes to the other ranks as a numbered command.  It is over when all ranks have executed it (GROUP).
The next one may be given before, as on one device.  A follower has no role: it takes commands in
order, runs each on its own share of the engines, and answers with its number.

Nothing here depends on how ranks are reached, or on what they compute: real processes and simulated
ones are composed from the same parts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from epd.config import Timing
from epd.engine.base import DeviceLost, EngineError, Patches, StepSequence
from epd.fsm.group import (
    AnswerMissed,
    BeatsMissed,
    CloseRequested,
    CommandDone,
    CommandExecuted,
    CommandGiven,
    Do,
    EndMissed,
    Group,
    JoinMissed,
    ProbeDue,
    RankEnded,
)
from epd.fsm.kernel import Effect, Event, Journal
from epd.groups.asks import RankLost
from epd.transport.base import Clock, TimerHandle

END_S = 5.0  # ranks that were asked to end have so long for what they still compute

T = TypeVar("T")
Batch = Sequence[StepSequence]


@dataclass(frozen=True, slots=True)
class Probe:
    """Computes nothing, and is answered like any other command."""


@dataclass(frozen=True, slots=True)
class Step:
    batch: Sequence[StepSequence]


@dataclass(frozen=True, slots=True)
class Encode:
    """Ranks share out the images, which the leader has."""

    batch: Sequence[Patches]
    num_turns: int = 0  # with them it is over as soon as it has begun, and so many GoOn follow


@dataclass(frozen=True, slots=True)
class GoOn:
    """The batch that was begun takes a turn: each rank launches its next slice, if it has one, and
    in the last turn joins its rows with the others'."""


@dataclass(frozen=True, slots=True)
class ChangeAdapters:
    """These go, and what all ranks have ready comes (`AdapterParts`)."""

    dropped: Sequence[str]
    held: str


Command = Probe | Step | Encode | GoOn | ChangeAdapters


class Ranks(Protocol):
    """The processes of the other ranks.  What is sent to one that lives arrives, in order."""

    def send(self, number: int, command: Command) -> None: ...

    def end(self) -> None:
        """They have executed what was sent, and end."""

    def kill(self) -> None: ...


@dataclass(slots=True)
class _Given:
    given_s: float
    resolve: Callable[[], None]  # tell who gave it


def silence_s(timing: Timing) -> float:
    """Of a rank: its group ends before its instance would, if its own heart had stopped."""
    return max(timing.suspect_after_s, timing.lost_after_s - 2 * timing.heartbeat_interval_s)


class InOrder:
    """Reports ends of commands, with an empty failure where they were done, in the order in which
    they were given. One may end before an earlier one, whose rows are still on their way. The loss
    of the device is reported at once, as the failure of command 0: the other ranks wait for this
    one in a collective, and would until their clock."""

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self._tell = tell
        self._open: deque[tuple[int, Callable[[], str | None]]] = deque()

    def add(self, number: int, over: asyncio.Future[T]) -> None:
        self._open.append((number, partial(_failure, over)))
        over.add_done_callback(self._ended)
        self._look()

    def _ended(self, over: asyncio.Future[T]) -> None:
        if not over.cancelled() and isinstance(error := over.exception(), DeviceLost):
            self._tell(0, str(error))
        self._look()

    def _look(self) -> None:
        while self._open and (failure := self._open[0][1]()) is not None:
            number, _ = self._open.popleft()
            self._tell(number, failure)


def _failure(over: asyncio.Future[T]) -> str | None:
    """How it ended; None: it has not."""
    if not over.done():
        return None
    error = asyncio.CancelledError() if over.cancelled() else over.exception()
    return "" if error is None else str(error) or repr(error)


class Leader:
    """GROUP's effects, for an instance of so many ranks."""

    def __init__(
        self, name: str, size: int, ranks: Ranks, clock: Clock, timing: Timing, journal: Journal
    ) -> None:
        loop = asyncio.get_running_loop()
        self.journal = journal
        self.machine = machine = Group(name, size, journal)
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()  # why
        self.closed: asyncio.Future[None] = loop.create_future()
        self._ranks = ranks
        self._clock = clock
        self._timing = timing
        self._open: dict[int, _Given] = {}
        self._own = InOrder(self._own_ended)
        self._armed: dict[type[Event], TimerHandle] = {}
        self._perform: dict[Effect, Callable[[Event], None]] = {
            Do.SEND: self._send,
            Do.SEND_PROBE: self._send_probe,
            Do.SETTLE: lambda event: self._settle(),
            Do.RESOLVE: lambda event: self._open.pop(machine.done).resolve(),
            Do.TELL_READY: lambda event: self.ready.set_result(None),
            Do.TELL_LOST: lambda event: self.lost.set_result(machine.reason),
            Do.END_RANKS: lambda event: ranks.end(),
            Do.KILL_RANKS: lambda event: ranks.kill(),
            Do.ARM_ANSWER: lambda event: self._arm_answer(),
            Do.ARM_PROBE: lambda event: self._arm(ProbeDue, timing.lost_after_s),
            Do.ARM_BEATS: lambda event: self._arm(BeatsMissed, silence_s(timing), self._missed),
            Do.ARM_END: lambda event: self._arm(EndMissed, END_S),
        }
        self._arm(JoinMissed, timing.group_join_timeout_s)

    def fire(self, event: Event) -> None:
        machine = self.machine
        effects = machine.fire(event)
        running = machine.table.running[machine.state]
        for kind in [kind for kind in self._armed if kind not in running]:
            self._armed.pop(kind).cancel()
        for effect in effects:
            self._perform[effect](event)
        if machine.terminal and not self.closed.done():
            self.closed.set_result(None)

    def execute(self, command: Command, run: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Run the leader's own share, and have the other ranks run theirs; what the own one gave,
        when all are done.  Raises RankLost or EngineError; no other rank has it then."""
        if not self.machine.takes_commands:
            if reason := self.machine.reason:
                raise RankLost(f"the group was lost: {reason}")
            raise EngineError("the group takes no commands: it ends")
        own = asyncio.ensure_future(run())
        over: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._open[self.machine.given + 1] = _Given(
            self._clock.now_s(), partial(_resolve, over, own)
        )
        self.fire(CommandGiven(command))
        self._own.add(self.machine.given, own)
        return over

    async def close(self) -> None:
        """Until no rank is left; bounded (GROUP)."""
        self.fire(CloseRequested())
        await self.closed

    def _own_ended(self, number: int, failure: str) -> None:
        executed = CommandExecuted(0, number, bool(failure))
        self.fire(executed if number else RankEnded(0, failure))

    # --- effects ----------------------------------------------------------------------------------

    def _send(self, event: Event) -> None:
        assert isinstance(event, CommandGiven)
        self._ranks.send(self.machine.given, event.command)  # type: ignore[arg-type]

    def _send_probe(self, event: Event) -> None:
        number = self.machine.given
        self._open[number] = _Given(self._clock.now_s(), lambda: None)  # nobody waits for it
        self._ranks.send(number, Probe())
        self._own.add(number, _ended())

    def _settle(self) -> None:
        while self.machine.done < min(self.machine.executed):
            self.fire(CommandDone())

    def _arm_answer(self) -> None:
        """For the oldest of them."""
        given_s = self._open[self.machine.done + 1].given_s
        bound_s = self._timing.group_step_timeout_s
        self._arm(AnswerMissed, max(0.0, given_s + bound_s - self._clock.now_s()))

    def _missed(self, late_s: float) -> BeatsMissed:
        return BeatsMissed(is_late=late_s > self._timing.heartbeat_interval_s)

    def _arm(
        self, kind: type[Event], delay_s: float, made: Callable[[float], Event] | None = None
    ) -> None:
        """`made`: of how late it comes."""
        if kind in self._armed:
            self._armed.pop(kind).cancel()
        due_s = self._clock.now_s() + delay_s

        def ring() -> None:
            del self._armed[kind]
            self.fire(kind() if made is None else made(self._clock.now_s() - due_s))

        self._armed[kind] = self._clock.call_at(due_s, ring)


def _resolve(over: asyncio.Future[T], own: asyncio.Future[T]) -> None:
    if over.done():
        return
    if error := own.exception():
        over.set_exception(error)
    else:
        over.set_result(own.result())


def _ended(error: Exception | None = None) -> asyncio.Future[None]:
    """What computes nothing, or could not begin."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if error is None:
        over.set_result(None)
    else:
        over.set_exception(error)
    return over


class Rank(Protocol):
    """A rank's share of the engines.  What is asked for is queued when a call returns."""

    def step(self, batch: Batch) -> Awaitable[object]: ...

    def encode(self, batch: Sequence[Patches], num_turns: int) -> Awaitable[object]: ...

    def go_on(self) -> Awaitable[object]: ...

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[object]: ...


class Follower:
    """A rank that executes commands: `answer(number, failure)`, an empty failure where it was
    done; of number 0, why it cannot go on.  `tell_beat`: again and again, from `beat` on."""

    def __init__(
        self,
        rank: Rank,
        answer: Callable[[int, str], None],
        tell_beat: Callable[[], None],
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._rank = rank
        self._tell_beat = tell_beat
        self._clock = clock
        self._interval_s = interval_s
        self._answers = InOrder(answer)
        self._last = 0

    def beat(self) -> None:
        """Now and at each interval, as long as its process runs."""
        self._tell_beat()
        self._clock.call_at(self._clock.now_s() + self._interval_s, self.beat)

    def execute(self, number: int, command: Command) -> None:
        """In the order in which they were given; none is left out."""
        try:
            if not self._is_next(number):
                raise EngineError(f"command {self._last + 1} has not come")
            self._last = number
            begun = self._begin(command)
        except Exception as error:
            begun = _ended(error)
        self._answers.add(number, asyncio.ensure_future(begun))

    def _begin(self, command: Command) -> Awaitable[object]:
        match command:
            case Step(batch):
                return self._rank.step(batch)
            case Encode(batch, num_turns):
                return self._rank.encode(batch, num_turns)
            case GoOn():
                return self._rank.go_on()
            case ChangeAdapters(dropped, held):
                return self._rank.change_adapters(dropped, held)
            case Probe():
                return _ended()

    def _is_next(self, number: int) -> bool:
        return number == self._last + 1
