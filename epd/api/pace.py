"""How much of answers is told in one turn of the loop: a burst of tokens holds up nobody else.

Log-probabilities cost most: 20 alternatives of a token are 21 objects.  A hundred streams that are
ready at once, or one whose client reads again after a while, have thousands of them; and the longer
a turn takes, the more have come for the next.  So each takes a slice, and whoever finds the turn's
budget used waits in a line for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque

SLICE = 512  # tokens and alternatives that one write tells; about 1 ms
BUDGET = 4096  # those of all writes in one turn
WRITE = 8  # what a write costs besides, in the same unit


class Pace:
    """Of one loop."""

    def __init__(self) -> None:
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, amount: int) -> None:
        """Wait until this turn has room.  Who is cancelled does not."""
        amount += WRITE
        loop = asyncio.get_running_loop()
        if not self._used:
            loop.call_soon(self._renew)
        if self._used < BUDGET and not self._waiting:
            self._used += amount
            return
        turn = loop.create_future()
        self._waiting.append((amount, turn))
        await turn

    def _renew(self) -> None:
        """A turn has passed."""
        self._used = 0
        while self._waiting and self._used < BUDGET:
            amount, turn = self._waiting.popleft()
            if not turn.done():
                self._used += amount
                turn.set_result(None)
        if self._used:
            asyncio.get_running_loop().call_soon(self._renew)
