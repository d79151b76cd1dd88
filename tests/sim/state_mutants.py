"""Bugs of states of sequences, put back (see mutants.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from epd.fsm import request
from epd.fsm.kernel import Event
from epd.roles.kv_producer import KvProducer
from epd.scheduling.kv_order import KvOrder
from epd_lab.sim.engines import SimLanguageEngine
from tests.sim.planting import mutant


@mutant
def a_state_leaves_first() -> Iterator[None]:
    """F63: it is sent as if it were final before the last token, in both ends' order."""
    places = KvOrder.places

    def early(self: KvOrder, start: int, stop: int) -> list[int]:
        order = places(self, 0, self.num_slots)
        last = len(order) - self.num_state_blocks * self.slots_per_block
        return (order[last:] + order[:last])[start:stop]

    with mock.patch.object(KvOrder, "places", early):
        yield


@mutant
def a_state_lands_in_another_order() -> Iterator[None]:
    """F63: its blocks change places on their way."""
    by_place = KvProducer._by_place

    def turned(self: KvProducer, request: Any) -> tuple[int, ...]:
        first = len(request.block_table) - self._layout.num_state_blocks
        table = by_place(self, request)
        return table[:first] + table[first:][::-1]

    with mock.patch.object(KvProducer, "_by_place", turned):
        yield


@mutant
def a_state_is_not_sent() -> Iterator[None]:
    """F63: KV alone arrives; what the blocks of the state held before is taken for it."""
    by_place = KvProducer._by_place

    def without(self: KvProducer, request: Any) -> tuple[int, ...]:
        table = by_place(self, request)
        first = len(table) - self._layout.num_state_blocks
        return table[:first] + table[:1] * self._layout.num_state_blocks

    with mock.patch.object(KvProducer, "_by_place", without):
        yield


@mutant
def a_token_is_computed_again() -> Iterator[None]:
    """F63: what a step has computed counts for less; KV is written anew, but a state has it
    twice."""
    computed = request.ChunkComputed

    def short(num_tokens: int) -> Event:
        return computed(max(1, num_tokens - 1))

    with mock.patch.object(request, "ChunkComputed", short):
        yield


@mutant
def who_begins_reads_the_state_that_was_there() -> Iterator[None]:
    """F63: a sequence that begins, again or for the first time, goes on from a former one's."""
    advance = SimLanguageEngine._advance

    def stale(self: SimLanguageEngine, sequence: Any, prefix: bytes, new: bytes) -> None:
        with mock.patch.object(sequence, "start", sequence.start or 1):
            advance(self, sequence, prefix, new)

    with mock.patch.object(SimLanguageEngine, "_advance", stale):
        yield
