"""What computing costs: a device that does one thing at a time, and a pool of host threads.

Work takes virtual time and its effect happens at the end of that time, in the process that asked:
memory is read and written late, so blocks that are given away during a step show up as wrong
bytes.  A device can hang (nothing ends until it is released), fail its next works (out of memory),
be slow (its process's `slowness`) and be lost: then each work fails at once, for as long as the
process lives, whatever heals meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epd.engine.base import DeviceLost, EngineError
from epd.sim.loop import SimLoop
from epd.sim.process import SimProcess
from epd.sim.rand import KeyedRandom


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
        self.fail_next = 0
        self.num_started = 0
        self._loop = loop
        self._process = process
        self._random = random.stream(process.name, name)
        self._free_at_s = [0.0]
        self._waiting: list[tuple[asyncio.Future[Any], Callable[[], Any], int]] = []

    def widen(self, width: int) -> SimDevice:
        self._free_at_s = [0.0] * width
        return self

    def run(
        self,
        cost_s: float,
        jitter: float,
        work: Callable[[], Any],
        halfway: Callable[[], None] | None = None,
    ) -> asyncio.Future[Any]:
        """Launched when this returns.  The future has what `work` returns or raises, or EngineError
        when the device was told to fail.  `halfway` is what has an effect before the end."""
        self.num_started += 1
        loop = self._loop
        fails = int(self.fail_next > 0)
        self.fail_next -= fails
        cost_s *= 0.0 if self.lost else 1.0
        cost_s *= (1 + jitter * self._random.uniform(self.num_started)) * self._process.slowness
        free_s = min(self._free_at_s)
        lane = self._free_at_s.index(free_s)
        ends_s = max(loop.now_s, free_s) + cost_s
        self._free_at_s[lane] = ends_s
        future: asyncio.Future[Any] = loop.create_future()
        context = self._process.context
        if halfway is not None and not fails:
            loop.call_at(ends_s - cost_s / 2, self._pass, halfway, context=context)
        loop.call_at(ends_s, self._finish, future, work, fails, context=context)
        return future

    def _finish(self, future: asyncio.Future[Any], work: Callable[[], Any], fails: int) -> None:
        """What was launched is done, also if nobody waits for it any more."""
        if self.hung:
            self._waiting.append((future, work, fails))
            return
        try:
            if self.lost:
                raise DeviceLost("the device does not work any more: an illegal memory access")
            if fails:
                raise EngineError("the device is out of memory; send fewer or smaller pictures")
            result = work()
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def _pass(self, halfway: Callable[[], None]) -> None:
        if not self.hung:
            halfway()

    def release(self) -> None:
        """The device goes on after a hang."""
        self.hung = False
        waiting, self._waiting = self._waiting, []
        for launched in waiting:
            self._loop.call_soon(self._finish, *launched, context=self._process.context)
