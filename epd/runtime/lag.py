"""How late an event loop is: what a blocking call on it, or too much work, does to all streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PERIOD_S = 0.05


async def watch_lag(note: Callable[[float], None], period_s: float = PERIOD_S) -> None:
    """Until it is cancelled: `note` how many seconds after it was due this was called. It is often
    enough that the share of late calls is the share of time in which all else waits as long."""
    while True:
        due_s = time.monotonic() + period_s
        await asyncio.sleep(period_s)
        note(max(0.0, time.monotonic() - due_s))
