"""Which instance most likely holds the beginning of a prompt: what the gateway has sent where.

Theory of operation
-------------------
An instance that has computed, or received, a prompt keeps its KV blocks until it needs the memory
(`block_pool.py`).  The gateway gets no message of that.  For each life of an instance it remembers
the keys of the blocks that it has sent there (`prefix_keys.py`: texts and images), as many as the
instance has blocks.  It forgets in the instance's order: the longest unused first, the end of a
text before its beginning.

The record is a hint.  What it wrongly believes costs the computing of a prompt, as if there were no
record; who gets the request is placement's choice, which weighs it against load (`placement.py`).

Sources: cache-aware routing of SGLang's router, which keeps a tree of texts it has sent; Dynamo's
KV router, which counts overlapping blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epd.messages import Address
from epd.scheduling.block_pool import Key


@dataclass(slots=True)
class _Book:
    """One life of an instance; the key that was not used for the longest is first."""

    epoch: int
    keys: dict[Key, None] = field(default_factory=dict)


class PrefixRecord:
    """Keys by instance; bounded by the blocks that the instances have."""

    def __init__(self) -> None:
        self._books: dict[str, _Book] = {}

    def note(self, address: Address, keys: Sequence[Key], num_blocks: int) -> None:
        """An instance with a pool of `num_blocks` was sent a text whose blocks have these keys."""
        book = self._books.get(address.instance_id)
        if book is None or book.epoch != address.epoch:
            book = self._books[address.instance_id] = _Book(address.epoch)
        for key in reversed(keys):
            book.keys.pop(key, None)
            book.keys[key] = None
        while len(book.keys) > num_blocks:
            del book.keys[next(iter(book.keys))]

    def num_held(self, address: Address, keys: Sequence[Key]) -> int:
        """How many of the first blocks this life of the instance most likely holds."""
        book = self._books.get(address.instance_id)
        if book is None or book.epoch != address.epoch:
            return 0
        return next((n for n, key in enumerate(keys) if key not in book.keys), len(keys))

    def num_tracked(self, instance_id: str) -> int:
        book = self._books.get(instance_id)
        return len(book.keys) if book is not None else 0

    def forget(self, instance_id: str, epoch: int) -> None:
        """That life is over, and its memory with it."""
        book = self._books.get(instance_id)
        if book is not None and book.epoch <= epoch:
            del self._books[instance_id]
