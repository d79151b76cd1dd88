"""Bugs of rows of several kinds, put back (see `__init__.py`)."""

from __future__ import annotations

from typing import Any

from epd.layouts import RowBlocks
from epd.scheduling.block_pool import BlockPool
from tests.sim.mutants.planting import Planted, mutant, patched


@mutant
def a_kind_is_found_alone() -> Planted:
    """F28: a hit ends where one kind has rows, and another one has not."""
    take = BlockPool.take_prefix

    def alone(self: BlockPool, keys: Any, count: int, spare: int = 0, together: int = 1) -> Any:
        return take(self, keys[: max(0, len(keys) - 1)], count, spare)

    return patched(BlockPool, "take_prefix", alone)


@mutant
def blocks_are_full_too_early() -> Planted:
    """F28: those that are begun count as full: they are found, and sent, half empty."""

    def begun(self: RowBlocks, num_tokens: int) -> int:
        return self.count(num_tokens)

    return patched(RowBlocks, "num_full", begun)


@mutant
def what_is_begun_has_room() -> Planted:
    """F24: tokens have room where only the first kind has a block for them."""

    def begun(self: RowBlocks, num_blocks: int) -> int:
        return -(-num_blocks // len(self.starts)) * self.num_tokens

    return patched(RowBlocks, "room", begun)
