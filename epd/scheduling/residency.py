"""Which encoder holds which rows: a log of changes at each encoder, and an index at the gateway.

Theory of operation
-------------------
Each `CacheEvents` batch of an encoder has the next sequence number and holds the final state of
every hash that changed since the batch before.  A `full` batch is numbered like the others and
replaces all earlier ones.  Their reader has three rules.  The next number is applied; a number not
above the last one is a copy and is dropped; any other is a gap, and a full batch is asked for.
Heartbeats carry the last number, so that the loss of the very last batch is noticed as well.

The index is a hint.  An encode request always carries its image, so the worst that a stale entry
can do is send it where it has to be encoded again.  Everything is bounded: an encoder reports its
`MAX_TRACKED` youngest hashes, and older ones are merely not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

MAX_TRACKED = 4096  # hashes per encoder: 270 KB in a full batch
MAX_BATCH = 1024  # changes in one batch; more of them go as a full one


class Whereabouts(Protocol):
    """Placement's view of an image."""

    def in_flight(self, mm_hash: str) -> Iterable[str]:
        """Encoders to which an open attempt has sent it, the first one first."""
        ...

    def resident(self, mm_hash: str) -> Iterable[str]:
        """Encoders that have reported its rows."""
        ...


class Nowhere:
    """No encoder has any rows."""

    def in_flight(self, mm_hash: str) -> Iterable[str]:
        return ()

    def resident(self, mm_hash: str) -> Iterable[str]:
        return ()


class Said:
    """`known`, and the encoder that the request itself names for a hash: it may be news, and it may
    be wrong."""

    def __init__(self, known: Whereabouts, encoders: Mapping[str, str]) -> None:
        """`encoders`: by hash."""
        self._encoders = encoders
        self._known = known

    def in_flight(self, mm_hash: str) -> Iterable[str]:
        return self._known.in_flight(mm_hash)

    def resident(self, mm_hash: str) -> Iterable[str]:
        said = self._encoders.get(mm_hash)
        told = self._known.resident(mm_hash)
        return told if said is None else (*told, said)


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes of one encoder's cache; `full`: everything else is not there."""

    sequence: int
    full: bool
    stored: tuple[str, ...]
    evicted: tuple[str, ...]


class CacheLog:
    """The hashes that an encoder holds, and the changes to be sent."""

    def __init__(self, max_tracked: int = MAX_TRACKED) -> None:
        self.sequence = 0  # of the last batch; 0: nothing was ever said
        self._max_tracked = max_tracked
        self._held: dict[str, None] = {}  # the oldest first
        self._changed: dict[str, None] = {}
        self._owes_full = False

    @property
    def held(self) -> frozenset[str]:
        """The hashes that are reported."""
        return frozenset(self._held)

    @property
    def has_news(self) -> bool:
        return self._owes_full or bool(self._changed)

    def stored(self, mm_hash: str) -> None:
        """Its rows are here; repeating it is no news."""
        if mm_hash in self._held:
            return
        if len(self._held) >= self._max_tracked:
            self.evicted(next(iter(self._held)))
        self._held[mm_hash] = None
        self._changed[mm_hash] = None

    def evicted(self, mm_hash: str) -> None:
        """Its rows are in no tier of this encoder any more."""
        if mm_hash in self._held:
            del self._held[mm_hash]
            self._changed[mm_hash] = None

    def owe_full(self) -> None:
        """A reader missed a batch: the next one is full."""
        self._owes_full = True

    def take(self) -> Batch:
        """The next batch."""
        self.sequence += 1
        full = self._owes_full or len(self._changed) > MAX_BATCH
        told = self._held if full else self._changed
        stored = tuple(key for key in told if key in self._held)
        evicted = () if full else tuple(key for key in told if key not in self._held)
        self._changed, self._owes_full = {}, False
        return Batch(self.sequence, full, stored, evicted)


@dataclass(slots=True)
class _Book:
    """One life of an encoder, by its batches."""

    epoch: int
    sequence: int = 0
    held: dict[str, None] = field(default_factory=dict)


class CacheIndex:
    """The rows of a cluster's encoders, by their batches; see the head of the module."""

    def __init__(self, max_tracked: int = MAX_TRACKED) -> None:
        self._max_tracked = max_tracked
        self._books: dict[str, _Book] = {}
        self._holders: dict[str, dict[str, None]] = {}  # hash to encoders

    def resident(self, mm_hash: str) -> tuple[str, ...]:
        return tuple(self._holders.get(mm_hash, ()))

    def held(self, instance_id: str) -> frozenset[str]:
        book = self._books.get(instance_id)
        return frozenset(book.held) if book is not None else frozenset()

    def apply(self, instance_id: str, epoch: int, batch: Batch) -> bool:
        """Take a batch in.  False: one before it is missing; nothing was changed."""
        book = self._book(instance_id, epoch)
        if batch.sequence <= book.sequence:
            return True  # a copy
        if not batch.full and batch.sequence != book.sequence + 1:
            return False
        if batch.full:
            for mm_hash in list(book.held):
                self._remove(instance_id, book, mm_hash)
        book.sequence = batch.sequence
        for mm_hash in batch.evicted:
            self._remove(instance_id, book, mm_hash)
        for mm_hash in batch.stored:
            if len(book.held) >= self._max_tracked:
                self._remove(instance_id, book, next(iter(book.held)))
            book.held[mm_hash] = None
            self._holders.setdefault(mm_hash, {})[instance_id] = None
        return True

    def is_current(self, instance_id: str, epoch: int, sequence: int) -> bool:
        """Whether all batches up to this one are in."""
        return self._book(instance_id, epoch).sequence >= sequence

    def forget(self, instance_id: str, epoch: int) -> None:
        """That life is over, and its memory with it."""
        book = self._books.get(instance_id)
        if book is not None and book.epoch <= epoch:
            self._drop(instance_id, book)

    def _book(self, instance_id: str, epoch: int) -> _Book:
        book = self._books.get(instance_id)
        if book is not None and book.epoch != epoch:
            self._drop(instance_id, book)
            book = None
        if book is None:
            book = self._books[instance_id] = _Book(epoch)
        return book

    def _drop(self, instance_id: str, book: _Book) -> None:
        for mm_hash in list(book.held):
            self._remove(instance_id, book, mm_hash)
        del self._books[instance_id]

    def _remove(self, instance_id: str, book: _Book, mm_hash: str) -> None:
        book.held.pop(mm_hash, None)
        holders = self._holders.get(mm_hash)
        if holders is not None:
            holders.pop(instance_id, None)
            if not holders:
                del self._holders[mm_hash]
