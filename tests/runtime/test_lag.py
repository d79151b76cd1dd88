"""Whoever keeps an event loop to himself is seen."""

from __future__ import annotations

import asyncio
import time

from epd.runtime.lag import watch_lag

PERIOD_S = 0.01
BLOCKED_S = 0.1


async def test_a_call_that_blocks_makes_the_loop_late() -> None:
    late_s: list[float] = []
    watching = asyncio.create_task(watch_lag(late_s.append, PERIOD_S))
    async with asyncio.timeout(10):
        while len(late_s) < 3:
            await asyncio.sleep(PERIOD_S)
        time.sleep(BLOCKED_S)  # what must not be done
        while max(late_s) < BLOCKED_S - 2 * PERIOD_S:
            await asyncio.sleep(0)
    watching.cancel()
