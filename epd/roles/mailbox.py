"""One inbox of an actor, and the rule that every item of it is taken to its end.

Theory of operation
-------------------
An *item* of the inbox comes from outside: a decoded message, the timers' clock, the outcome of an
effect, a step of the device, a request of the API.  `Actor.run` takes one after the other; nothing
is done in the callback that brings it.  An item that comes while a batch is taken is of the next
one, in a later turn of the loop.  So no item can hold the loop by putting itself again.

An item fires events, and `fire` takes each to its end: its effects are performed, and so are the
events that performers have posted, in order. They are never fired inside the performer. So a
performer sees no machine half-way, and the order of the effects of a row means nothing. An item
that fires a second event finds all that the first one has caused.

A look at a queue that may move now fires events, too, so it is no part of another event's end. It
comes after the item at hand and before the next one, once however often it was asked for. So no
function is reentered.

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
    """`on_error(name, error)` gets what an item, a look or a posted entry raises."""

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._inbox: deque[Entry] = deque()
        self._posted: deque[Entry] = deque()
        self._looks: dict[Callable[[], None], str] = {}  # in the order in which they are done
        self._news = Bell()
        self.has_item = False  # one is at hand,
        self.may_fire = False  # and nothing that an event has caused is being done

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
        """Before the item at hand fires its next event, or ends; it fires none.  Without an item it
        is one."""
        if self.has_item:
            self._posted.append((name, item, arguments))
        else:
            self.put(name, item, *arguments)

    def look(self, name: str, look: Callable[[], None]) -> None:
        """After the item at hand, once; it may fire.  Without an item it is one."""
        if self.has_item:
            self._looks.setdefault(look, name)
        else:
            self.put(name, look)

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
        """An item of the inbox, and the looks that it has caused, each to its end."""
        self.has_item = self.may_fire = True
        self.do(name, item, *arguments)
        if self._posted:
            self.finish()
        while looks := self._looks:
            look = next(iter(looks))
            self.do(looks.pop(look), look)
            if self._posted:
                self.finish()
        self.has_item = self.may_fire = False

    def to_the_end(self, name: str, item: Item, *arguments: object) -> None:
        """Behind all that is posted; then all that it has posted."""
        if self._posted:
            self.finish()
        self.may_fire = False
        self.do(name, item, *arguments)
        if self._posted:
            self.finish()
        self.may_fire = True

    def finish(self) -> None:
        """Do all that is posted, in order."""
        self.may_fire = False
        posted = self._posted
        while posted:
            name, item, arguments = posted.popleft()
            self.do(name, item, *arguments)
        self.may_fire = True

    def do(self, name: str, item: Item, *arguments: object) -> None:
        """Now, and as what it is called."""
        try:
            item(*arguments)
        except Exception as error:
            self._on_error(name, error)

    def close(self) -> None:
        """Nothing is taken any more."""
        self._inbox.clear()
