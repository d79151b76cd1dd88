"""Bugs of the cache events and of cluster-wide single flight, put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from epd.roles.cache_events import CacheDirectory
from epd.roles.gateway.dispatch import Dispatcher
from epd.scheduling.backlog import Books
from epd.scheduling.residency import Batch, CacheIndex
from tests.sim.planting import mutant, several


@mutant
def cache_gap_is_ignored() -> Iterator[None]:
    """A batch of cache events that was lost is never asked for."""
    with mock.patch.object(CacheDirectory, "_ask", lambda self, instance_id: None):
        yield


@mutant
def cache_events_apply_twice() -> Iterator[None]:
    """A late copy of a batch is applied again, over newer ones."""
    apply = CacheIndex.apply

    def any_batch(self: CacheIndex, instance_id: str, epoch: int, batch: Batch) -> bool:
        book = self._book(instance_id, epoch)
        newest = book.sequence
        book.sequence = min(newest, batch.sequence - 1)
        taken = apply(self, instance_id, epoch, batch)
        book.sequence = max(newest, book.sequence)
        return taken

    with mock.patch.object(CacheIndex, "apply", any_batch):
        yield


@mutant
def residency_survives_restart() -> Iterator[None]:
    """F44: a new life of an encoder is believed to hold what the earlier one did."""
    book_of = CacheIndex._book

    def same_book(self: CacheIndex, instance_id: str, epoch: int) -> Any:
        if (book := self._books.get(instance_id)) is not None and book.epoch != epoch:
            book.epoch, book.sequence = epoch, 0
        return book_of(self, instance_id, epoch)

    with several(
        mock.patch.object(CacheIndex, "_book", same_book),
        mock.patch.object(CacheIndex, "forget", lambda self, instance_id, epoch: None),
    ):
        yield


@mutant
def placement_forgets_flights() -> Iterator[None]:
    """F37: equal images on their way do not meet when their encoder is busy."""
    with mock.patch.object(Dispatcher, "in_flight", lambda self, mm_hash: ()):
        yield


@mutant
def what_is_over_stays_in_the_books() -> Iterator[None]:
    """F43: an attempt that was given up before its first token is waited behind for ever."""
    ended = Books.ended

    def only_answered(self: Books, key: str) -> None:
        if (attempt := self._attempts.get(key)) is not None and attempt.has_begun:
            ended(self, key)

    with mock.patch.object(Books, "ended", only_answered):
        yield
