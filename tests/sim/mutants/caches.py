"""Bugs of the cache events and of cluster-wide single flight, put back."""

from __future__ import annotations

from typing import Any

from epd.roles.cache_events import CacheDirectory
from epd.roles.gateway.dispatch import Dispatcher
from epd.scheduling.backlog import Attempt, Books
from epd.scheduling.residency import Batch, CacheIndex
from tests.sim.mutants.planting import Planted, mutant, patched, several


@mutant
def cache_gap_is_ignored() -> Planted:
    """A batch of cache events that was lost is never asked for."""
    return patched(CacheDirectory, "_ask", lambda self, instance_id: None)


@mutant
def cache_events_apply_twice() -> Planted:
    """A late copy of a batch is applied again, over newer ones."""
    apply = CacheIndex.apply

    def any_batch(self: CacheIndex, instance_id: str, epoch: int, batch: Batch) -> bool:
        book = self._book(instance_id, epoch)
        newest = book.sequence
        book.sequence = min(newest, batch.sequence - 1)
        taken = apply(self, instance_id, epoch, batch)
        book.sequence = max(newest, book.sequence)
        return taken

    return patched(CacheIndex, "apply", any_batch)


@mutant
def residency_survives_restart() -> Planted:
    """F44: a new life of an encoder is believed to hold what the earlier one did."""
    book_of = CacheIndex._book

    def same_book(self: CacheIndex, instance_id: str, epoch: int) -> Any:
        if (book := self._books.get(instance_id)) is not None and book.epoch != epoch:
            book.epoch, book.sequence = epoch, 0
        return book_of(self, instance_id, epoch)

    return several(
        patched(CacheIndex, "_book", same_book),
        patched(CacheIndex, "forget", lambda self, instance_id, epoch: None),
    )


@mutant
def placement_forgets_flights() -> Planted:
    """F37: equal images on their way do not meet when their encoder is busy."""
    return patched(Dispatcher, "in_flight", lambda self, mm_hash: ())


@mutant
def what_is_over_stays_in_the_books() -> Planted:
    """F43: an attempt that was given up before its first token is waited behind for ever."""
    end_work = Books._end_work

    def only_answered(self: Books, key: str, attempt: Attempt) -> None:
        if attempt.has_begun:
            end_work(self, key, attempt)
        attempt.instances = attempt.sent = ()  # no more is counted twice

    return patched(Books, "_end_work", only_answered)
