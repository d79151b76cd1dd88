"""Where KV lands at a simulated engine: in its pool, or in a few blocks in front of it.

The latter as at a GPU: it is copied from there, and that of devices near by lands in the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from epd_lab.sim.engine.own_memory import SimOwnMemory


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A device's, which others near by can write to."""

    whole: memoryview


class LandedKv(SimOwnMemory):
    """What a `LanguageEngine` has of it."""

    kv_in_place: bool
    kv_memory: Any
    num_landing_blocks: int
    kv_views: Callable[[Sequence[int]], list[memoryview]]
    _copy_s: float
    _kv: memoryview

    def attach_kv(self, buffer: memoryview) -> None:
        if self.kv_in_place:
            self._kv = buffer

    async def land_kv(
        self,
        memory: memoryview,
        slots: Sequence[int],
        blocks: Sequence[int],
        *,
        by_head: bool = False,
    ) -> None:
        """There is one head."""
        if self.kv_in_place:
            return
        await asyncio.sleep(self._copy_s)
        self.check_leased("KV that was taken in", blocks)
        targets = self.kv_views(blocks)
        nbytes = len(memory) // self.num_landing_blocks
        for slot, target in zip(slots, targets, strict=True):
            target[:] = memory[slot * nbytes : (slot + 1) * nbytes]
