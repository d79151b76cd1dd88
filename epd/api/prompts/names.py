"""Names of hosts are looked up on threads of their own, a bounded number of them.

A loop has few threads for that (uvloop's four), for all that it looks up.  A name whose servers are
silent holds one for ten seconds and more, also if nobody waits for it any more, and the loop's end
waits for each.  So a few URLs of one client would keep the pictures of all others waiting.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from epd.in_thread import in_thread

T = TypeVar("T")
MAX_LOOKUPS = 256  # at a time; more fail at once, and none of them waits


class Lookups:
    """What aiohttp's resolver uses of a loop."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(MAX_LOOKUPS)

    def getaddrinfo(self, host: str, port: int, **how: int) -> Awaitable[Sequence[object]]:
        """Raises OSError."""
        return self._look(partial(socket.getaddrinfo, host, port, **how))

    def getnameinfo(self, address: tuple[str, int], flags: int = 0) -> Awaitable[tuple[str, str]]:
        """Raises OSError."""
        return self._look(partial(socket.getnameinfo, address, flags))

    def _look(self, look: Callable[[], T]) -> Awaitable[T]:
        if not self._places.acquire(blocking=False):
            raise OSError(None, "too many names are being looked up; try again later")

        def work() -> T:
            try:
                return look()
            finally:
                self._places.release()

        return in_thread(work, "epd-names")
