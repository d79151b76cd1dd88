"""KV blocks: counted references, and contents that outlive their owners.

Theory of operation
-------------------
A full block whose content has a *key* (`prefix_keys.py`) is never written again.  So several
sequences may read it at once: sharing is a reference count and needs no copy.  When the last
reference goes, a block with a key is *idle*: free for whoever needs memory, oldest first, but until
then found again by its key.  So the cache takes no memory from anybody, and there is nothing to
configure: what is not needed now is remembered.

A sequence returns its blocks last one first, so the tail of a text is forgotten before its
beginning, which more texts share.  Blocks behind a window go back before it is certain that their
content may be found: it is noted when they go, and proven later, unless they were taken meanwhile.

Source: automatic prefix caching of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epd.scheduling.pool import Pool, PoolError

Key = bytes


class BlockPool(Pool):
    """A `Pool` whose units may be leased by several owners and found by content."""

    __slots__ = ("_by_key", "_idle", "_key_of", "_references")

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._references: dict[int, int] = {}  # leased blocks only
        self._by_key: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: dict[int, None] = {}  # no references, content kept; oldest first

    @property
    def num_free(self) -> int:
        """Blocks that can be leased: empty ones, and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_leased(self) -> int:
        return len(self._references)

    def holds(self, blocks: Iterable[int]) -> bool:
        """Whether all of these are leased by somebody."""
        return all(map(self._references.__contains__, blocks))

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` blocks to be written, or None; contents are forgotten oldest first."""
        if count > self.num_free:
            return None
        blocks = tuple([self._empty_block() for _ in range(count)])
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each; all of them are leased by somebody."""
        for block in blocks:
            if block not in self._references:
                raise PoolError(f"block {block} was shared but is not leased")
            self._references[block] += 1

    def take_prefix(
        self, keys: Sequence[Key], count: int, spare: int = 0, together: int = 1
    ) -> tuple[tuple[int, ...], int] | None:
        """`count` blocks, of which the first n hold the contents of `keys[:n]`, and n; or None.

        `keys`: of no more than `count` blocks.  Those n are shared, and must not be written.
        `spare` blocks must be left over.  So many `together` are found, or none of them.
        """
        found = self.find(keys)
        del found[len(found) // together * together :]
        rest = self.take_beside(found, count - len(found), spare)
        return None if rest is None else ((*found, *rest), len(found))

    def take_beside(
        self, found: Sequence[int], count: int, spare: int = 0
    ) -> tuple[int, ...] | None:
        """`count` blocks to be written, and one more owner for those that were found just now; or
        None.  `spare` blocks must be left over."""
        num_idle = sum([block in self._idle for block in found])
        if count + spare > self.num_free - num_idle:
            return None
        self.hold(found)
        return self.take(count)

    def find(self, keys: Sequence[Key]) -> list[int]:
        """Blocks with the contents of the longest prefix of `keys` that the pool holds."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, found: Iterable[int]) -> None:
        """One more owner for each of these, which were found just now."""
        for block in found:
            self._idle.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1

    def publish(self, block: int, key: Key) -> None:
        """The block is full and has this content from now on; the first of equal blocks is kept."""
        if block not in self._references:
            raise PoolError(f"block {block} was published but is not leased")
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key

    def note(self, block: int, key: Key) -> None:
        """The block, full and still leased, has this content, which nobody finds until `prove`."""
        if key not in self._by_key:
            self._key_of.setdefault(block, key)

    def prove(self, block: int, key: Key) -> None:
        """What was noted can be found from now on, if nobody has taken the block."""
        if self._key_of.get(block) == key:
            self._by_key.setdefault(key, block)

    def is_published(self, block: int) -> bool:
        """Whether it has a content that others can find."""
        return block in self._key_of

    def give_back(self, units: Iterable[int]) -> None:
        """One reference to each goes; the last of `units` becomes the oldest idle one."""
        for block in reversed(tuple(units)):
            left = self._references.get(block, 0) - 1
            if left < 0:
                raise PoolError(f"unit {block} was given back but is not leased")
            if left:
                self._references[block] = left
                continue
            del self._references[block]
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def _empty_block(self) -> int:
        if self._free:
            return self._free.popleft()
        block = next(iter(self._idle))
        del self._idle[block]
        key = self._key_of.pop(block)
        if self._by_key.get(key) == block:
            del self._by_key[key]
        return block
