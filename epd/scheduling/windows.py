"""Blocks of layers with a window: how many a sequence has, and where its beginning is found.

Theory of operation
-------------------
Some layers see the last tokens alone (`RowKind.window`).  Blocks of their rows that no step under
way can see are *passed*: the sequence gives them up while it runs, and its table has `PASSED` in
their place.

**What admission promises.**  A prompt gets all its blocks of layers that see everything.  Of the
others it gets as many as its steps under way can see at once, however long it is.  Its table ends
where these do; the rest of its blocks are *ahead*.  It gives up as many as it needs for its next
tokens, in the same turn, and all sequences do so before any takes one.  So a prompt waits for no
memory, as without windows, unless another sequence has a block that it gave up.  When it decodes,
it gives up what it no longer needs.

Only what is behind all steps under way is passed: a block may be written as soon as it has another
owner, by a transfer, too (fault F6).  KV that another instance decodes is sent whole, so a prompt
of which it is computed keeps all its blocks (`Schedulable.slides`).

**Where a beginning is found.**  A beginning needs its blocks of layers that see everything, and of
the others those that its next token sees.  Passed blocks with a key are idle like any others, and
the longest beginning of which enough is there is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from epd.layouts import PASSED, RowBlocks
from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.prefix_keys import of_blocks
from epd.scheduling.snapshots import TakenBlocks
from epd.scheduling.waiting import Schedulable


class Windows:
    """Of one instance."""

    def __init__(self, pool: BlockPool, rows: RowBlocks, reach: int, depth: int) -> None:
        """`reach`: tokens of a prompt that steps under way compute, at most; `depth`: steps."""
        self._pool = pool
        self._rows = rows
        self._reach = reach
        self._most = rows.live(reach), rows.live(depth)  # of a prompt, and of who decodes

    def wanted(self, entry: Schedulable, *, decodes: bool) -> int:
        """Tokens that its table has room for while it runs."""
        if decodes:
            return entry.num_expected
        return min(entry.num_expected, entry.num_settled + self._reach)

    def passing(self, entry: Schedulable, *, decodes: bool) -> dict[int, int]:
        """Blocks that it gives up now, by their place in its table: as many as it needs, and those
        that are too many."""
        if not entry.slides:
            return {}
        rows, placed = self._rows, len(entry.block_table)
        wanted, num_windowed = self.wanted(entry, decodes=decodes), rows.num_windowed(placed)
        last, most = num_windowed, self._most[decodes]
        if rows.room(placed) < wanted:
            last = rows.num_windowed(rows.count(wanted))
        count = max(last - num_windowed, last - entry.num_passed - most)
        if count <= 0:
            return {}
        places = islice(rows.behind(entry.num_settled, entry.num_passed), count)
        return {place: entry.block_table[place] for place in places}

    def lacking(self, entry: Schedulable, num_tokens: int) -> int:
        """Blocks of the pool without which it has no room for so many tokens."""
        placed, behind = len(entry.block_table), self._rows.count(num_tokens)
        num_windowed = self._rows.num_windowed(behind) - self._rows.num_windowed(placed)
        num_whole = max(0, behind - placed - num_windowed - len(entry.blocks_ahead))
        return max(0, num_windowed) + num_whole

    def lacking_chunk(self, entry: Schedulable) -> int:
        """Likewise of a prompt, for its next steps."""
        return self.lacking(entry, self.wanted(entry, decodes=False))

    def extend(self, entry: Schedulable, num_tokens: int) -> tuple[int, ...]:
        """Blocks for the next places of its table, as far as there are any: its own ones first."""
        rows, ahead, found = self._rows, list(entry.blocks_ahead), list[int]()
        for place in range(len(entry.block_table), rows.count(num_tokens)):
            if ahead and rows.num_windowed(place) == rows.num_windowed(place + 1):
                found.append(ahead.pop(0))
            elif (taken := self._pool.take(1)) is not None:
                found += taken
            else:
                break
        return tuple(found)

    def take(
        self, keys: Sequence[Key], num_tokens: int, num_promised: int, spare: int
    ) -> TakenBlocks | None:
        """Blocks for a prompt of so many tokens, and for as many as are promised.  The first hold
        as much as can be used of a text whose full blocks have these keys; or None.  `spare` blocks
        must be left over."""
        found = self._longest(keys)
        taken = self._beside(found, num_tokens, num_promised, spare)
        return (
            taken
            if taken is not None or not found
            else self._beside((), num_tokens, num_promised, spare)
        )

    def _beside(
        self, found: Sequence[int], num_tokens: int, num_promised: int, spare: int
    ) -> TakenBlocks | None:
        rows, total = self._rows, self._rows.count(max(num_tokens, num_promised))
        before, last = rows.num_windowed(len(found)), rows.num_windowed(total)
        own = max(
            min(rows.num_windowed(rows.count(num_tokens)) - before, self._most[0]),
            min(last - before, self._most[1]),
        )
        stop = rows.place(before + own) if before + own < last else total
        count = own + total - last - (len(found) - before)
        rest = self._pool.take_beside([b for b in found if b != PASSED], count, spare)
        if rest is None:
            return None
        num_placed = stop - len(found)
        return TakenBlocks((*found, *rest[:num_placed]), len(found), ahead=rest[num_placed:])

    def _longest(self, keys: Sequence[Key]) -> list[int]:
        """The table of the longest beginning that can be used."""
        rows, size = self._rows, len(self._rows.starts)
        each = of_blocks(keys, rows)
        known = [next(iter(self._pool.find((key,))), PASSED) for key in each]
        windowed = {one.column for one in rows.windowed}
        gaps = (at for at, b in enumerate(known) if b == PASSED and at % size not in windowed)
        num_units = next(gaps, len(known)) // size
        while num_units:
            passed = set(rows.behind(num_units * rows.num_tokens))
            table = [
                PASSED if at in passed else b for at, b in enumerate(known[: num_units * size])
            ]
            lacks = [at for at, b in enumerate(table) if b == PASSED and at not in passed]
            if not lacks:
                return table
            num_units = lacks[-1] // size
        return []
