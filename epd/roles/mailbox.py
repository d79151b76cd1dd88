"""One inbox of an actor, and the rule that every item of it is taken to its end.

Theory of operation
-------------------
What comes from outside (a decoded message, the timers' clock, the outcome of an effect, a step of
the device) is an *item* of the inbox.  An item that finds the actor idle is taken at once, in the
callback that brought it, as an eager task would be; what comes while one is taken waits, and is the
next batch, in the loop's next turn.

An item fires events, and an event's effects are performed. What a performer causes (another
machine's event, a look at a queue that may move now) is never done inside it. It is appended, and
done after the current effects. So a performer sees no machine that is half-way, no function is
reentered, and the order of the effects of a row means nothing. For any caller that is not a
performer, everything that an event has caused is done before `fire` returns.

Calls that come from elsewhere on the loop (the API admits a request) are items of their own, taken
at once.

Sources: run to completion in SCXML, section "Algorithm" (internal events before external ones);
recommendations in dask.distributed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

Item = Callable[..., object]


class Mailbox:
    """`on_error` is told what an item raises, and whose it was."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._inbox: deque[tuple[str, Item, tuple[object, ...]]] = deque()
        self._caused: deque[tuple[str, Item, tuple[object, ...]]] = deque()
        self._wanted: set[Item] = set()  # of those, what is done once however often it is caused
        self._is_taking = False
        self._is_finishing = False
        self._turn: asyncio.Handle | None = None  # of the loop, for the next batch
        self.performs = False  # an effect is being performed

    def put(self, name: str, item: Item, *arguments: object) -> None:
        """From outside: at once, or in its turn."""
        if self._is_taking or self._turn is not None:
            self._inbox.append((name, item, arguments))
        elif self.performs or self._is_finishing:
            self._inbox.append((name, item, arguments))
            self._take_soon()
        else:
            self._is_taking = True
            self.do(name, item, *arguments)
            self._is_taking = False
            if self._inbox:
                self._take_soon()

    def _take(self) -> None:
        """What is there now, as one batch."""
        self._turn, self._is_taking = None, True
        for _ in range(len(self._inbox)):
            name, item, arguments = self._inbox.popleft()
            self.do(name, item, *arguments)
        self._is_taking = False
        if self._inbox:
            self._take_soon()

    def _take_soon(self) -> None:
        self._turn = asyncio.get_running_loop().call_soon(self._take)

    def append(self, name: str, item: Item, *arguments: object) -> None:
        """Caused by the item at hand; at once, if nothing is being performed."""
        self._caused.append((name, item, arguments))
        if not self.performs:
            self.finish()

    def append_once(self, name: str, item: Item) -> None:
        """Likewise; what is to come once is not appended again."""
        if item not in self._wanted:
            self._wanted.add(item)
            self.append(name, item)

    def finish(self) -> None:
        """Do all that was caused, in order."""
        if not self._caused or self._is_finishing:
            return
        self._is_finishing = True
        while self._caused:
            name, item, arguments = self._caused.popleft()
            self._wanted.discard(item)
            self.do(name, item, *arguments)
        self._is_finishing = False

    def do(self, name: str, item: Item, *arguments: object) -> None:
        """Now, and as what it is called."""
        try:
            item(*arguments)
        except Exception as error:
            self._on_error(name, error)

    def close(self) -> None:
        """Nothing is taken any more."""
        self._inbox.clear()
        if self._turn is not None:
            self._turn.cancel()
