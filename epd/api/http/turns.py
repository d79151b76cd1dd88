"""Who reads next: of bodies that arrive at the same time, the one that began first.

Without it, 64 images that are sent at once would be read piece by piece in turns, and the encoders
would wait until nearly all bodies are whole.  One piece is read in each turn of the loop, so that
streams of tokens are written in between.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools


class Turns:
    """Of one loop."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # a heap
        self._serials = itertools.count()

    def place(self) -> int:
        """Behind all who have one."""
        return next(self._serials)

    async def come(self, place: int) -> None:
        """Wait until nobody with an earlier place waits.  Who is cancelled does not."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if not self._waiting:  # else the next turn is due
            loop.call_soon(self._next)
        heapq.heappush(self._waiting, (place, turn))
        await turn

    def _next(self) -> None:
        while self._waiting:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
