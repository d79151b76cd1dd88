"""How far an encoder runs ahead of those who want its rows.

Rows that nobody can take yet have to be kept, and nothing else bounds them: a prefill instance
whose receive pool is full still has its images encoded.  So work on an image (its read from
storage, or its decoding and encoding) begins only while what has begun and was not yet taken fits
the device tier, in order of arrival.

One thing overtakes: an image with a room that was granted.  Its rows have a place to go, so they
do not stay; and its request may be what all the others wait for, because it holds the slots that
they want.  Without this rule, two instances could wait for each other until a deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable


class RunAhead:
    """`is_granted` says of a key whether somebody waits for its rows with memory in hand."""

    def __init__(
        self, capacity_nbytes: int, is_granted: Callable[[str], bool], counters: Counter[str]
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.used = 0
        self._counters = counters
        self._is_granted = is_granted
        self._begun: dict[str, int] = {}
        self._waiting: dict[str, tuple[int, asyncio.Future[bool]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def begin(self, key: str, nbytes: int) -> bool:
        """Wait for the key's turn; False: it left the queue meanwhile."""
        if key in self._begun:
            return True
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[key] = (nbytes, future)
        self.pump()
        if not future.done():
            self._counters["encodes_deferred"] += 1
        return await future and key in self._begun  # it may have left since, and be wanted again

    def count(self, key: str, nbytes: int) -> None:
        """It is there already, and is wanted again."""
        if key not in self._begun:
            self._begun[key] = nbytes
            self.used += nbytes

    def leave(self, key: str) -> None:
        """Nobody waits for it any more."""
        self.used -= self._begun.pop(key, 0)
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting[1].set_result(False)
        self.pump()

    def pump(self) -> None:
        """Begin what may begin now: call it when a grant has come."""
        is_full = False
        for key, (nbytes, future) in list(self._waiting.items()):
            fits = not self.used or self.used + nbytes <= self.capacity_nbytes
            is_full |= not fits
            if is_full and not self._is_granted(key):
                continue
            del self._waiting[key]
            self.count(key, nbytes)
            future.set_result(True)
