"""Work that blocks for long, beside a loop that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """On a thread of this name that no process waits for: it may never end, as in a collective."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(tell: Callable[[], None]) -> None:
        if not future.done():
            tell()

    def run() -> None:
        try:
            tell = partial(future.set_result, work())
        except Exception as error:
            tell = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, tell)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
