"""The ranks of an instance: GROUP's effects, the engine that the roles see, and a follower.

Theory of operation
-------------------
The leader's roles have a `LanguageEngine` like any other.  Its step runs on the leader's own rank
and goes to the others as a numbered command; the step is over when all ranks have executed it
(GROUP).  The next one may be given before, as on one device.  A follower has no role: it takes
commands in order, runs each as its own engine's step, and answers with its number.

Nothing here knows how ranks are reached, or what they compute: real processes and simulated ones
are composed from the same parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from epd.config import Timing
from epd.engine.base import (
    Buffer,
    EngineError,
    LanguageEngine,
    MediaLayout,
    OnLayers,
    RopePositions,
    StepResult,
    StepSequence,
)
from epd.fsm.group import (
    AnswerMissed,
    CloseRequested,
    CommandDone,
    CommandExecuted,
    CommandGiven,
    Do,
    EndMissed,
    Group,
    JoinMissed,
    ProbeDue,
)
from epd.fsm.kernel import Effect, Event, Journal
from epd.transport.base import Clock, TimerHandle

END_S = 5.0  # ranks that were asked to end have so long for what they still compute

Batch = Sequence[StepSequence]
RunStep = Callable[[Batch], Awaitable[StepResult]]
RunOwn = Callable[[Batch, OnLayers | None], Awaitable[StepResult]]
_Over = asyncio.Future[StepResult]


class Ranks(Protocol):
    """The processes of the other ranks.  What is sent to one that lives arrives, in order."""

    def send(self, number: int, batch: Batch) -> None:
        """An empty batch computes nothing, and is answered like any other."""

    def end(self) -> None:
        """They have executed what was sent, and end."""

    def kill(self) -> None: ...


@dataclass(slots=True)
class _Command:
    given_s: float
    own: asyncio.Future[StepResult]  # the leader's share
    over: asyncio.Future[StepResult]  # of all ranks


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
        self._open: dict[int, _Command] = {}
        self._armed: dict[type[Event], TimerHandle] = {}
        self._perform: dict[Effect, Callable[[Event], None]] = {
            Do.SEND: self._send,
            Do.SEND_PROBE: self._send_probe,
            Do.SETTLE: lambda event: self._settle(),
            Do.RESOLVE: lambda event: self._resolve(),
            Do.TELL_READY: lambda event: self.ready.set_result(None),
            Do.TELL_LOST: lambda event: self.lost.set_result(machine.reason),
            Do.END_RANKS: lambda event: ranks.end(),
            Do.KILL_RANKS: lambda event: ranks.kill(),
            Do.ARM_ANSWER: lambda event: self._arm_answer(),
            Do.ARM_PROBE: lambda event: self._arm(ProbeDue, timing.lost_after_s),
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

    def execute(self, batch: Batch, step: Callable[[], Awaitable[StepResult]]) -> _Over:
        """Run the leader's own `step`, and have the other ranks run theirs.  Raises EngineError; no
        rank was told then."""
        if not self.machine.takes_commands:
            raise EngineError(f"the group takes no commands: {self.machine.reason or 'it ends'}")
        own = asyncio.ensure_future(step())
        over: _Over = asyncio.get_running_loop().create_future()
        self._add(own, over)
        self.fire(CommandGiven(batch))
        own.add_done_callback(partial(self._own_ended, self.machine.given))
        return over

    async def close(self) -> None:
        """Until no rank is left; bounded (GROUP)."""
        self.fire(CloseRequested())
        await self.closed

    def _add(self, own: asyncio.Future[StepResult], over: asyncio.Future[StepResult]) -> None:
        self._open[self.machine.given + 1] = _Command(self._clock.now_s(), own, over)

    def _own_ended(self, number: int, own: asyncio.Future[StepResult]) -> None:
        failed = own.cancelled() or own.exception() is not None
        self.fire(CommandExecuted(0, number, failed))

    # --- effects ----------------------------------------------------------------------------------

    def _send(self, event: Event) -> None:
        assert isinstance(event, CommandGiven)
        self._ranks.send(self.machine.given, event.command)  # type: ignore[arg-type]

    def _send_probe(self, event: Event) -> None:
        number = self.machine.given
        nothing: _Over = asyncio.get_running_loop().create_future()
        nothing.set_result(StepResult([]))
        self._open[number] = _Command(self._clock.now_s(), nothing, nothing)
        self._ranks.send(number, ())
        self._own_ended(number, nothing)

    def _settle(self) -> None:
        while self.machine.done < min(self.machine.executed):
            self.fire(CommandDone())

    def _resolve(self) -> None:
        command = self._open.pop(self.machine.done)
        if command.over.done():
            return
        if error := command.own.exception():
            command.over.set_exception(error)
        else:
            command.over.set_result(command.own.result())

    def _arm_answer(self) -> None:
        """For the oldest of them."""
        given_s = self._open[self.machine.done + 1].given_s
        bound_s = self._timing.group_step_timeout_s
        self._arm(AnswerMissed, max(0.0, given_s + bound_s - self._clock.now_s()))

    def _arm(self, kind: type[Event], delay_s: float) -> None:
        if kind in self._armed:
            self._armed.pop(kind).cancel()

        def ring() -> None:
            del self._armed[kind]
            self.fire(kind())

        self._armed[kind] = self._clock.call_at(self._clock.now_s() + delay_s, ring)


class GroupLanguageEngine:
    """The `LanguageEngine` of all ranks; `own` is the leader's share of it, and `step` runs that.

    KV of a group neither comes nor goes: each rank has a part of it, and only the leader's could be
    reached.
    """

    def __init__(self, own: LanguageEngine, step: RunOwn, leader: Leader) -> None:
        self._own = own
        self._step = step
        self._leader = leader
        self.kv_layout = own.kv_layout
        self.num_blocks = own.num_blocks
        self.row_contract = own.row_contract
        self.max_context = own.max_context
        self.kv_in_place = own.kv_in_place
        self.num_landing_blocks = own.num_landing_blocks

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        return self._own.rope_positions(num_tokens, items)

    def attach_kv(self, buffer: Buffer) -> None:
        self._own.attach_kv(buffer)

    def attach_rows(self, buffer: memoryview) -> None:
        self._own.attach_rows(buffer)

    async def fetch_kv(self, slots: Sequence[int], *, in_place: bool) -> Sequence[Buffer]:
        raise EngineError("KV of a group of ranks is not sent elsewhere")

    async def land_kv(self, memory: Buffer, slots: Sequence[int], blocks: Sequence[int]) -> None:
        raise EngineError("a group of ranks takes no KV from elsewhere")

    def step(self, batch: Batch, on_layers: OnLayers | None = None) -> Awaitable[StepResult]:
        return self._leader.execute(batch, lambda: self._step(batch, on_layers))


class Follower:
    """A rank that executes commands: `answer(number, failure)`, an empty failure where it was
    done."""

    def __init__(self, step: RunStep, answer: Callable[[int, str], None]) -> None:
        self._step = step
        self._answer = answer
        self._last = 0

    def execute(self, number: int, batch: Batch) -> None:
        """In the order in which they were given; none is left out."""
        if not self._is_next(number):
            self._answer(number, f"command {self._last + 1} has not come")
            return
        self._last = number
        if not batch:
            self._answer(number, "")
            return
        try:
            result = asyncio.ensure_future(self._step(batch))
        except Exception as error:
            self._answer(number, str(error) or repr(error))
        else:
            result.add_done_callback(partial(self._ended, number))

    def _is_next(self, number: int) -> bool:
        return number == self._last + 1

    def _ended(self, number: int, result: asyncio.Future[StepResult]) -> None:
        error = result.exception()
        self._answer(number, "" if error is None else str(error) or repr(error))
