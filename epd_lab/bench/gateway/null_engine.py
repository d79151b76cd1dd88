"""Engines without a model: tokens for nothing, to measure everything around a model.

`step` answers at once with a token per sequence that asks for one, `encode` with zeroed rows.  Used
by `epd bench gateway` alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from epd.engine.base import (
    EncodeFailure,
    MediaLayout,
    OnLayers,
    Patches,
    RopePositions,
    RowMemory,
    Rows,
    StepResult,
    StepSequence,
    nothing,
)
from epd.messages import Clip, KvLayout, PixelBounds, RowContract, TokenLogprobs
from epd_lab.sim.ranks.alike import AlikeRanks, NoAdapters

CONTRACT = RowContract(hidden=16, row_width=16, num_deepstack=0, dtype="float32", row_nbytes=64)
LAYOUT = KvLayout(
    num_layers=1, block_size=16, num_kv_heads=1, head_dim=1, dtype="float32", block_nbytes=128
)
NUM_BLOCKS = 1 << 16
TOKEN_ID = ord("a")


class NullVision(NoAdapters):
    """Rows of zeros, of the right number."""

    contract = CONTRACT
    max_batches = 1
    patch_s = 0.0

    async def preprocess(
        self,
        image: Any,
        grid_thw: tuple[int, int, int],
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        on_begin: Callable[[], None] = nothing,
    ) -> Patches:
        on_begin()
        num_patches = grid_thw[0] * grid_thw[1] * grid_thw[2]
        return Patches(None, grid_thw, num_patches, max(1, num_patches // 4))

    async def encode(self, batch: Sequence[Patches]) -> list[Rows | EncodeFailure]:
        return [
            Rows(bytes(p.num_rows * CONTRACT.row_nbytes), p.num_rows, p.num_rows * 64)
            for p in batch
        ]

    async def to_host(self, rows: Rows) -> Rows:
        return rows

    async def to_device(self, rows: Rows) -> Rows:
        return rows

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        """Zeros are there already."""


class NullLanguage(AlikeRanks):
    """One token per sequence and step."""

    kv_layout = LAYOUT
    num_blocks = num_landing_blocks = NUM_BLOCKS
    kv_in_place = True
    kv_memory: Any = None
    row_contract: RowContract | None = CONTRACT
    max_context = 1 << 20

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        return RopePositions(None)

    def attach_kv(self, buffer: memoryview) -> None:
        """Nothing is ever stored."""

    def attach_rows(self, memory: RowMemory) -> None:
        """Nothing is ever read."""

    def lift_rows(self, rows: object) -> object:
        """They are read where they are."""
        return rows

    async def fetch_kv(
        self, slots: Sequence[int], *, in_place: bool, heads: range | None = None
    ) -> list[memoryview]:
        return [memoryview(bytes(LAYOUT.slot_nbytes)) for _ in slots]

    async def land_kv(
        self,
        memory: memoryview,
        slots: Sequence[int],
        blocks: Sequence[int],
        *,
        by_head: bool = False,
    ) -> None:
        """In place."""

    async def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> StepResult:
        await asyncio.sleep(0)  # a device always lets the loop turn
        token = TokenLogprobs(TOKEN_ID, 0.0)
        return StepResult([None if s.sample is None else token for s in batch])
