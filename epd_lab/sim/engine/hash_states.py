"""States of sequences at simulated ranks: of each head a running hash of all records so far.

A rank has the hashes of its own heads, in blocks at the head of each table.  It goes on from these,
and compares them with the KV that it has.  So the step that reads it notices a hash that was lost,
computed twice, of an earlier text or of another head.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from epd.engine.base import StepSequence, part
from epd.layouts import KvLayout, blocks_of_runs
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.device import SimDevice
from epd_lab.sim.engine.golden import NUM_HEADS, STATE_NBYTES
from epd_lab.sim.engine.own_memory import SimOwnMemory

BLOCK_NBYTES = golden.KV_LAYOUT.block_nbytes
MOST_RANKS = 3  # of a simulated group
_PER_BLOCK = BLOCK_NBYTES // STATE_NBYTES


@functools.cache
def layout_of(rank: int, size: int, *, has_state: bool, window: int | None = None) -> KvLayout:
    """A rank's of `size`: each has the one head of KV, and its part of a state's heads.  There are
    as many blocks as come from any group (as in `ModelAdapter.kv_layout`)."""
    if window is not None:
        return golden.layout_with(window) if window else golden.KINDS_LAYOUT
    own = _shared(rank, size, has_state=has_state)
    if not has_state or size == 1:
        return own
    others = [_shared(0, other, has_state=True) for other in range(1, MOST_RANKS + 1)]
    needed = [_shared(other, size, has_state=True).num_state_blocks for other in range(size)]
    came = [blocks_of_runs(other, own) for other in others if other.state_shares]
    return msgspec.structs.replace(own, most_state_blocks=max(*came, *needed))


def _shared(rank: int, size: int, *, has_state: bool) -> KvLayout:
    whole = golden.STATE_LAYOUT if has_state else golden.KV_LAYOUT
    if size == 1:
        return whole
    layout = msgspec.structs.replace(whole, ranks=((0, 1),) * size)
    if not has_state:
        return layout
    heads = [part(NUM_HEADS, index, size) for index in range(size)]
    (tensor,) = whole.tensors
    return msgspec.structs.replace(
        layout,
        tensors=(msgspec.structs.replace(tensor, num_pieces=len(heads[rank])),),
        first_state_head=heads[rank].start,
        state_ranks=tuple((own.start, len(own)) for own in heads),
        all_tensors=whole.tensors,
    )


class HashStates(SimOwnMemory):
    """What a `LanguageEngine` has of them."""

    kv_layout: KvLayout
    on_call: Callable[[str, Any], None]
    _copy_s: float
    _kv: memoryview

    def __init__(self, device: SimDevice, heads: range) -> None:
        """`heads`: the own ones, by their place in the model."""
        super().__init__(device)
        self._state_heads = heads

    def _advance(self, sequence: StepSequence, prefix: bytes, new: bytes) -> None:
        """Its state, by the tokens of the chunk that hold: from what is in its blocks, right or
        wrong."""
        for place, head in enumerate(self._state_heads):
            stored = self._hash_at(sequence.block_table, place)
            before = bytes(stored) if sequence.start else b""
            if before and before != golden.state(b"", prefix, head):
                block = sequence.block_table[place // _PER_BLOCK]
                text = f"{sequence.request_id}: the state of another text, or of another head"
                self.found(f"{text} than {head}, in block {block}")
            stored[:] = golden.state(before, new, head)

    async def fetch_state(
        self, blocks: Sequence[int], heads: range, *, in_place: bool
    ) -> list[memoryview]:
        """A copy, a little later."""
        breaks = self.device.process.breaks
        if breaks.meet("fetch_kv"):
            raise breaks.error("fetch_kv")
        await asyncio.sleep(self._copy_s)
        return [memoryview(b"".join(bytes(self._hash_at(blocks, place)) for place in heads))]

    async def land_state(
        self,
        memory: memoryview,
        slots: Sequence[int],
        blocks: Sequence[int],
        pieces: Sequence[tuple[range, int]],
    ) -> None:
        await asyncio.sleep(self._copy_s)
        self.on_call("land_state", blocks)
        self.check_leased("a state that was taken in", blocks)
        landed = b"".join(memory[s * BLOCK_NBYTES : (s + 1) * BLOCK_NBYTES] for s in slots)
        for heads, start in pieces:
            for at, place in enumerate(heads):
                first = start + at * STATE_NBYTES
                self._hash_at(blocks, place)[:] = landed[first : first + STATE_NBYTES]

    def _hash_at(self, blocks: Sequence[int], place: int) -> memoryview:
        """Of one of the own heads, in memory."""
        at = blocks[place // _PER_BLOCK] * BLOCK_NBYTES + place % _PER_BLOCK * STATE_NBYTES
        return self._kv[at : at + STATE_NBYTES]
