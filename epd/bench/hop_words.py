"""Questions and answers between the two processes of `epd bench hop`, many at once.

One packet each over a socket pair that the loop watches itself: a stream reader between would cost
as much as the message.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any

import msgspec

MAX_NBYTES = 1 << 16


class Words:
    """One end; `hear` is called on the loop with each packet, and with None at the end."""

    def __init__(self, end: socket.socket, hear: Callable[[Any], None]) -> None:
        self._end = end
        self._hear = hear
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end, self._readable)

    def say(self, word: Any) -> None:
        self._end.send(msgspec.json.encode(word))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._end)
        self._end.close()

    def _readable(self) -> None:
        packet = self._end.recv(MAX_NBYTES)
        if not packet:
            asyncio.get_running_loop().remove_reader(self._end)
        self._hear(msgspec.json.decode(packet) if packet else None)


class Receiver:
    """The other process, as the sender sees it."""

    def __init__(self, end: socket.socket) -> None:
        self._words = Words(end, self._answered)
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self.cpu_s = 0.0

    async def ask(self, do: str, **arguments: Any) -> Any:
        """What the receiver's method `do` returns.  Raises RuntimeError with its error."""
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._words.say((number, do, arguments))
        return await answer

    def close(self) -> None:
        self._words.close()

    def _answered(self, word: Any) -> None:
        if word is None:
            for answer in self._open.values():
                answer.set_exception(RuntimeError("the receiving process has ended"))
            self._open.clear()
            return
        number, self.cpu_s, result, error = word
        answer = self._open.pop(number)
        if error:
            answer.set_exception(RuntimeError(error))
        else:
            answer.set_result(result)
