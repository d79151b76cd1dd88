"""The memory of a process that serves: what is here to stay, and what is to go back.

What was loaded stays, so a full collection, which holds up all streams, needs not look at it again.

Images of requests go back.  glibc keeps freed memory in the heap below a small piece that stays:
without this a gateway stays at its peak when it is at rest."""

from __future__ import annotations

import asyncio
import ctypes
import gc

PERIOD_S = 10.0


def keep() -> None:
    """What there is now is here to stay.  Some tens of milliseconds, or more: before it serves."""
    gc.collect()
    gc.freeze()


def let_go() -> None:
    """A life has ended, with all that it held: regions of memory, rows, or engines.  What is left
    is here to stay."""
    gc.unfreeze()
    keep()


def give_back() -> None:
    """Some milliseconds, if it is much; nothing, where the C library has no such call."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


async def give_back_now_and_then() -> None:
    """Until it is cancelled; on a thread, which needs no interpreter for it."""
    while True:
        await asyncio.sleep(PERIOD_S)
        await asyncio.to_thread(give_back)
