"""One inbox of an actor, and the rule that every item of it is taken to its end.

Theory of operation
-------------------
What comes from outside (a decoded message, the timers' clock, the outcome of an effect, a step of
the device, a request of the API) is an *item* of the inbox.  `Actor.run` takes one after the other;
nothing is done in the callback that brings it.  What comes while a batch is taken is of the next
one, in a later turn of the loop, so that no item can hold the loop by putting itself again.

An item fires events, and an event's effects are performed before `fire` returns. What a performer
causes (another machine's event, a look at a queue that may move now) is never done inside it. It is
posted, and done after the item, in order, before the next item. So a performer sees no machine that
is half-way, no function is reentered, and the order of the effects of a row means nothing.

The inbox has a bound for messages, which may be lost anyway. All else in it has one of its own: the
timers are one item, and results are as many as there are requests, tasks and steps.

Sources: run to completion in SCXML, section "Algorithm" (internal events before external ones);
recommendations in dask.distributed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from epd.roles.bell import Bell

MAX_ITEMS = 8192  # with which a message is still let in

Item = Callable[..., object]
Entry = tuple[str, Item, tuple[object, ...]]  # whose it is, what is done, and with what


class OutOfTurn(Exception):
    """An event was fired inside a performer, or outside the inbox: a fault of the program."""


class Mailbox:
    """`on_error` is told what an item raises, and whose it was."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._inbox: deque[Entry] = deque()
        self._caused: deque[Entry] = deque()
        self._wanted: set[Item] = set()  # what is done once, however often it is posted
        self._news = Bell()
        self.has_item = False  # one is at hand,
        self.may_fire = False  # and no effect of it is being performed

    def __len__(self) -> int:
        return len(self._inbox)

    @property
    def is_full(self) -> bool:
        return len(self._inbox) >= MAX_ITEMS

    def put(self, name: str, item: Item, *arguments: object) -> None:
        """From outside: in its turn."""
        self._inbox.append((name, item, arguments))
        self._news.ring()

    def post(self, name: str, item: Item, *arguments: object) -> None:
        """Caused by the item at hand, and done after it; without one it is an item of its own."""
        if self.has_item:
            self._caused.append((name, item, arguments))
        else:
            self.put(name, item, *arguments)

    def post_once(self, name: str, item: Item) -> None:
        """Likewise; what is to come once is not posted again."""
        if item not in self._wanted:
            self._wanted.add(item)
            self.post(name, item)

    async def batch(self) -> Iterable[Entry]:
        """What is there by the loop's next turn, or later; not what comes while it is taken."""
        if self._inbox:
            await asyncio.sleep(0)
        while not self._inbox:
            self._news.clear()
            await self._news
        batch, self._inbox = self._inbox, deque()
        return batch

    def take(self, name: str, item: Item, arguments: tuple[object, ...]) -> None:
        """An item of the inbox, to its end."""
        self.has_item = self.may_fire = True
        self._wanted.discard(item)
        self.do(name, item, *arguments)
        self.finish()
        self.has_item = self.may_fire = False

    def finish(self) -> None:
        """Do all that the item at hand has caused so far, in order."""
        caused = self._caused
        while caused:
            name, item, arguments = caused.popleft()
            self._wanted.discard(item)
            self.do(name, item, *arguments)

    def do(self, name: str, item: Item, *arguments: object) -> None:
        """Now, and as what it is called."""
        try:
            item(*arguments)
        except Exception as error:
            self._on_error(name, error)

    def close(self) -> None:
        """Nothing is taken any more."""
        self._inbox.clear()
