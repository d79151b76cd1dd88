"""Embedding rows at every rank of a group, from the first one, which received or encoded them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial

import torch

from epd.engine.base import OnLayers, Rows, RowSpan, StepResult, StepSequence
from epd.engine.executor import DeviceExecutor
from epd.engine.language import TorchLanguageEngine
from epd.engine.row_splice import RowSplicer
from epd.engine.sharding import Shard


class SharedRows:
    """Runs a rank's steps; ahead of one with rows all ranks get them by one broadcast.

    It is queued as the step is, so ranks that run the same steps are in it together.
    """

    def __init__(
        self,
        engine: TorchLanguageEngine,
        executor: DeviceExecutor,
        shard: Shard,
        dtype: torch.dtype,
    ) -> None:
        self.engine = engine
        self._executor = executor
        self._shard = shard
        contract = engine.row_contract
        self._splicer = None
        if contract is not None:
            self._splicer = RowSplicer(contract, dtype, executor.streams)

    def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Awaitable[StepResult]:
        """As `LanguageEngine.step`; at a follower the rows of spans are not there."""
        spans = [span for sequence in batch for span in sequence.spans]
        if self._splicer is None or not spans:
            return self.engine.step(batch, on_layers)
        memory = self._splicer.empty(
            sum(span.count for span in spans), self.engine.pool.tensor.device
        )
        shared = self._executor.launch(partial(self._share, self._splicer, memory, spans))
        return _both(shared, self.engine.step(_with_rows(batch, memory), on_layers))

    def _share(self, splicer: RowSplicer, memory: torch.Tensor, spans: Sequence[RowSpan]) -> None:
        if self._shard.rank == 0:
            torch.cat([splicer.rows(span) for span in spans], out=memory)
        self._shard.collectives.broadcast(memory)


async def _both(shared: asyncio.Future[None], step: Awaitable[StepResult]) -> StepResult:
    await shared
    return await step


def _with_rows(batch: Sequence[StepSequence], memory: torch.Tensor) -> list[StepSequence]:
    """Their spans, in order, read `memory`."""
    rows = Rows(memory, len(memory), memory.nbytes)
    given: list[StepSequence] = []
    first = 0
    for sequence in batch:
        spans: list[RowSpan] = []
        for span in sequence.spans:
            spans.append(replace(span, row_start=first, rows=rows))
            first += span.count
        given.append(replace(sequence, spans=spans) if spans else sequence)
    return given
