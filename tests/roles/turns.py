"""An inbox without a loop, for tests of one part of an actor."""

from __future__ import annotations

from collections import deque

from epd.roles.mailbox import Entry, Item, Mailbox


class AtOnce(Mailbox):
    """Takes an item in the callback that brings it, or after the item at hand."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._line: deque[Entry] = deque()

    def put(self, name: str, item: Item, *arguments: object) -> None:
        self._line.append((name, item, arguments))
        while self._line and not self.has_item:
            self.take(*self._line.popleft())
