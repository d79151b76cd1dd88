"""An answer as it was made, for any number of readers: each gets all of it, from its beginning.

While a recording is kept, its writer never waits, and readers may come.  Once it is forgotten
nobody comes any more: what every reader has taken is dropped, and the writer waits for the slowest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from epd.api.http.exchange import AsgiMessage

MESSAGE_NBYTES = 300  # of a message besides its body
WINDOW_NBYTES = 256 << 10  # that the slowest reader of a forgotten one may lack


def nbytes_of(message: AsgiMessage) -> int:
    """That a message takes in memory, about."""
    headers = message.get("headers", ())
    told = sum(len(name) + len(value) + MESSAGE_NBYTES for name, value in headers)
    return MESSAGE_NBYTES + len(message.get("body", b"")) + told


class Recording:
    """Of one answer; `end` it once."""

    def __init__(self, count: Callable[[int], None]) -> None:
        """`count`: is given how many bytes more there are, or fewer."""
        self._count = count
        self._messages: deque[AsgiMessage] = deque()
        self._num_dropped = 0
        self._taken: dict[int, int] = {}  # by reader, how many messages
        self._num_joined = 0
        self._change = asyncio.Event()
        self.nbytes = 0  # of the messages that are left
        self.is_kept = True
        self.is_over = False

    @property
    def has_readers(self) -> bool:
        return bool(self._taken)

    @property
    def is_full(self) -> bool:
        """The writer is to wait."""
        return not self.is_kept and self.has_readers and self.nbytes > WINDOW_NBYTES

    # --- the writer -------------------------------------------------------------------------------

    def append(self, message: AsgiMessage) -> None:
        self._messages.append(message)
        self._add(nbytes_of(message))
        self._drop()
        self.ring()

    def end(self) -> None:
        self.is_over = True
        self.ring()

    def forget(self) -> None:
        self.is_kept = False
        self._drop()

    # --- readers ----------------------------------------------------------------------------------

    def join(self) -> int:
        """A new reader's number; only while it is kept."""
        self._num_joined += 1
        self._taken[self._num_joined] = 0
        return self._num_joined

    def take(self, reader: int) -> AsgiMessage | None:
        """The next message that it has not had; None: not made yet, or over."""
        at = self._taken[reader] - self._num_dropped
        if at == len(self._messages):
            return None
        message = self._messages[at]
        self._taken[reader] += 1
        self._drop()
        return message

    def leave(self, reader: int) -> None:
        del self._taken[reader]
        self._drop()

    def ring(self) -> None:
        """Wake whoever waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self) -> None:
        await self._change.wait()

    def _drop(self) -> None:
        if self.is_kept:
            return
        needed = min(self._taken.values(), default=self._num_dropped + len(self._messages))
        while self._num_dropped < needed:
            self._add(-nbytes_of(self._messages.popleft()))
            self._num_dropped += 1
        self.ring()

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._count(nbytes)
