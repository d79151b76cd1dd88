"""A wake-up for one coroutine: `asyncio.Event` for a single waiter, at a third of its cost."""

from __future__ import annotations

import asyncio
from collections.abc import Generator


class Bell:
    """Rung any number of times, awaited once: `await bell` returns at once if it was rung since."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._rung = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # its coroutine may have been cancelled
                waiter.set_result(None)

    def clear(self) -> None:
        """Rings so far do not count any more."""
        self._rung = False

    def __await__(self) -> Generator[object, None, None]:
        if not self._rung:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            yield from waiter
        self._rung = False
