"""What passes between the ranks of a simulated group: commands, what is asked, and the answers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from epd.engine.base import EngineError, Rows, RowSpan, SlotRows, StepSequence
from epd.groups.asks import Answer, AnyAsk, Fault, Joined, LandKv, RankLost, RankPlace, WriteState
from epd.groups.data import RankPart
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.ranks.hosts import Cable
from epd_lab.sim.world import World

DELAY_S = 0.0005  # of a command or an answer, up to


class Channel:
    """One direction between two processes: in order, each message a little later."""

    def __init__(self, world: World, name: str, cable: Cable | None = None) -> None:
        self._world = world
        self._cable = cable
        self._random = world.random.stream("channel", name)
        self._arrives_s = 0.0
        self._count = 0
        self.lose_next = 0

    def send_command(self, to: SimProcess, take: Callable[..., object], *what: object) -> None:
        """Unless a fault takes it: the next one's number shows the gap."""
        if self.lose_next:
            self.lose_next -= 1
            self._count += 1
            self._world.fired["command_lost"] += 1
            return
        self.send(to, take, *what)

    def send(self, to: SimProcess, take: Callable[..., object], *what: object) -> None:
        if self._cable is not None and not self._cable.carries(self.send, to, take, *what):
            return
        self._count += 1
        loop = self._world.loop
        arrives_s = loop.now_s + DELAY_S * self._random.uniform(self._count)
        self._arrives_s = max(self._arrives_s, arrives_s)
        loop.call_at(self._arrives_s, take, *what, context=to.context)


class _Asked(NamedTuple):
    ask: AnyAsk
    answer: asyncio.Future[Answer]


class SimAsks(ABC):
    """A leader's questions to other ranks, and their reports of themselves."""

    def __init__(self, world: World, process: SimProcess) -> None:
        self.process = process
        self.joined: dict[int, Joined] = {}
        self.places: tuple[RankPlace, ...] = ()
        self._world = world
        self._asked: dict[tuple[int, int], _Asked] = {}  # by rank and serial
        self._ended: set[int] = set()
        self._serial = 0

    @abstractmethod
    def send_ask(self, rank: int, serial: int, ask: AnyAsk) -> None: ...

    async def ask(self, rank: int, ask: AnyAsk) -> Answer:
        self._serial += 1
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[rank, self._serial] = _Asked(ask, future)
        if rank in self._ended:
            self.ended(rank)
        self.send_ask(rank, self._serial, ask)
        for look in self._world.on_ask:
            look(self.process.instance_id, f"{self.process.instance_id}.{rank}", ask)
        answer = await future
        if isinstance(answer, Fault):
            raise EngineError(f"rank {rank}: {answer.reason}")
        return answer

    def answered(self, rank: int, serial: int, answer: Answer) -> None:
        asked = self._asked.pop((rank, serial), None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(answer)

    def ended(self, rank: int) -> None:
        """Its process: what it was asked has no answer any more."""
        self._ended.add(rank)
        for whom, serial in [key for key in self._asked if key[0] == rank]:
            ask, answer = self._asked.pop((whom, serial))
            if not answer.done():
                answer.set_exception(RankLost(f"rank {rank} has ended"))
                self._world.fired["state_lost_on_its_way"] += isinstance(ask, WriteState)
                comes = isinstance(ask, LandKv) and bool(ask.states)
                self._world.fired["state_lost_as_it_came"] += comes


class SimAnswers:
    """What a rank is asked, done as soon as it comes."""

    def __init__(self, part: RankPart, answer: Callable[[int, Answer], None]) -> None:
        self._part = part
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, serial: int, ask: AnyAsk) -> None:
        task = asyncio.get_running_loop().create_task(self._do(serial, ask))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, serial: int, ask: AnyAsk) -> None:
        self._answer(serial, await self._part.answer(ask))


def with_own_rows(sequence: StepSequence) -> StepSequence:
    """Rows as they are now, where they are not the leader's."""
    if not sequence.spans:
        return sequence
    return replace(sequence, spans=[replace(span, rows=_copied(span)) for span in sequence.spans])


def _copied(span: RowSpan) -> Any:
    if isinstance(span.rows, SlotRows):
        return span.rows
    if isinstance(span.rows, Rows):
        return Rows(bytes(span.rows.buffer()), span.rows.num_rows, span.rows.nbytes)
    return [bytes(piece) for piece in span.rows]
