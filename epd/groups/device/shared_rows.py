"""Embedding rows at every rank of a group, ahead of the step that reads them.

Theory of operation
-------------------
Rows are in one of three places.  The first rank has them, which made them itself: then all get them
by a broadcast.  Or an encoder has written them into slots of all ranks: all rows to each, which
reads its own.  Or to each its part: then one gather of all images of the step joins them.

Of an image only those rows are moved that the step's chunks read, so one that is found in the
prefix cache costs nothing.  Which rows these are, and who has them, follows from the spans, which
are in the command.  So all ranks are in the same calls, of sizes that they have; where ranks have
unequally many of a step's rows, the shorter parts are padded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from epd.engine.base import OnLayers, Rows, RowSpan, SlotRows, StepResult, StepSequence
from epd.engine.device.executor import DeviceExecutor
from epd.engine.language.engine import TorchLanguageEngine
from epd.engine.language.row_splice import RowSplicer
from epd.engine.sharding import Shard


class RowsPiece(NamedTuple):
    """Rows of an image that one rank has and a span needs."""

    rows: SlotRows
    wanted: range  # of the image
    at: int  # where they go among the rows of all spans


def pieces(spans: Sequence[RowSpan], num_ranks: int) -> list[list[RowsPiece]]:
    """Of each rank, in order; `spans` are of images that are shared out."""
    found: list[list[RowsPiece]] = [[] for _ in range(num_ranks)]
    first = 0
    for span in spans:
        for rank in range(num_ranks):
            held = span.rows.held(rank, num_ranks)
            low = max(held.start, span.row_start)
            high = min(held.stop, span.row_start + span.count)
            if low < high:
                at = first + low - span.row_start
                found[rank].append(RowsPiece(span.rows, range(low, high), at))
        first += span.count
    return found


class SharedRows:
    """Runs a rank's steps; what it shares is queued as the step is, so ranks that run the same
    steps are in it together."""

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
        self._row_nbytes = 0
        self._splicer = None
        if (contract := engine.row_contract) is not None:
            self._row_nbytes = contract.row_nbytes
            self._splicer = RowSplicer(contract, dtype, executor.streams)

    def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Awaitable[StepResult]:
        """As `LanguageEngine.step`; rows that the first rank has are not there at the others."""
        kinds: list[list[RowSpan]] = [[], [], []]
        for sequence in batch:
            for span in sequence.spans:
                kinds[_kind(span)].append(span)
        if self._splicer is None or not any(kinds):
            return self.engine.step(batch, on_layers)
        device = self.engine.pool.memory.device
        memories = [self._splicer.empty(_count(spans), device) for spans in kinds]
        shared = self._executor.launch(partial(self._share, self._splicer, memories, kinds))
        return _both(shared, self.engine.step(_with_rows(batch, memories), on_layers))

    def _share(
        self,
        splicer: RowSplicer,
        memories: Sequence[torch.Tensor],
        kinds: Sequence[Sequence[RowSpan]],
    ) -> None:
        for spans, memory, fill in zip(
            kinds, memories, (self._broadcast, self._read, self._gather), strict=True
        ):
            if spans:
                fill(splicer, spans, memory)

    def _broadcast(
        self, splicer: RowSplicer, spans: Sequence[RowSpan], memory: torch.Tensor
    ) -> None:
        if self._shard.rank == 0:
            torch.cat([splicer.rows(span) for span in spans], out=memory)
        self._shard.collectives.broadcast(memory)

    def _read(self, splicer: RowSplicer, spans: Sequence[RowSpan], memory: torch.Tensor) -> None:
        rows = [
            self._own(splicer, span.rows, range(span.row_start, span.row_start + span.count))
            for span in spans
        ]
        torch.cat(rows, out=memory)

    def _gather(self, splicer: RowSplicer, spans: Sequence[RowSpan], memory: torch.Tensor) -> None:
        each = pieces(spans, self._shard.size)
        most = max(sum(len(piece.wanted) for piece in of_rank) for of_rank in each)
        sent = memory.new_zeros(most, memory.shape[1])
        at = 0
        for piece in each[self._shard.rank]:
            sent[at : at + len(piece.wanted)] = self._own(splicer, piece.rows, piece.wanted)
            at += len(piece.wanted)
        gathered = self._shard.collectives.all_gather(sent, 0)
        for rank, of_rank in enumerate(each):
            at = rank * most
            for piece in of_rank:
                count = len(piece.wanted)
                memory[piece.at : piece.at + count] = gathered[at : at + count]
                at += count

    def _own(self, splicer: RowSplicer, rows: SlotRows, wanted: range) -> torch.Tensor:
        """Rows of an image that this rank has."""
        held = rows.held(self._shard.rank, self._shard.size)
        views = self.engine.row_memory.views(rows, len(held) * self._row_nbytes)
        return splicer.rows(RowSpan(0, wanted.start - held.start, len(wanted), views))


def _kind(span: RowSpan) -> int:
    """Which of the memories it reads: of what the first rank has, of what all have, of parts."""
    return 1 + span.rows.is_sharded if isinstance(span.rows, SlotRows) else 0


def _count(spans: Iterable[RowSpan]) -> int:
    return sum(span.count for span in spans)


async def _both(shared: asyncio.Future[None], step: Awaitable[StepResult]) -> StepResult:
    await shared
    return await step


def _with_rows(
    batch: Sequence[StepSequence], memories: Sequence[torch.Tensor]
) -> list[StepSequence]:
    """Their spans, in order, read these."""
    rows = [Rows(memory, len(memory), memory.nbytes) for memory in memories]
    first = [0] * len(memories)
    given: list[StepSequence] = []
    for sequence in batch:
        spans: list[RowSpan] = []
        for span in sequence.spans:
            kind = _kind(span)
            spans.append(replace(span, row_start=first[kind], rows=rows[kind]))
            first[kind] += span.count
        given.append(replace(sequence, spans=spans) if spans else sequence)
    return given
