"""A planned device: what is launched takes time, and nothing is computed.

It keeps the order of `epd.engine.device.executor` and `epd.engine.device.slices`: one launch thread
takes calls in order, and the device does one thing after the other.  A run of the tower is cut into
slices, each behind one queued step, and one slice at most is launched ahead of the device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from epd.engine.device.executor import Weight
from epd_lab.sim.core.loop import SimLoop


class CallPart(NamedTuple):
    """A part of a call: the host launches it, then the device computes it.

    `at_once`: the device has it only when the launch has ended, as a captured graph; else with the
    launch's first kernel.
    """

    host_s: float
    device_s: float
    at_once: bool = True
    gap_s: float = 0.0  # that the device stands still behind it


@dataclass(slots=True)
class _Call:
    pieces: Sequence[CallPart]
    weight: Weight
    done: asyncio.Future[Any]
    begun: Callable[[float, float], None]  # when the device begins and ends its last piece
    result: object
    tail_s: float


def _unseen(*times_s: float) -> None:
    """Nobody asks."""


@dataclass(slots=True)
class PlannedDevice:
    """The launch thread and the stream of one device."""

    loop: SimLoop
    slowed: Callable[[], float]  # how many times as long a launch takes that is not at once
    let_in: Callable[[float], None] = _unseen  # gets what a step between two slices took
    busy_s: float = 0.0  # that the device has computed so far
    _free_at_s: float = 0.0  # the device has passed all that is launched
    _calls: deque[_Call] = field(default_factory=deque)
    _postponed: deque[_Call] = field(default_factory=deque)  # long ones that were met within one
    _is_due: bool = False  # nothing else has run since a long call gave way
    _ahead_s: float = 0.0  # where the slice before the last ends
    _serves: bool = False  # by a task
    _idle_at_s: float = 0.0  # without one: the launch thread has launched its call

    def launch(
        self,
        pieces: Sequence[CallPart],
        weight: Weight = Weight.STEP,
        begun: Callable[[float, float], None] = _unseen,
        result: object = None,
        tail_s: float = 0.0,
    ) -> asyncio.Future[Any]:
        """Done, with `result`, when the device has passed it and the host its tail."""
        call = _Call(pieces, weight, self.loop.create_future(), begun, result, tail_s)
        now_s = self.loop.now_s
        if not self._serves and self._idle_at_s <= now_s and weight is Weight.STEP:
            self._is_due = False  # nearly every call finds the thread idle, and needs no task
            self._idle_at_s = now_s + self._host_s(pieces[0])
            self._launched(pieces[0], call, now_s, self._idle_at_s)
            self._end(call)
            return call.done
        self._calls.append(call)
        if not self._serves:
            self._serves = True
            self.loop.create_task(self._serve(), name="launch thread")
        return call.done

    async def _serve(self) -> None:
        if (wait_s := self._idle_at_s - self.loop.now_s) > 0:
            await asyncio.sleep(wait_s)
        while self._postponed or self._calls:
            await self._run(self._postponed.popleft() if self._postponed else self._calls.popleft())
        self._serves = False

    async def _run(self, call: _Call) -> None:
        self._is_due = self._is_due and call.weight is not Weight.STEP
        for piece in call.pieces:
            if call.weight is Weight.LONG:
                await self._cut()
            await self._launch(piece, call)
        self._end(call)

    def _end(self, call: _Call) -> None:
        self.loop.call_at(self._free_at_s + call.tail_s, _end, call)

    def _host_s(self, piece: CallPart) -> float:
        return piece.host_s * (1.0 if piece.at_once else self.slowed())

    async def _launch(self, piece: CallPart, call: _Call) -> None:
        began_s = self.loop.now_s
        if piece.host_s:
            await asyncio.sleep(self._host_s(piece))
        self._launched(piece, call, began_s, self.loop.now_s)

    def _launched(self, piece: CallPart, call: _Call, began_s: float, now_s: float) -> None:
        begin_s = max(self._free_at_s, now_s if piece.at_once else began_s)
        end_s = max(begin_s + piece.device_s, now_s)
        self.busy_s += piece.device_s
        self._free_at_s = end_s + piece.gap_s
        call.begun(begin_s, end_s)

    async def _cut(self) -> None:
        """As `Slices.cut` and `give_way`."""
        wait_s, self._ahead_s = self._ahead_s - self.loop.now_s, self._free_at_s
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        while self._is_due and self._calls:
            call = self._calls.popleft()
            if call.weight is Weight.LONG:
                self._postponed.append(call)
                continue
            began_s = max(self._free_at_s, self.loop.now_s)
            await self._run(call)
            if not self._is_due:
                self.let_in(self._free_at_s - began_s)
        self._is_due = True


def _end(call: _Call) -> None:
    if not call.done.done():
        call.done.set_result(call.result)


@dataclass(slots=True)
class Threads:
    """A pool of the host: works in order of arrival, so many at a time."""

    loop: SimLoop
    num_threads: int
    _free_at_s: list[float] = field(default_factory=list)

    @property
    def num_busy(self) -> int:
        return sum(free_s > self.loop.now_s for free_s in self._free_at_s)

    async def work(self, cost_s: float) -> None:
        if not self._free_at_s:
            self._free_at_s = [0.0] * self.num_threads
        first_s = min(self._free_at_s)
        ends_s = max(first_s, self.loop.now_s) + cost_s
        self._free_at_s[self._free_at_s.index(first_s)] = ends_s
        await asyncio.sleep(ends_s - self.loop.now_s)
