"""The real clock and randomness behind the roles' ports."""

from __future__ import annotations

import asyncio
import ctypes
import random
import signal
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """The kernel sends this process a signal when its parent ends, however that comes."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


class SystemClock:
    """Monotonic time of the machine; timers of the running loop."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(max(0.0, when_s - time.monotonic()), callback)


class SystemRandom:
    """The system's entropy; keys matter only in the simulator."""

    def __init__(self) -> None:
        self._source = random.SystemRandom()

    def integer(self, *key: object) -> int:
        return self._source.getrandbits(63)
