"""Who waits for a place in the batch, by rank."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from epd.scheduling.block_pool import Key


class Keyed(Protocol):
    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


class Waiting(NamedTuple, Generic[T]):
    """A place in a queue: rank and order of arrival; and what the pool may hold of it already."""

    place: tuple[float, int, str]
    entry: T
    keys: Sequence[Key]  # of its full blocks


@dataclass(slots=True)
class Queue(Generic[T]):
    """Who waits, by rank, equal ranks in order of arrival."""

    order: list[tuple[float, int, str]] = field(default_factory=list)
    waiting: dict[str, Waiting[T]] = field(default_factory=dict)
    serial: Iterator[int] = field(default_factory=itertools.count)

    def join(self, rank: float, entry: T, keys: Sequence[Key]) -> None:
        place = (rank, next(self.serial), entry.key)
        insort(self.order, place)
        self.waiting[entry.key] = Waiting(place, entry, keys)

    def leave(self, key: str) -> bool:
        """False if it did not stand here."""
        waiting = self.waiting.pop(key, None)
        if waiting is None:
            return False
        del self.order[bisect_left(self.order, waiting.place)]
        return True

    def head(self) -> Waiting[T] | None:
        return self.waiting[self.order[0][2]] if self.order else None
