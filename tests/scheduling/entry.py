"""A request as the scheduler sees it, of numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epd.scheduling.batching import BatchScheduler


@dataclass(slots=True, eq=False)
class Entry:
    key: str
    num_tokens: int  # known or on their way
    rank: float = 0.0
    num_promised: int = 0
    num_computed: int = 0  # or being computed
    num_ready: int | None = None  # tokens that may be computed, if an image lacks
    block_table: tuple[int, ...] = ()
    recomputable: bool = True
    drafts: Sequence[int] = ()

    @property
    def num_expected(self) -> int:
        return self.num_tokens

    @property
    def num_left(self) -> int:
        ready = self.num_tokens if self.num_ready is None else min(self.num_ready, self.num_tokens)
        return ready - self.num_computed

    @property
    def lacks_rows(self) -> bool:
        return self.num_ready is not None and self.num_ready < self.num_tokens

    def launched(self, count: int, *, ahead: bool) -> None:
        self.num_computed += count
        self.num_tokens += ahead


def drafts_of(entry: Entry) -> Sequence[int]:
    return entry.drafts


def admit(scheduler: BatchScheduler[Entry]) -> list[str]:
    """Who enters, with what it is given."""
    entered = []
    for entry, blocks, num_cached, *_ in scheduler.admissions():
        entry.block_table, entry.num_computed = blocks, num_cached
        entered.append(entry.key)
    return entered


def grow(scheduler: BatchScheduler[Entry]) -> list[tuple[Entry, tuple[int, ...]]]:
    """Who gets more blocks, and which."""
    grown = []
    for entry, blocks in scheduler.growth():
        entry.block_table += blocks
        grown.append((entry, blocks))
    return grown
