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
owner, by a transfer, too (fault F6).  Who decodes a prompt elsewhere is sent what the token behind
it sees (`kv_order.moved`), and no block of that is passed while the prompt is computed.  It gets
blocks for that and for its next tokens, and shares those that it has already.

**Where a beginning is found.**  A beginning needs its blocks of layers that see everything, and of
the others those that its next token sees.  Passed blocks with a key are idle like any others, and
the longest beginning of which enough is there is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from epd.layouts import PASSED, RowBlocks
from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.kv_order import moved
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
        found = dict(enumerate(self._longest(keys)))
        before = self._rows.num_windowed(len(found))
        taken = self._beside(found, before, num_tokens, num_promised, spare)
        if taken is None and found:
            taken = self._beside({}, 0, num_tokens, num_promised, spare)
        return taken

    def receive(
        self, keys: Sequence[Key], num_tokens: int, num_promised: int, spare: int
    ) -> TakenBlocks | None:
        """Likewise for the KV of so many tokens, which will be sent as far as it is not found, and
        for the next one."""
        rows, size = self._rows, len(self._rows.starts)
        wanted = moved(rows, num_tokens)
        known = self._known(keys)
        held = tuple([at for at in wanted if at < len(known) and known[at] != PASSED])
        behind = [*rows.behind(num_tokens)]
        found = dict.fromkeys(behind, PASSED) | {at: known[at] for at in held}
        taken = self._beside(found, len(behind), num_tokens + 1, num_promised, spare)
        if taken is None:
            return None
        first = next(at for at in wanted if at not in found)
        return taken._replace(num_found=first // size * size, held=held)

    def _beside(
        self, found: Mapping[int, int], before: int, num_tokens: int, num_promised: int, spare: int
    ) -> TakenBlocks | None:
        """`found`: by their place in the table; `before`: of its blocks with a window, the first
        that need none of the pool."""
        rows, total = self._rows, self._rows.count(max(num_tokens, num_promised))
        last = rows.num_windowed(total)
        placed = before + max(
            min(rows.num_windowed(rows.count(num_tokens)) - before, self._most[0]),
            min(last - before, self._most[1]),
        )
        stop = rows.place(placed) if placed < last else total
        count = placed + total - last - len(found)
        rest = self._pool.take_beside([b for b in found.values() if b != PASSED], count, spare)
        if rest is None:
            return None
        fresh = iter(rest)
        table = tuple([found[at] if at in found else next(fresh) for at in range(stop)])
        return TakenBlocks(table, len(found), ahead=tuple(fresh))

    def _known(self, keys: Sequence[Key]) -> list[int]:
        """What the pool has of each block of a text, whatever it lacks before."""
        each = of_blocks(keys, self._rows)
        return [next(iter(self._pool.find((key,))), PASSED) for key in each]

    def _longest(self, keys: Sequence[Key]) -> list[int]:
        """The table of the longest beginning that can be used."""
        rows, size = self._rows, len(self._rows.starts)
        known = self._known(keys)
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
