"""Where KV lands at a simulated engine: in its pool, or, as at a GPU, in a few blocks in front of
it, from which it is copied."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from epd_lab.sim.engine.own_memory import SimOwnMemory


class LandedKv(SimOwnMemory):
    """What a `LanguageEngine` has of it."""

    kv_in_place: bool
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
