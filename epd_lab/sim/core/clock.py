"""The `Clock` port on virtual time.

Monotonic clocks of processes differ by a large offset, as those of hosts do: a role that sends its
own instead of the gateway's time is found at once.  Wall clocks agree but for the process's skew.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from epd.transport.base import TimerHandle
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess

WALL_START_S = 1_800_000_000.0


class SimClock:
    """Time as one simulated process sees it."""

    __slots__ = ("_loop", "_process")

    def __init__(self, loop: SimLoop, process: SimProcess) -> None:
        self._loop = loop
        self._process = process

    def now_s(self) -> float:
        return self._loop.now_s * self._process.clock_rate + self._process.clock_offset_s

    def wall_s(self) -> float:
        return WALL_START_S + self._loop.now_s + self._process.wall_skew_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> TimerHandle:
        offset_s, rate = self._process.clock_offset_s, self._process.clock_rate
        at_s = (when_s - offset_s) / rate
        while (
            at_s * rate + offset_s < when_s
        ):  # rounded down: who is woken too early sleeps again, for 0 s
            at_s = math.nextafter(at_s, math.inf)
        return self._loop.call_at(at_s, callback, context=self._process.context)
