"""The memory of a process that serves: what is here to stay, and what is to go back.

What was loaded stays, so a full collection, which holds up all streams, needs not look at it again.

Images of requests go back.  glibc keeps what is freed in the heap below a small thing that stays.
A gateway went from 166 to 384 MiB with a thousand requests, most of them with images, and stayed
there at rest; with this it went from 166 to 250 with 300, and to 181 at rest.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

PERIOD_S = 10.0


def keep() -> None:
    """What there is now is here to stay.  Some tens of milliseconds, or more: before it serves."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Some milliseconds, if it is much; nothing, where the C library knows no such call."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


async def give_back_now_and_then() -> None:
    """Until it is cancelled; on a thread, which needs no interpreter for it."""
    while True:
        await asyncio.sleep(PERIOD_S)
        await asyncio.to_thread(give_back)
