"""Snapshots: copies of a state at ends of blocks, so that a prompt is found by its beginning.

Theory of operation
-------------------
Some families keep a state of a sequence besides its KV, which every token overwrites
(`engine/language/state_kinds.py`).  KV of a beginning is no use to them without the state behind
it.  So a copy of it is kept in blocks of the same pool, under keys made of the key of the block
before it.  Blocks of snapshots are leased while they are written or read, and idle otherwise:
forgotten oldest first, as KV is.  There is nothing to configure, and memory is not divided
beforehand.

A prompt is found as far as there is KV of it *and* a snapshot behind that.  Two places of a prompt
are worth a snapshot.  One is where its cached KV ends: another text had the same beginning, and a
third one may.  The other is behind its last full block, where the next turn of a conversation goes
on.  A snapshot takes as many blocks as the state.  So it is kept only where it saves as many blocks
of tokens, counted from the snapshot before it, and only in blocks that nobody needs now.

Source: Marconi (MLSys 2025) keeps states at branches and at ends of texts, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from epd.scheduling.block_pool import BlockPool, Key


class TakenBlocks(NamedTuple):
    """Blocks for a sequence: the first `num_found` hold the beginning of its text, and are shared.

    `found`: the blocks of the state behind them; `kept`: those where states are to be kept, by the
    number of blocks of the text before them.  `ahead`: those for later places of its table, and
    `held`: places of KV that need not be received (`windows.py`).  All of them are leased.
    """

    blocks: tuple[int, ...]
    num_found: int
    found: tuple[int, ...] = ()
    kept: Mapping[int, tuple[int, ...]] = {}
    ahead: tuple[int, ...] = ()
    held: tuple[int, ...] = ()


class Snapshots:
    """Beginnings of texts in a pool, with the states behind them."""

    def __init__(self, pool: BlockPool, num_blocks: int) -> None:
        """`num_blocks`: of a state."""
        self._pool = pool
        self._num_blocks = num_blocks

    def take(self, keys: Sequence[Key], count: int, spare: int) -> TakenBlocks | None:
        """`count` blocks, of which the first hold as much as can be used of a text whose full
        blocks have these keys; or None.  `spare` blocks must be left over.

        A state that is found is held besides.  Where there is no room for that, nothing is found.
        """
        num_known = len(self._pool.find(keys))
        num_found = self._longest(keys[:num_known])
        found = self._find(keys[num_found - 1]) if num_found else []
        self._pool.hold(found)
        taken = self._pool.take_prefix(keys[:num_found], count, spare)
        if taken is None and found:
            self._pool.give_back(found)
            num_found, found = 0, []
            taken = self._pool.take_prefix((), count, spare)
        if taken is None:
            return None
        kept = {}
        for place in worth_keeping(num_found, num_known, len(keys), self._num_blocks):
            if self._pool.num_free >= self._num_blocks + spare:
                blocks = self._pool.take(self._num_blocks)
                assert blocks is not None  # counted above
                kept[place] = blocks
        return TakenBlocks(taken[0], num_found, tuple(found), kept)

    def publish(self, key: Key, blocks: Sequence[int]) -> None:
        """These blocks hold the state behind the block with this key."""
        for block, its_key in zip(blocks, self._keys(key), strict=True):
            self._pool.publish(block, its_key)

    def _longest(self, keys: Sequence[Key]) -> int:
        """How many of the first blocks have a state behind them."""
        ends = range(len(keys), 0, -1)
        return next((n for n in ends if len(self._find(keys[n - 1])) == self._num_blocks), 0)

    def _find(self, key: Key) -> list[int]:
        return self._pool.find(self._keys(key))

    def _keys(self, key: Key) -> list[Key]:
        return [key + index.to_bytes(2, "big") for index in range(self._num_blocks)]


def worth_keeping(num_found: int, num_known: int, num_full: int, num_blocks: int) -> Iterator[int]:
    """Behind which blocks of a text a snapshot of `num_blocks` blocks is worth it.

    Of its `num_full` blocks the KV of the first `num_known` is cached, and the first `num_found`
    need not be computed again.
    """
    last = num_found
    for place in (num_known, num_full):
        if place - last >= num_blocks:
            yield place
            last = place
