"""What computing costs: a device that does one thing at a time, and a pool of host threads.

Work takes virtual time and has its effect at the end, in the process that asked.  Memory is read
and written late, so blocks that are given away during a step show up as wrong bytes.  A device can
hang (nothing ends until it is released), fail its next works (out of memory), and be slow (its
process's `slowness`).  It can be lost: then each work fails at once, for as long as the process
lives, whatever heals meanwhile.  The thread that launches can die: then all that was launched fails
at that moment, and nothing is taken any more.  A single call can raise (`breaks.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.engine.base import DeviceLost, EngineError
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.core.rand import KeyedRandom

PROBE_S = 0.0001
REST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, roughly those of the bundled model on CPU cores."""

    preprocess_s: float = 0.004
    encode_base_s: float = 0.003
    encode_per_patch_s: float = 0.0001
    copy_s: float = 0.0003  # rows between memories
    step_base_s: float = 0.002
    step_per_token_s: float = 0.00005
    jitter: float = 0.4  # a work takes between 1 and 1 + jitter times as long
    pool_threads: int = 2


class SimDevice:
    """Works in order of launch, one at a time (`width` at a time for a pool)."""

    def __init__(self, loop: SimLoop, process: SimProcess, random: KeyedRandom, name: str) -> None:
        self.hung = False
        self.lost = False
        self.dead = False  # its thread is gone
        self.fail_next = 0
        self.num_started = 0
        self.elapsed_s = 0.0  # that the work took which has just ended
        self.busy_s = 0.0
        self._loop = loop
        self.process = process
        self._random = random.stream(process.name, name)
        self._free_at_s = [0.0]
        self._waiting: list[tuple[Any, ...]] = []  # arguments of `_finish`
        self._launched: dict[int, asyncio.Future[Any]] = {}  # what its thread has in hand

    def widen(self, width: int) -> SimDevice:
        self._free_at_s = [0.0] * width
        return self

    def run(
        self,
        cost_s: float,
        jitter: float,
        work: Callable[[], Any],
        halfway: Callable[[], None] | None = None,
        *,
        begin: Callable[[], None] | None = None,
        call: str,
    ) -> asyncio.Future[Any]:
        """Launched when this returns.  The future has what `work` returns or raises, or EngineError
        when a fault has the device fail.  `halfway` is what has an effect before the end, `begin`
        at the beginning; `call` is the port's method, which may raise here, or at its end."""
        if self.dead:
            raise DeviceLost("the device's thread is gone")
        late = self.process.breaks.meet(call)
        self.num_started += jitter > 0
        loop = self._loop
        fails = self.process.breaks.error(call) if late else self._exhausted()
        cost_s *= 0.0 if self.lost else 1.0
        cost_s *= (1 + jitter * self._random.uniform(self.num_started)) * self.process.slowness
        free_s = min(self._free_at_s)
        lane = self._free_at_s.index(free_s)
        ends_s = max(loop.now_s, free_s) + cost_s
        self._free_at_s[lane] = ends_s
        future: asyncio.Future[Any] = loop.create_future()
        self._launched[id(future)] = future
        context = self.process.context
        if halfway is not None and fails is None:
            loop.call_at(ends_s - cost_s / 2, self._pass, halfway, context=context)
        if begin is not None and ends_s - cost_s > loop.now_s:
            loop.call_at(ends_s - cost_s, self._pass, begin, context=context)
        elif begin is not None:
            begin()
        done = (future, work, fails, ends_s - cost_s)
        loop.call_at(ends_s, self._finish, *done, context=context)
        return future

    def probe(self) -> asyncio.Future[Any]:
        """A small work, behind all others; no draw of theirs depends on it."""
        return self.run(PROBE_S, 0.0, lambda: None, call="probe")

    def _exhausted(self) -> Exception | None:
        if not self.fail_next:
            return None
        self.fail_next -= 1
        return EngineError("the device is out of memory; send fewer or smaller images")

    def _finish(
        self,
        future: asyncio.Future[Any],
        work: Callable[[], Any],
        fails: Exception | None,
        began_s: float,
    ) -> None:
        """What was launched is done, also if nobody waits for it any more."""
        if self.hung:
            self._waiting.append((future, work, fails, began_s))
            return
        self.elapsed_s = self._loop.now_s - began_s
        self.busy_s += self.elapsed_s
        self._launched.pop(id(future), None)
        if self.dead:
            return
        try:
            if self.lost:
                raise DeviceLost("the device does not work any more: an illegal memory access")
            if fails is not None:
                raise fails
            result = work()
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def _pass(self, halfway: Callable[[], None]) -> None:
        if not (self.hung or self.dead):
            halfway()

    @property
    def is_busy(self) -> bool:
        return bool(self._launched)

    async def rest(self) -> bool:
        """Whether it has passed all that was launched until now, in time."""
        if self.dead:
            return False
        passed = self.run(0.0, 0.0, lambda: True, call="rest")
        await asyncio.wait((passed,), timeout=REST_TIMEOUT_S)
        return passed.done() and passed.exception() is None

    def lose_thread(self) -> None:
        """The thread that launches ends.  What it had in hand fails, as the executor sees to."""
        self.dead = True
        launched, self._launched = self._launched, {}
        for future in launched.values():
            if not future.done():
                future.set_exception(DeviceLost("the device's thread is gone"))

    def release(self) -> None:
        """The device goes on after a hang."""
        self.hung = False
        waiting, self._waiting = self._waiting, []
        for launched in waiting:
            self._loop.call_soon(self._finish, *launched, context=self.process.context)
