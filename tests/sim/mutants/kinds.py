"""Bugs of rows of several kinds, put back (see `__init__.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from epd.fsm import request
from epd.layouts import PASSED, RowBlocks
from epd.roles.prefill import kv_producer
from epd.roles.prefill.kv_producer import KvProducer
from epd.roles.steps import requests
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.kv_order import moved
from epd.scheduling.prefix_keys import of_blocks
from epd.scheduling.windows import Windows
from tests.sim.mutants.planting import Planted, mutant, patched, row, several


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


@mutant
def a_block_too_many_is_passed() -> Planted:
    """F28: a block goes back whose last token the next step still sees."""
    behind = RowBlocks.behind

    def further(self: RowBlocks, num_tokens: int, first: int = 0) -> Any:
        return behind(self, num_tokens + 1, first)

    return patched(RowBlocks, "behind", further)


@mutant
def no_block_is_passed() -> Planted:
    """F24: a prompt that has used up its blocks waits for ones that nobody gives back."""
    return patched(Windows, "passing", lambda self, entry, decodes: {})


@mutant
def what_is_passed_goes_back_twice() -> Planted:
    """F6: blocks behind a window are returned when they are passed, and at the end again."""

    def keep_passed(machine: request.Request, event: request.Slid) -> None:
        machine.num_passed += len(event.passed)

    table, do = request.Request.table, (request.Do.RETURN_PASSED,)
    states = (request.S.RUNNING, request.S.DECODING)
    return several(*(row(table, state, request.Slid, None, do, keep_passed) for state in states))


@mutant
def a_hit_without_its_window() -> Planted:
    """F28: a beginning is found by the blocks that all tokens see, whatever its window has."""

    def whole(self: Windows, keys: Any) -> list[int]:
        size = len(self._rows.starts)
        each = of_blocks(keys, self._rows)
        known = [next(iter(self._pool.find((key,))), PASSED) for key in each]
        windowed = {one.column for one in self._rows.windowed}
        gaps = (at for at, b in enumerate(known) if b == PASSED and at % size not in windowed)
        return known[: next(gaps, len(known)) // size * size]

    return patched(Windows, "_longest", whole)


@mutant
def a_block_too_few_moves() -> Planted:
    """F28: both ends leave out the first block of the window that decoding sees."""

    def fewer(rows: RowBlocks, num_tokens: int) -> Any:
        places, columns = moved(rows, num_tokens), {one.column for one in rows.windowed}
        first = next((at for at in places if at % len(rows.starts) in columns), None)
        return [at for at in places if at != first]

    return patched(requests, "moved", fewer)


@mutant
def a_window_goes_back_while_it_moves() -> Planted:
    """F6: with the first token a prompt's blocks with a window go back, though decode has not
    got them yet."""
    hand_over, release = KvProducer.hand_over_kv, KvProducer.release_source

    def windowed(self: KvProducer, table: Any) -> list[int]:
        rows = self._layout.rows
        columns = {one.column for one in rows.windowed}
        return [b for at, b in enumerate(table) if at % len(rows.starts) in columns and b != PASSED]

    def early(self: KvProducer, machine: Any, event: Any) -> None:
        hand_over(self, machine, event)
        self._requests.return_blocks(tuple(windowed(self, machine.block_table)))

    def others(self: KvProducer, outgoing: Any) -> None:
        if outgoing.kv is not None:
            gone = {*windowed(self, outgoing.kv.blocks)}
            blocks = tuple(PASSED if block in gone else block for block in outgoing.kv.blocks)
            outgoing.kv = replace(outgoing.kv, blocks=blocks)
        release(self, outgoing)

    return several(
        patched(KvProducer, "hand_over_kv", early), patched(KvProducer, "release_source", others)
    )


@mutant
def what_is_held_counts_first() -> Planted:
    """F28: the producer takes what decode has of a window for the first blocks of the prompt."""
    return patched(kv_producer, "held_first", lambda places, held: places)


@mutant
def what_was_taken_is_found() -> Planted:
    """F28: a block that was passed is found by what it held, whoever has written it since."""

    def prove(self: BlockPool, block: int, key: Any) -> None:
        self._by_key.setdefault(key, block)

    return patched(BlockPool, "prove", prove)
