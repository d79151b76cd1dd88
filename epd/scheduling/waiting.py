"""Who waits for a place in the batch, by rank; and what the scheduler sees of a request."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from epd.scheduling.block_pool import Key


class Schedulable(Protocol):
    """A request as the scheduler sees it.  It is asked, and nothing is written into it: what is
    decided here comes back to it as events (blocks, a part in a step)."""

    @property
    def key(self) -> str: ...

    @property
    def rank(self) -> float: ...

    @property
    def num_tokens(self) -> int:
        """Of the prompt and of the output that is here."""
        ...

    @property
    def num_expected(self) -> int:
        """Here or on their way; the last of them is the last to be computed."""
        ...

    @property
    def num_left(self) -> int:
        """Of them, those that could be computed now, beside those that steps under way compute;
        negative while draft tokens are verified."""
        ...

    @property
    def lacks_rows(self) -> bool:
        """Whether what could be computed ends at an image whose rows are not here."""
        ...

    @property
    def num_promised(self) -> int:
        """Tokens whose blocks it must have from the start, if more than it has tokens."""
        ...

    @property
    def recomputable(self) -> bool:
        """Whether it may be preempted while it decodes."""
        ...

    @property
    def block_table(self) -> Sequence[int]: ...

    @property
    def num_passed(self) -> int:
        """Blocks of its table that it has given up."""
        ...

    @property
    def blocks_ahead(self) -> Sequence[int]:
        """Blocks of its own for places behind its table."""
        ...

    @property
    def num_settled(self) -> int:
        """Tokens whose steps are over."""
        ...

    @property
    def num_launched(self) -> int:
        """Tokens that are computed, or will be by a step under way."""
        ...


T = TypeVar("T", bound=Schedulable)


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
