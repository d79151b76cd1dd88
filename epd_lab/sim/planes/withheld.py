"""Messages that the network keeps back for long, and lets go when no process expects them any more.

A connection outlives its process in the network's queues, and another connection is not behind it
in any order.  So a process's messages may arrive after its successor has joined under its name.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Word = TypeVar("Word")


class Withheld(Generic[Word]):
    """By the name of the life that spoke, in the order of sending."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._kept: dict[str, list[Word]] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def hold(self, life: str, kind: str = "") -> None:
        """Keep this life's messages from now on; of one kind only, if that is given."""
        self._kinds[life] = kind
        self._kept[life] = []

    def takes(self, life: str, kind: str, word: Word) -> bool:
        """Whether it is kept, and not on its way."""
        wanted = self._kinds.get(life)
        if wanted is None or (wanted and kind != wanted):
            return False
        self._kept[life].append(word)
        return True

    def let_go(self, life: str) -> list[Word]:
        self._kinds.pop(life, None)
        return self._kept.pop(life, [])

    def clear(self) -> int:
        """They never arrive; how many."""
        count = sum(map(len, self._kept.values()))
        self._kinds.clear()
        self._kept.clear()
        return count
