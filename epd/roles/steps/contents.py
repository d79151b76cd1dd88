"""What blocks contain, as others can find it: keys of full blocks, and states behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from epd.fsm.request import Request
from epd.layouts import PASSED
from epd.messages import KvLayout
from epd.roles.steps.record import Record
from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.prefix_keys import of_blocks
from epd.scheduling.snapshots import Snapshots


class Blocks(Protocol):
    """Who owns them."""

    pool: BlockPool
    totals: Counter[str]
    caching: bool

    def return_blocks(self, blocks: tuple[int, ...]) -> None: ...


class Contents:
    """Of the blocks of one instance."""

    def __init__(self, owner: Blocks, layout: KvLayout) -> None:
        self._owner = owner
        self._layout, self._rows = layout, layout.rows
        self._snapshots = Snapshots(owner.pool, layout.num_state_blocks)

    def publish(self, request: Request, record: Record, num_computed: int) -> None:
        """Let other requests find its new full blocks.  A token was sampled behind them, so they
        are finite; a bad block would fail every request that finds it."""
        first, num_full = record.num_published, self._rows.num_full(num_computed)
        if self._owner.caching and num_full > first:
            keys = of_blocks(self.keys(request, record, num_computed), self._rows)[first:num_full]
            table = request.block_table[self._layout.num_state_blocks :]
            for block, key in zip(table[first:], keys, strict=False):
                if block != PASSED:
                    self._owner.pool.publish(block, key)
            record.num_published = num_full
            for block, key in record.unproven:
                self._owner.pool.prove(block, key)
            record.unproven = []
            if record.states:
                for num_tokens, blocks in request.states_kept.items():
                    key = self._key_before(request, record, num_tokens)
                    self._snapshots.publish(key, blocks)
                    self._owner.totals["state_snapshots"] += 1
            self.let_go_of_states(record)

    def note_passed(self, request: Request, record: Record, passed: Mapping[int, int]) -> None:
        """Blocks behind its window go back.  Of a prompt others find them when it has a token, as
        its other blocks."""
        if record.num_published:
            return
        keys = of_blocks(self.keys(request, record, request.num_computed), self._rows)
        for place, block in passed.items():
            if place < len(keys):
                self._owner.pool.note(block, keys[place])
                record.unproven.append((block, keys[place]))

    def _key_before(self, request: Request, record: Record, num_tokens: int) -> Key:
        return self.keys(request, record, num_tokens)[-1]

    def let_go_of_states(self, record: Record) -> None:
        """They are read and written; what is not published is forgotten."""
        states, record.states = record.states, []
        self.let_go(*states)

    def let_go(self, *states: tuple[int, ...]) -> None:
        for blocks in filter(None, states):
            self._owner.return_blocks(blocks)

    def keys(self, request: Request, record: Record, num_tokens: int) -> Sequence[Key]:
        return record.keys.extend(request.tokens, num_tokens) if self._owner.caching else ()
