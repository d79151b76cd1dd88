"""A module in which the tool's own test plants: a little of all that the operators change."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from epd.fsm.kernel import Effect, Event, Machine, Row, State, Table


class S(State):
    OPEN = "takes entries"
    CLOSED = "full"


class Do(Effect):
    TELL = "say that it is over"
    FREE = "give back its page"


@dataclass(slots=True)
class Filled(Event):
    by_time = True


class Page(Machine):
    __slots__ = ("reason",)

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.reason = ""


def keep_reason(page: Page, event: Filled) -> None:
    page.reason = "full"


Page.table = Table(
    "PAGE",
    "",
    S,
    S.OPEN,
    (S.CLOSED,),
    (Row(S.OPEN, Filled, S.CLOSED, (Do.TELL, Do.FREE), keep_reason),),
)


class Ledger:
    """Entries by owner and epoch, at most `size` of them."""

    def __init__(self, size: int) -> None:
        self._entries: deque[tuple[str, int]] = deque()
        self._size = size
        self.num_refused = 0
        self.num_unseen = 0

    def add(self, owner: str, epoch: int) -> bool:
        """False: it is full."""
        if len(self._entries) >= self._size:
            self.num_refused += 1
            self.num_unseen += 1
            return False
        self._entries.append((owner, epoch))
        return True

    def oldest(self) -> tuple[str, int]:
        return self._entries[0]

    def drop(self, owner: str, epoch: int) -> None:
        for entry in list(self._entries):
            if (entry[0], entry[1]) == (owner, epoch):
                self._entries.remove(entry)

    def wait(self, limit: int) -> int:
        """Count until the limit; what never ends, if the count is not kept."""
        count = 0
        while count < limit:
            count += 1
        return count

    def never_called(self) -> None:
        self._size = 0
