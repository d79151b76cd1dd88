"""An answer as it is made, for any number of readers: each gets all of it, from its beginning.

While it is kept its maker never waits, and readers may come.  Once it is forgotten nobody comes any
more, and the maker waits for the slowest reader.
"""

from __future__ import annotations

import asyncio
from collections import deque

from epd.api.http.exchange import AsgiMessage

MESSAGE_NBYTES = 500  # of a message besides its body, about
MAX_UNREAD = 64  # messages of a forgotten one, before its maker waits


class Recording:
    """Of one answer; `end` it once."""

    def __init__(self) -> None:
        self._kept: list[AsgiMessage] = []
        self._unread: dict[int, deque[AsgiMessage]] = {}  # by reader
        self._num_joined = 0
        self._change = asyncio.Event()
        self.nbytes = 0  # of what was made while it was kept
        self.is_kept = True
        self.is_over = False

    @property
    def has_readers(self) -> bool:
        return bool(self._unread)

    def append(self, message: AsgiMessage) -> None:
        if self.is_kept:
            self._kept.append(message)
            self.nbytes += MESSAGE_NBYTES + len(message.get("body", b""))
        for unread in self._unread.values():
            unread.append(message)
        self.ring()

    def end(self) -> None:
        self.is_over = True
        self.ring()

    def forget(self) -> None:
        self.is_kept = False
        self._kept.clear()

    def join(self) -> int:
        """A new reader's number; only while it is kept."""
        self._num_joined += 1
        self._unread[self._num_joined] = deque(self._kept)
        return self._num_joined

    def take(self, reader: int) -> AsgiMessage | None:
        """The next message that it has not had; None: not made yet, or over."""
        unread = self._unread[reader]
        if not self.is_kept:
            self.ring()
        return unread.popleft() if unread else None

    def leave(self, reader: int) -> None:
        del self._unread[reader]
        self.ring()

    # --- waiting ----------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """The maker is to wait."""
        return not self.is_kept and any(len(u) > MAX_UNREAD for u in self._unread.values())

    def ring(self) -> None:
        """Wake whoever waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self) -> None:
        await self._change.wait()
