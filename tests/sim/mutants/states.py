"""Bugs of states of sequences, put back (see `__init__.py`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from msgspec import structs

from epd.fsm import request
from epd.fsm.request.context import Context
from epd.groups.asks import WriteState
from epd.groups.data import RankKv
from epd.groups.kv import KvRanks
from epd.roles.prefill.kv_producer import KvProducer
from epd.roles.steps import step
from epd.roles.steps.contents import Contents
from epd.roles.steps.requests import Requests
from epd.scheduling.kv_order import KvOrder
from epd.scheduling.snapshots import Snapshots, TakenBlocks
from epd_lab.sim.engine.engines import SimLanguageEngine
from epd_lab.sim.engine.golden import BLOCK_SIZE
from tests.sim.mutants.planting import Planted, mutant, patched, row, several


@mutant
def a_state_leaves_first() -> Planted:
    """F63: it is sent as if it were final before the last token, in both ends' order."""
    places = KvOrder.places

    def early(self: KvOrder, start: int, stop: int) -> list[int]:
        order = places(self, 0, self.num_slots)
        last = len(order) - self.num_state_blocks * self.slots_per_block
        return (order[last:] + order[:last])[start:stop]

    return patched(KvOrder, "places", early)


@mutant
def a_state_lands_in_another_order() -> Planted:
    """F63: its blocks change places on their way."""
    by_place = KvProducer._by_place

    def turned(self: KvProducer, request: Any) -> tuple[int, ...]:
        first = len(request.block_table) - self._layout.num_state_blocks
        table = by_place(self, request)
        return table[:first] + table[first:][::-1]

    return patched(KvProducer, "_by_place", turned)


@mutant
def a_state_is_not_sent() -> Planted:
    """F63: KV alone arrives; what the blocks of the state held before is taken for it."""
    by_place = KvProducer._by_place

    def without(self: KvProducer, request: Any) -> tuple[int, ...]:
        table = by_place(self, request)
        first = len(table) - self._layout.num_state_blocks
        return table[:first] + table[:1] * self._layout.num_state_blocks

    return patched(KvProducer, "_by_place", without)


@mutant
def a_token_is_computed_again() -> Planted:
    """F63: what a step has computed counts for less; KV is written anew, but a state has it
    twice."""

    def short(machine: request.Request, event: request.ChunkComputed) -> None:
        before = machine.num_computed
        request.count_chunk(machine, event)
        machine.num_computed = max(before + 1, machine.num_computed - 1)

    table, state, do = request.Request.table, request.S.RUNNING, (request.Do.PUSH_KV,)
    return row(table, state, request.ChunkComputed, None, do, short)


@mutant
def who_begins_reads_the_state_that_was_there() -> Planted:
    """F63: a sequence that begins, again or for the first time, goes on from a former one's."""
    advance = SimLanguageEngine._advance

    def stale(self: SimLanguageEngine, sequence: Any, prefix: bytes, new: bytes) -> None:
        with patched(sequence, "start", sequence.start or 1):
            advance(self, sequence, prefix, new)

    return patched(SimLanguageEngine, "_advance", stale)


@mutant
def a_state_is_kept_of_a_longer_beginning() -> Planted:
    """F63: it is kept under the key of the block before."""
    key_before = Contents._key_before

    def earlier(self: Contents, request: Any, record: Any, num_tokens: int) -> bytes:
        return key_before(self, request, record, max(BLOCK_SIZE, num_tokens - BLOCK_SIZE))

    return patched(Contents, "_key_before", earlier)


@mutant
def a_state_is_found_before_it_is_there() -> Planted:
    """F63: it can be found as soon as it has blocks."""
    take = Snapshots.take

    def early(self: Snapshots, keys: Any, count: int, spare: int) -> TakenBlocks | None:
        if (taken := take(self, keys, count, spare)) is not None:
            for place, blocks in taken.kept.items():
                self.publish(keys[place - 1], blocks)
        return taken

    return patched(Snapshots, "take", early)


@mutant
def a_state_that_is_read_may_be_given_away() -> Planted:
    """F63: nobody holds it for the step that copies it."""
    take, let_go = Snapshots.take, Contents.let_go_of_states

    def unheld(self: Snapshots, keys: Any, count: int, spare: int) -> TakenBlocks | None:
        if (taken := take(self, keys, count, spare)) is not None:
            self._pool.give_back(taken.found)
        return taken

    def without(self: Contents, record: Any) -> None:
        record.states[:1] = []
        let_go(self, record)

    return several(
        patched(Snapshots, "take", unheld), patched(Contents, "let_go_of_states", without)
    )


@mutant
def a_state_that_is_found_is_not_read() -> Planted:
    """F63: it goes on from whatever its own blocks held before."""
    copies = step._copies

    def none(request: Any, start: int) -> list[tuple[int, int]]:
        return [] if start == request.num_found else copies(request, start)

    return patched(step, "_copies", none)


@mutant
def a_chunk_passes_where_a_state_is_kept() -> Planted:
    """F63: no chunk begins there, and what the blocks held before is taken for the state."""
    num_left = Context.num_left.fget  # type: ignore[attr-defined]

    def all_of_it(self: Context) -> int:
        kept, self.states_kept = self.states_kept, {}
        left: int = num_left(self)
        self.states_kept = kept
        return left

    return patched(Context, "num_left", property(all_of_it))


@mutant
def who_is_called_off_keeps_the_copies() -> Planted:
    """F24: blocks of states that were to be kept go with nobody."""

    def release(self: Requests, request: Any, event: Any) -> None:
        self.return_blocks(request.block_table)

    return patched(Requests, "release_blocks", release)


@mutant
def parts_of_a_state_are_of_the_first_heads() -> Planted:
    """F63: of as many as a rank of decode wants, but always from the first that prefill's has."""

    def first(rank: int, ask: WriteState) -> tuple[int, WriteState]:
        start, stop = ask.heads
        return rank, structs.replace(ask, heads=(0, stop - start))

    return _state_writes(lambda asks: [first(*one) for one in asks])


@mutant
def a_part_of_a_state_is_left_out() -> Planted:
    """F63: the last of what ranks write of it is not written."""
    return _state_writes(lambda asks: asks[:-1])


def _state_writes(
    change: Callable[[list[tuple[int, WriteState]]], list[tuple[int, WriteState]]],
) -> AbstractContextManager[Any]:
    """Other ones."""
    writes = KvRanks._state_writes

    def changed(*what: Any) -> list[tuple[int, WriteState]]:
        return change(list(writes(*what)))

    return patched(KvRanks, "_state_writes", changed)


@mutant
def parts_of_a_state_change_places() -> Planted:
    """F63: what came from one rank is taken for what came from another."""
    pieces = RankKv._pieces

    def turned(*what: Any) -> list[Any]:
        found = pieces(*what)
        runs = [one.run for one in found][::-1]
        return [one._replace(run=run) for one, run in zip(found, runs, strict=True)]

    return patched(RankKv, "_pieces", turned)


@mutant
def a_part_of_a_state_is_not_taken_in() -> Planted:
    """F63: it lands, it is summed, and what the block held before stays."""
    land = SimLanguageEngine.land_state

    async def less(self: SimLanguageEngine, memory: Any, slots: Any, blocks: Any, at: Any) -> None:
        await land(self, memory, slots, blocks, at[:-1])

    return patched(SimLanguageEngine, "land_state", less)
