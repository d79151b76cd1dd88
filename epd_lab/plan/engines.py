"""Planned engines: the ports of `epd.engine.base` by a cost file, without a model.

Bytes are not computed either: memory is `SCALE` times smaller than it would be, and so is the rate
at which it moves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from epd.config import EngineConfig
from epd.engine.base import (
    EncodeFailure,
    KvMemory,
    MediaLayout,
    OnLayers,
    Outcome,
    Patches,
    RopePositions,
    RowMemory,
    Rows,
    StepResult,
    StepSequence,
    nothing,
)
from epd.engine.device.executor import Weight
from epd.messages import Clip, KvLayout, PixelBounds, RowContract, TokenLogprobs
from epd.scheduling.slice_cost import SliceCost
from epd_lab.plan.costs import Costs
from epd_lab.plan.device import CallPart, PlannedDevice, Threads
from epd_lab.sim.ranks.alike import AlikeRanks, NoAdapters

SCALE = 1024
MAX_CONTEXT = 262_144
NUM_LAYERS = 4  # one for each group of layers that is sent by itself
TOKEN = TokenLogprobs(1, 0.0)
COPY_HOST_S = 0.0002  # the launch of a gather or a scatter


def row_contract(costs: Costs) -> RowContract:
    nbytes = max(1, round(costs.model.row_nbytes / SCALE))
    return RowContract(
        hidden=nbytes, row_width=nbytes, num_deepstack=0, dtype="", row_nbytes=nbytes
    )


def kv_layout(costs: Costs, block_size: int) -> KvLayout:
    slot_nbytes = max(1, round(costs.model.kv_token_nbytes * block_size / SCALE / NUM_LAYERS))
    return KvLayout(
        num_layers=NUM_LAYERS,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=1,
        dtype="",
        block_nbytes=slot_nbytes * NUM_LAYERS,
    )


class PlannedVision(NoAdapters):
    """The `VisionEngine` port."""

    def __init__(
        self,
        costs: Costs,
        device: PlannedDevice,
        threads: Threads,
        config: EngineConfig,
        max_batch_patches: int,
    ) -> None:
        max_quantum_s = config.max_quantum_ms / 1e3
        self.contract = row_contract(costs)
        self.max_batches = 2 if max_quantum_s else 1
        self._costs = costs
        self._device = device
        self._threads = threads
        self._quantum_s = max_quantum_s
        most = min(max_batch_patches, costs.tower.patches_ms[-1][0])
        layers = costs.model.tower_layers
        self._cost = SliceCost(layers, max_quantum_s, lambda: device.loop.now_s)
        self._cost.observe(most, most, layers, costs.tower_s([most]) / costs.sustained)  # at start
        device.let_in = partial(self._cost.between.observe, 1)
        self._max_captured = costs.tower.launch.max_captured if config.cuda_graphs else 0

    @property
    def patch_s(self) -> float:
        return self._cost.patch_s

    async def preprocess(
        self,
        image: bytes,
        grid_thw: tuple[int, int, int],
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        on_begin: Callable[[], None] = nothing,
    ) -> Patches:
        on_begin()
        num_patches = math.prod(grid_thw)
        pixels = num_patches * self._costs.model.patch_size**2
        await self._threads.work(pixels * self._costs.host.pixel_ns / 1e9)
        return Patches(None, grid_thw, num_patches, num_patches // self._costs.model.merge_size**2)

    async def encode(self, batch: Sequence[Patches]) -> list[Rows | EncodeFailure]:
        weight = Weight.LONG if self._quantum_s else Weight.STEP
        images = [p.num_patches for p in batch]
        pieces = self._pieces(images)
        num_layers = self._costs.model.tower_layers / len(pieces)

        def passed(begin_s: float, end_s: float) -> None:
            self._cost.observe(sum(images), max(images), num_layers, end_s - begin_s)

        await self._device.launch(pieces, weight, passed)
        return [self._rows(patches.num_rows) for patches in batch]

    def _pieces(self, images: list[int]) -> list[CallPart]:
        """As `Slices.run`."""
        num_patches, launch = sum(images), self._costs.tower.launch
        captured = num_patches <= self._max_captured
        count = self._cost.num_slices(num_patches, max(images))
        device_s, host_s = self._costs.tower_s(images), launch.host_s(captured=captured)
        gap_s = self._costs.gap_ms / 1e3
        return [CallPart(host_s / count, device_s / count, captured, gap_s)] * count

    def _rows(self, num_rows: int) -> Rows:
        nbytes = num_rows * self.contract.row_nbytes
        return Rows(memoryview(bytes(nbytes)), num_rows, nbytes)

    async def to_host(self, rows: Rows) -> Rows:
        return rows

    async def to_device(self, rows: Rows) -> Rows:
        return rows

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        """It takes no time here."""


class PlannedLanguage(AlikeRanks):
    """The `LanguageEngine` port."""

    max_context = MAX_CONTEXT
    kv_memory: KvMemory | None = None

    def __init__(
        self, costs: Costs, device: PlannedDevice, config: EngineConfig, *, kv_in_place: bool
    ) -> None:
        block_size, self.kv_in_place = config.block_size, kv_in_place
        self.row_contract: RowContract | None = row_contract(costs)
        self.kv_layout = kv_layout(costs, block_size)
        self.num_blocks = max(1, costs.model.kv_tokens // block_size)
        landing = config.kv_landing_nbytes // SCALE // self.kv_layout.block_nbytes
        lands = self.num_blocks if kv_in_place else max(1, min(self.num_blocks, landing))
        self.num_landing_blocks = lands
        self._costs = costs
        self._device = device
        self._captures = config.cuda_graphs
        most = min(costs.step.launch.max_captured, config.max_captured_tokens)
        self._max_captured = {True: min(most, costs.step.max_mixed), False: most}

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        return RopePositions(None)

    def attach_kv(self, buffer: memoryview) -> None:
        """Nothing is computed."""

    def attach_rows(self, memory: RowMemory) -> None:
        """Nothing is computed."""

    def lift_rows(self, rows: object) -> object:
        """They are read where they are."""
        return rows

    async def fetch_kv(
        self, slots: Sequence[int], *, in_place: bool, heads: range | None = None
    ) -> list[memoryview]:
        """On a stream of its own: it waits for nothing that was launched before."""
        await asyncio.sleep(COPY_HOST_S)
        return [memoryview(bytes(len(slots) * self.kv_layout.slot_nbytes))]

    async def land_kv(
        self,
        memory: memoryview,
        slots: Sequence[int],
        blocks: Sequence[int],
        *,
        by_head: bool = False,
    ) -> None:
        """Likewise."""
        await asyncio.sleep(COPY_HOST_S)

    def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Awaitable[StepResult]:
        num_tokens = num_context = num_decodes = 0
        num_pairs = 0.0
        for sequence in batch:
            count = len(sequence.token_ids)
            num_tokens += count
            if count == 1:
                num_decodes += 1
                num_context += sequence.start
            else:
                num_pairs += count * (sequence.start + count / 2)
        mixed = 0 < num_decodes < len(batch)
        device_s = self._costs.step_s(num_tokens, num_context, num_pairs, mixed=mixed)
        launch = self._costs.step.launch
        fits = num_tokens <= self._max_captured[mixed] or not num_pairs
        captured = self._captures and fits
        gap_s = self._costs.gap_ms / 1e3 * (num_pairs > 0)
        piece = CallPart(launch.host_s(captured=captured), device_s, captured, gap_s)
        begun = partial(self._tell_layers, on_layers)
        outcomes: list[Outcome] = [None if s.sample is None else TOKEN for s in batch]
        tail_s = len(batch) * self._costs.host.sequence_us / 1e6
        return self._device.launch(
            [piece], begun=begun, result=StepResult(outcomes, device_s), tail_s=tail_s
        )

    def _tell_layers(self, on_layers: OnLayers | None, begin_s: float, end_s: float) -> None:
        if on_layers is None:
            return
        for layer in range(1, NUM_LAYERS):
            at_s = begin_s + (end_s - begin_s) * layer / NUM_LAYERS
            self._device.loop.call_at(at_s, on_layers, layer)
