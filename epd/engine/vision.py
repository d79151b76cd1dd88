"""The vision tower of one device: batches of patches to embedding rows.

The caller decides what goes into a batch.  When a batch raises, its items are run again one by one,
so that one bad picture fails alone (fault F13); rows that are not finite fail their picture too,
since they would poison the answer of whoever reads them.  Rows of an item are own memory: a cache
that evicts one picture gets its bytes back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from epd.engine.base import EncodeFailure, EngineStats, Patches, Rows
from epd.engine.executor import DeviceExecutor
from epd.engine.models.base import ModelAdapter
from epd.engine.preprocess import MAX_PIXELS, Preprocessor
from epd.engine.row_memory import copied_out, on_device, on_host
from epd.messages import RowContract


class TorchVisionEngine:
    """`VisionEngine` over a transformers vision tower."""

    contract: RowContract

    def __init__(
        self,
        adapter: ModelAdapter,
        model: Any,
        executor: DeviceExecutor,
        dtype: torch.dtype = torch.float32,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.model = model
        self.contract = adapter.row_contract(dtype)
        self.stats = EngineStats()
        self._adapter = adapter
        self._dtype = dtype
        self._executor = executor
        self._device = next(model.parameters()).device
        self._preprocess = Preprocessor(adapter, max_pixels)

    async def preprocess(self, image: Any, grid_thw: tuple[int, int, int]) -> Patches:
        """Compressed bytes to patches, on the pool.  Raises MediaError."""
        return await self._executor.compute(self._preprocess, image, grid_thw)

    async def encode(self, batch: Sequence[Patches]) -> list[Rows | EncodeFailure]:
        """Rows or a failure per item, in order; the items share one run of the tower."""
        return await self._executor.launch(self._encode, list(batch))

    async def to_host(self, rows: Rows) -> Rows:
        """See `VisionEngine.to_host`; behind the work that the device has queued."""
        return rows if rows.on_host else await self._executor.launch(on_host, rows)

    async def to_device(self, rows: Rows) -> Rows:
        """See `VisionEngine.to_device`."""
        if rows.on_host and self._device.type == "cpu":
            return rows
        width = self.contract.row_width
        return await self._executor.launch(on_device, rows, self._device, self._dtype, width)

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        """See `VisionEngine.copy_out`."""
        run = self._executor.compute if rows.on_host else self._executor.launch
        await run(copied_out, rows, views)

    def warm_up(self) -> None:
        """One small picture through both halves: first touch of weights and code."""
        from PIL import Image

        patches = self._preprocess.patches(Image.new("RGB", self._adapter.smallest_image()))
        self._run([patches])

    def _encode(self, batch: list[Patches]) -> list[Rows | EncodeFailure]:
        if not batch:
            return []
        started = time.perf_counter()
        try:
            results: list[Rows | EncodeFailure] = self._run(batch)
        except Exception as error:  # any item may be to blame
            if len(batch) == 1:
                results = [_failure(error)]
            else:
                results = [self._encode_alone(patches) for patches in batch]
        self.stats.images += len(batch)
        self.stats.steps += 1
        self.stats.busy_s += time.perf_counter() - started
        return results

    def _encode_alone(self, patches: Patches) -> Rows | EncodeFailure:
        try:
            return self._run([patches])[0]
        except Exception as error:  # this item is to blame
            return _failure(error)

    def _run(self, batch: list[Patches]) -> list[Rows | EncodeFailure]:
        with torch.inference_mode():
            rows = self._adapter.encode(self.model, batch, self._dtype)
            expected = sum(patches.num_rows for patches in batch)
            if rows.shape != (expected, self.contract.row_width):
                raise ValueError(
                    f"the tower gave {tuple(rows.shape)} where "
                    f"{(expected, self.contract.row_width)} was expected"
                )
            return [self._own(part) for part in rows.split([patches.num_rows for patches in batch])]

    def _own(self, part: torch.Tensor) -> Rows | EncodeFailure:
        if not bool(torch.isfinite(part).all()):
            return EncodeFailure("the vision tower gave values that are not finite")
        own = part.contiguous().to(dtype=self._dtype, copy=True)
        return Rows(own, own.shape[0], own.numel() * own.element_size())


def _failure(error: Exception) -> EncodeFailure:
    return EncodeFailure(f"the vision tower failed: {type(error).__name__}: {error}")
