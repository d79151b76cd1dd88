"""Captured steps: one launch instead of a thousand.

Theory of operation
-------------------
A step with few tokens takes less time on the device than launching its kernels
takes on the host.  So steps are captured once for some shapes; one is then a copy of its integers
and a replay.  A batch is packed into the next larger shape (`flat_batch`): what pads it reads
nothing and writes nothing (fault F25).

*Decodes alone* are captured whole, embedding to logits (`DecodeGraphs`).  Of *steps with prompts*
the layers are captured (`PromptGraphs`): embeddings and rows of images before them, and sampling
behind, differ from step to step and are few launches.  Deepstack rows lie in memory that the graphs
add at every token; it is zero where a token has none.  Hidden states come out where the embeddings
went in, or each shape would keep memory for its own.  The layers are recorded in parts, one for
each group whose KV leaves by itself; between two of them the hand-over of the first can begin.

Each graph reads one buffer of integers, whose fields lie by its shape.  All share one memory pool:
the stream serialises replays, so one's temporaries may be another's.  Logits, too, come out in one
place for all sizes.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import torch

from epd.engine.language.flat_batch import (
    BatchShape,
    FlatBatch,
    FlatSequence,
    header_size,
    pack,
    view,
)
from epd.engine.language.row_splice import AddedRows
from epd.layouts import RowKind

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
FINE_STEP, FINE_TOKENS = 64, 1024  # of the sizes of steps with prompts: what pads is computed, too
COARSE_STEP, MIXED_TOKENS = 128, 2048  # more with decodes are not captured
LARGE_STEP = 256
DECODES = (8, 32, 64)  # beside prompts, or as many as may run: programs of those that pad only end
MAX_CHUNKS = 16  # prompts in a captured step


# Runs a call; gives what runs it again, and its result, which every run writes anew.
Recorder = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


class PartsRecorder(Protocol):
    """A recorder of calls that are run again in parts, between which something else may run."""

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """As a `Recorder`."""

    def parts(
        self, call: Callable[[], torch.Tensor]
    ) -> tuple[list[Callable[[], None]], torch.Tensor]:
        """What runs the call again, in order, and its result."""

    def cut(self) -> None:
        """From within the call: here a part ends and the next begins."""


class CudaRecorder:
    """Captures into CUDA graphs that share their memory; the largest must come first."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []  # of the call that is being captured

    def __call__(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        (replay,), result = self.parts(call)
        return replay, result

    def parts(
        self, call: Callable[[], torch.Tensor]
    ) -> tuple[list[Callable[[], None]], torch.Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()  # compiles what is compiled and sizes the libraries' workspaces
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            with _without_collections():
                self._begin()
                try:
                    result = call()
                finally:
                    graphs, self._graphs = self._graphs, []
                    graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return [graph.replay for graph in graphs], result

    def cut(self) -> None:
        if self._graphs:  # else it is the call before the capture
            self._graphs[-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Threads that look after collectives ask the device meanwhile, which is no part of this.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        self._graphs.append(graph)


@contextmanager
def _without_collections() -> Iterator[None]:
    """What a collection frees while a stream is captured may fail the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class OnePlace:
    """Where graphs of all sizes give their results, which are kept, so that no other graph may use
    their memory.  The largest must come first."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)

    def __call__(self, result: torch.Tensor) -> torch.Tensor:
        if not len(self.memory):
            self.memory = torch.empty_like(result)
        return self.memory[: len(result)].copy_(result)


class _Integers:
    """The buffer on the device that all graphs of a kind read their batch from."""

    def __init__(
        self,
        header: int,
        max_indices: int,
        block_size: int,
        tile_size: int,
        device: torch.device,
        others: Sequence[RowKind],
    ) -> None:
        self._data = torch.zeros(header + max_indices, dtype=torch.int32, device=device)
        self._block_size = block_size
        self._tile_size = tile_size
        self._others = others

    def view(self, room: BatchShape) -> FlatBatch:
        return view(self._data, room, self._tile_size, others=self._others)

    def fill(self, sequences: Sequence[FlatSequence], room: BatchShape) -> bool:
        """False: they have more blocks than the buffer has room for."""
        data, _ = pack(sequences, self._block_size, self._tile_size, room, self._others)
        if len(data) > len(self._data):
            return False
        integers = torch.from_numpy(np.ascontiguousarray(data))
        if self._data.is_cuda:
            integers = integers.pin_memory()
        self._data[: len(data)].copy_(integers, non_blocking=True)
        return True


class DecodeGraphs:
    """Graphs of `forward`, which maps a batch of decodes on the device to logits."""

    def __init__(
        self,
        forward: Callable[[FlatBatch], torch.Tensor],
        device: torch.device,
        block_size: int,
        max_running: int,
        max_indices: int,
        record: Recorder,
        num_state_blocks: int = 0,
        at_once: int = 1,
        others: Sequence[RowKind] = (),
        follow: Callable[[FlatBatch], torch.Tensor] | None = None,
        *,
        adapters: bool = False,
    ) -> None:
        """`at_once`: parts of decodes (`decode_parts`); `others`: kinds of rows behind the
        first; `follow`: what is run behind it once its tokens are sampled; `adapters`: tokens may
        have one."""
        sizes = [size for size in SIZES if size <= max_running] or [1]
        of_all = num_state_blocks, at_once, len(others)
        self._rooms = {size: BatchShape(size, size, size, 0, *of_all) for size in sizes}
        header = header_size(self._rooms[sizes[-1]]._replace(adapters=1))
        self._integers = _Integers(header, max_indices, block_size, 1, device, others)
        logits, rows = OnePlace(), OnePlace()
        self._follow: dict[BatchShape, tuple[Callable[[], None], torch.Tensor]] = {}
        self._graphs: dict[BatchShape, tuple[Callable[[], None], torch.Tensor]] = {}
        for room in _kinds(reversed(self._rooms.values()), adapters=adapters):
            self._integers.fill([], room)
            flat = self._integers.view(room)
            self._graphs[room] = record(lambda flat=flat: logits(forward(flat)))  # type: ignore[misc]
            if follow is not None:
                self._follow[room] = record(lambda flat=flat: rows(follow(flat)))  # type: ignore[misc]

    def replay(
        self, sequences: Sequence[FlatSequence], *, adapters: bool = False
    ) -> torch.Tensor | None:
        """Logits `[n, vocabulary]`, valid until the next replay as the batch on the device
        (`last`); None: no graph fits."""
        size = _next(list(self._rooms), len(sequences))
        if size is None:
            return None
        room = self._rooms[size]._replace(adapters=int(adapters))
        if not self._integers.fill(sequences, room):
            return None
        replay, logits = self._graphs[room]
        replay()
        self.last: FlatBatch = self._integers.view(room)
        return logits[: len(sequences)]

    def follow(self) -> torch.Tensor:
        """Behind the last replay, what `follow` gives."""
        replay, rows = self._follow[self.last.shape]
        replay()
        return rows


class GraphRooms:
    """The shapes in which steps with prompts are captured; the largest of them, which are those of
    a prefill instance, without decodes.  None has more decodes than tokens: kernels may write a row
    for each decode that there is room for."""

    def __init__(
        self,
        max_tokens: int,
        max_decodes: int,
        tile_size: int,
        num_state_blocks: int = 0,
        at_once: int = 1,
        num_others: int = 0,
        *,
        adapters: bool = False,
    ) -> None:
        fine = range(FINE_STEP, FINE_TOKENS, FINE_STEP)
        coarse = range(FINE_TOKENS, MIXED_TOKENS, COARSE_STEP)
        sizes = [*fine, *coarse, *range(MIXED_TOKENS, max_tokens + LARGE_STEP, LARGE_STEP)]
        self._tokens = sizes[: bisect_left(sizes, max_tokens) + 1]
        self._decodes = [0, *(room for room in DECODES if room < max_decodes), max_decodes]
        self._tile_size = tile_size
        self._of_all = num_state_blocks, at_once, num_others
        self._adapters = adapters

    def __iter__(self) -> Iterator[BatchShape]:
        """The largest first."""
        for tokens in reversed(self._tokens):
            rooms = reversed(self._decodes) if tokens <= MIXED_TOKENS else [0]
            shapes = dict.fromkeys(self._shape(tokens, decodes) for decodes in rooms)
            yield from _kinds(shapes, adapters=self._adapters)

    def holding(self, needed: BatchShape) -> BatchShape | None:
        """The smallest that has room; None: there is none."""
        tokens = _next(self._tokens, needed.num_tokens)
        decodes = _next(self._decodes, needed.num_decodes)
        if tokens is None or decodes is None or (tokens > MIXED_TOKENS and decodes):
            return None
        if needed.num_sequences - needed.num_decodes > MAX_CHUNKS:
            return None  # kernels have programs for so many prompts, from the first one on
        room = self._shape(tokens, decodes)._replace(adapters=needed.adapters)
        return room if all(a >= b for a, b in zip(room, needed, strict=True)) else None

    def _shape(self, tokens: int, decodes: int) -> BatchShape:
        decodes = min(tokens, decodes)
        tiles = tokens // self._tile_size + MAX_CHUNKS  # each chunk may end in a tile of its own
        return BatchShape(tokens, decodes + MAX_CHUNKS, decodes, tiles, *self._of_all)


def _kinds(rooms: Iterable[BatchShape], *, adapters: bool) -> Iterator[BatchShape]:
    """With adapters, where tokens may have one, and without: other steps do not pay for them."""
    for room in rooms:
        if adapters:
            yield room._replace(adapters=1)
        yield room


def _next(sizes: Sequence[int], least: int) -> int | None:
    at = bisect_left(sizes, least)
    return sizes[at] if at < len(sizes) else None


Layers = Callable[[torch.Tensor, FlatBatch, Sequence[AddedRows]], torch.Tensor]


class PromptGraphs:
    """Graphs of `layers`, which maps embeddings, a batch and deepstack rows to hidden states."""

    def __init__(
        self,
        layers: Layers,
        embeds: torch.Tensor,
        num_levels: int,
        rooms: GraphRooms,
        block_size: int,
        tile_size: int,
        max_indices: int,
        record: PartsRecorder,
        others: Sequence[RowKind] = (),
    ) -> None:
        """`embeds`: one token's, `[1, H]`; `num_levels`: of deepstack rows; `others`: kinds of rows
        behind the first."""
        self._rooms = rooms
        shapes = list(rooms)
        header = max(header_size(shape) for shape in shapes)
        device, size = embeds.device, shapes[0].num_tokens
        self._integers = _Integers(header, max_indices, block_size, tile_size, device, others)
        self._embeds = embeds.new_zeros(size, embeds.shape[1])
        self._levels = embeds.new_zeros(num_levels, size, embeds.shape[1])
        self._num_added = 0  # tokens whose rows may not be zero
        self._graphs: dict[BatchShape, tuple[list[Callable[[], None]], torch.Tensor]] = {}
        for shape in shapes:
            self._integers.fill([], shape)
            self._graphs[shape] = record.parts(partial(self._run, layers, shape))

    def fill(self, sequences: Sequence[FlatSequence], needed: BatchShape) -> FlatBatch | None:
        """The batch on the device, where a graph reads it; None: no graph fits."""
        room = self._rooms.holding(needed)
        if room is None or not self._integers.fill(sequences, room):
            return None
        return self._integers.view(room)

    def replay(
        self,
        flat: FlatBatch,
        embeds: torch.Tensor,
        added: Sequence[AddedRows],
        before: Callable[[int], None] = lambda number: None,
    ) -> torch.Tensor:
        """Hidden states `[T, H]` of the batch that was filled in last, valid until the next replay;
        behind its tokens lies anything.

        `before(n)` is called when the first n parts are launched."""
        self._embeds[: len(embeds)].copy_(embeds)
        self._add(added)
        (first, *others), hidden = self._graphs[flat.shape]
        first()
        for number, part in enumerate(others, 1):
            before(number)
            part()
        return hidden

    def _run(self, layers: Layers, shape: BatchShape) -> torch.Tensor:
        embeds = self._embeds[: shape.num_tokens]
        rows = self._levels[:, : shape.num_tokens]
        added = [AddedRows(0, rows)] if len(rows) else []
        # A result is kept, so no other graph may use its memory: all give theirs in one place.
        return embeds.copy_(layers(embeds, self._integers.view(shape), added))

    def _add(self, added: Sequence[AddedRows]) -> None:
        if self._num_added:
            self._levels[:, : self._num_added].zero_()
            self._num_added = 0
        for addition in added:
            end = addition.at + addition.rows.shape[1]
            self._levels[:, addition.at : end].copy_(addition.rows)
            self._num_added = max(self._num_added, end)
