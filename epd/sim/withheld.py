"""Words that the network keeps back for long, and lets go when nobody expects them any more.

A connection outlives its process in the network's queues, and another connection is not behind it
in any order.  So what a process said may arrive after its successor has joined under its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd.sim.network import Link, Parcel


class Withheld:
    """By the name of the life that spoke, in the order of sending."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._kept: dict[str, list[tuple[Link, Parcel]]] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def hold(self, life: str, kind: str = "") -> None:
        """Keep what this life says from now on; of one kind of message only, if that is given."""
        self._kinds[life] = kind
        self._kept[life] = []

    def takes(self, link: Link, parcel: Parcel) -> bool:
        """Whether it is kept, and not on its way."""
        kind = self._kinds.get(link.source.name)
        if kind is None or (kind and parcel.kind != kind):
            return False
        self._kept[link.source.name].append((link, parcel))
        return True

    def let_go(self, life: str) -> list[tuple[Link, Parcel]]:
        self._kinds.pop(life, None)
        return self._kept.pop(life, [])

    def clear(self) -> None:
        """They never arrive."""
        self._kinds.clear()
        self._kept.clear()
