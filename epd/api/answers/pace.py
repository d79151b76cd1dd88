"""How much of answers is written in one turn of the loop: a burst of tokens holds no other stream
up.

Log-probabilities cost most: 20 alternatives of a token are 21 objects.  A hundred streams that are
ready at once, or one whose client reads again after a while, have thousands.  The longer a turn
takes, the more come for the next.  So each takes a slice, and whoever finds the turn's budget used
waits in a line for the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from epd.api.answers.choice import Choice
from epd.api.asked.asked import Asked
from epd.messages import TokenLogprobs

SLICE = 512  # tokens and alternatives that one write tells; about 1 ms
BUDGET = 4096  # those of all writes in one turn
WRITE = 8  # what a write costs besides, in the same unit


def size(entries: Sequence[TokenLogprobs]) -> int:
    """How many tokens and alternatives are written."""
    return sum(1 + len(entry.top) for entry in entries)


def whole_size(asked: Asked, choice: Choice) -> int:
    """Likewise of a whole answer, and of its prompt."""
    num_told = max(0, asked.num_logprobs, len(asked.logprob_token_ids))
    return choice.num_tokens * (1 + num_told) + size(choice.prompt_logprobs)


class Pace:
    """Of one loop."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def tell(self, tell: Callable[..., bytes], amount: int, *what: object) -> bytes:
        """In a turn that has room for it; what was scored at length, on a thread."""
        await self.take(min(amount, 2 * SLICE))
        if amount <= 2 * SLICE:  # a slice, and what the last of its updates has beyond
            return tell(*what)
        return await asyncio.get_running_loop().run_in_executor(self._threads, tell, *what)

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
