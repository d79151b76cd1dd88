"""What a step is, as one piece of integers: packed on the host, sent in one copy, cut there.

Theory of operation
-------------------
All sequences of a step lie in one row of T tokens, those with one query first (the caller sorts
them so).  All input of kernels is int32: token ids, positions, slots, where each sequence's queries
begin, its length, its blocks.  One buffer, one transfer; the fields are views of it in a fixed
order.

A captured graph reads the same addresses in every replay, so its batch is packed into a larger
shape (`room`).  Tokens without a slot, sequences without tokens and tiles of no sequence pad it.
How many decodes there are stands in the buffer too, since the first token behind them is one of a
prompt.  Nothing is written for padding, and nothing of it is read (fault F25).

How decodes' keys are cut into parts (`decode_parts`) is listed for all layers at once.

Where rows have several kinds (`KvLayout.kinds`), blocks hold those of one.  So each kind behind the
first has slots, blocks and parts of its own, and a batch that is like the first one's (`others`).
A kind that is seen for a while has parts of what its window reaches alone: a table may have
anything in place of the blocks before.  `limits` holds what a picture's rows see of each other.

Where layers keep tensors of a sequence (`state_kinds`), the blocks of these are a row of a table.
A sequence that only pads has -1 there: for it nothing is read or written.  One with drafts is as
many decodes, which follow each other.  Its states are read and not written (`runs`): which of its
tokens hold is open (`drafts/replay.py`).

The host alone has `chunks`: a mixer that reads it (`Mixer.reads_chunks`) is not captured in steps
with prompts.

A token may not be on the host yet, while the step that samples it is running.  Then `sources` names
its row among the tokens that the previous step has sampled, which never leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from epd.engine.language import decode_parts
from epd.layouts import KvLayout, RowKind

Ints = np.ndarray[Any, np.dtype[np.int32]]


class BatchShape(NamedTuple):
    """How much a batch has of each, or has room for."""

    num_tokens: int
    num_sequences: int
    num_decodes: int  # sequences with one query: the first ones
    num_tiles: int
    num_state_blocks: int = 0  # of each sequence
    at_once: int = 1  # parts of decodes that the device runs
    num_others: int = 0  # kinds of rows behind the first
    adapters: int = 0  # 1: tokens may have an adapter

    @property
    def num_parts(self) -> int:
        """Of decodes, at most."""
        return decode_parts.room(self.num_decodes, self.at_once)

    @property
    def num_joins(self) -> int:
        """Decodes of several parts, at most."""
        return decode_parts.join_room(self.num_decodes, self.at_once)

    @property
    def num_sums(self) -> int:
        """Parts of such decodes, at most."""
        return decode_parts.sum_room(self.num_decodes, self.at_once)


@dataclass(frozen=True, slots=True)
class FlatChunk:
    """A sequence with several queries, as the host has it."""

    sequence: int  # its place among the sequences
    at: int  # of its first token in the row
    count: int
    start: int  # tokens before it


@dataclass(frozen=True, slots=True)
class FlatSequence:
    """One sequence's part: tokens `[start, start + len(ids))` in the blocks of `table`."""

    ids: Sequence[int]
    start: int
    table: Ints
    positions: Any  # int `[3, len(ids)]`, or the first position of a line
    source: int = -1  # row of the previous step that samples the only token; -1: `ids` has it
    state: Ints | tuple[()] = ()  # blocks of what layers keep of it besides
    others: tuple[Ints, ...] = ()  # blocks of the kinds of rows behind the first
    pictures: Sequence[tuple[int, int]] = ()  # here, that are seen both ways: places in it
    adapter: int = -1  # place of its adapter (`lora`)
    run: int = 1  # see `FlatBatch.runs`


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The step on the device; all tensors int32."""

    shape: BatchShape
    tile_size: int
    decodes: torch.Tensor  # [1]: how many there are, of the `num_decodes` that there is room for
    ids: torch.Tensor  # [T]
    sources: torch.Tensor  # [T]
    positions: torch.Tensor  # [3, T]
    slots: torch.Tensor  # [T]
    seq_lens: torch.Tensor  # [S]
    cu_q: torch.Tensor  # [S + 1]
    indptr: torch.Tensor  # [S + 1]
    tiles: torch.Tensor  # [num_tiles, 2]: sequence (-1: none), first query
    states: torch.Tensor  # [S, num_state_blocks]; -1: nobody's
    parts: torch.Tensor  # [num_parts, 4]: decode (-1: none), first key, the one behind the last,
    # and the place of its sum (-1: it is all of its decode)
    joins: torch.Tensor  # [num_joins, 3]: decode (-1: none), first place of its sums, and their end
    adapters: torch.Tensor  # [T], -1: none; or [0] in a step where no token has one
    runs: torch.Tensor  # [num_decodes]: tokens of its sequence from this one on, negative where its
    # states are written later; 0: it belongs to one before it
    indices: torch.Tensor  # [sum of blocks]
    chunks: tuple[FlatChunk, ...] = ()  # none in a captured step
    window: int = 0  # tokens that a query of this kind sees, itself among them; 0: all
    limits: torch.Tensor | None = None  # [T], where there are `others`: the last key in a window
    others: tuple[FlatBatch, ...] = ()  # the same step for the kinds of rows behind this one
    # What kernels make of these, once for all layers.
    derived: dict[object, tuple[torch.Tensor, ...]] = field(init=False, default_factory=dict)


ALIGNED = 4  # integers: fields begin at 16 bytes, or a kernel would be compiled for each offset


def header_size(shape: BatchShape) -> int:
    return sum(-(-size // ALIGNED) * ALIGNED for size in _sizes(shape))


def _sizes(shape: BatchShape) -> list[int]:
    """Integers of each field before the blocks, in order."""
    tokens, sequences = shape.num_tokens, shape.num_sequences
    sizes = [1, tokens, tokens, 3 * tokens, tokens, sequences]
    sizes += [sequences + 1, sequences + 1, 2 * shape.num_tiles]
    parts = [4 * shape.num_parts, 3 * shape.num_joins]
    sizes += [sequences * shape.num_state_blocks, *parts, tokens if shape.adapters else 0]
    sizes += [shape.num_decodes]
    if shape.num_others:
        sizes += [tokens, *[tokens, sequences + 1, *parts] * shape.num_others]
    return sizes


def shape_of(
    counts: Sequence[int], tile_size: int, num_state_blocks: int = 0, at_once: int = 1
) -> BatchShape:
    decodes = sum(count == 1 for count in counts)
    tiles = sum(-(-count // tile_size) for count in counts if count > 1)
    return BatchShape(sum(counts), len(counts), decodes, tiles, num_state_blocks, at_once)


def chunks_of(sequences: Sequence[FlatSequence]) -> tuple[FlatChunk, ...]:
    chunks, at = [], 0
    for i, sequence in enumerate(sequences):
        count = len(sequence.ids)
        if count > 1:
            chunks.append(FlatChunk(i, at, count, sequence.start))
        at += count
    return tuple(chunks)


def by_kind(table: Ints, layout: KvLayout) -> tuple[Ints, ...]:
    """The blocks of each kind of rows, and perhaps more; they follow each other again and again in
    the order of the tokens at which they begin."""
    if not layout.kinds:
        return (table,)
    size = len(layout.rows.starts)
    units = np.resize(table, (-(-len(table) // size), size))
    return tuple(units[:, layout.columns(n)].ravel() for n in range(len(layout.kinds)))


def pack(
    sequences: Sequence[FlatSequence],
    block_size: int,
    tile_size: int,
    room: BatchShape | None = None,
    others: Sequence[RowKind] = (),
) -> tuple[Ints, BatchShape]:
    """The integers and their shape: `room`, which must hold them, or what they need.  `others`:
    kinds of rows behind the first, which has blocks of `block_size` tokens."""
    counts = np.fromiter((len(s.ids) for s in sequences), np.int32, len(sequences))
    starts = np.fromiter((s.start for s in sequences), np.int32, len(sequences))
    num_state_blocks = len(sequences[0].state) if sequences else 0
    needed = shape_of(counts.tolist(), tile_size, num_state_blocks)
    needed = needed._replace(num_others=len(others))
    shape = room or needed
    assert all(has >= needs for has, needs in zip(shape, needed, strict=True)), (shape, needed)
    assert (counts[: needed.num_decodes] == 1).all(), "sequences with one query come first"
    lengths = starts + counts
    num_blocks = sum(int((-(-lengths // n)).sum()) for n in (block_size, *_sizes_of(others)))
    data = np.zeros(header_size(shape) + num_blocks, np.int32)
    f = view(data, shape, tile_size, others=others)
    f.decodes[:] = needed.num_decodes
    f.sources[:] = -1
    f.tiles[:] = -1
    f.states[:] = -1
    f.adapters[:] = -1
    _fill_decodes(f, sequences[: needed.num_decodes])
    at = needed.num_decodes
    for sequence in sequences[needed.num_decodes :]:
        at += _fill_chunk(f, at, sequence)
    f.cu_q[1 : len(sequences) + 1] = np.cumsum(counts)
    f.cu_q[len(sequences) + 1 :] = at
    f.seq_lens[: len(sequences)] = lengths
    f.tiles[: needed.num_tiles] = _tiles(counts, lengths, tile_size)
    if num_state_blocks:
        f.states[: len(sequences), :num_state_blocks] = [s.state for s in sequences]
        f.runs[: needed.num_decodes] = [s.run for s in sequences[: needed.num_decodes]]
    if shape.adapters:
        f.adapters[: needed.num_tokens] = np.repeat([s.adapter for s in sequences], counts)
    end = _fill_rows(f, [s.table for s in sequences], starts, lengths, block_size, 0)
    for number, (kind, one) in enumerate(zip(others, f.others, strict=True)):
        tables = [s.others[number] for s in sequences]
        end = _fill_rows(one, tables, starts, lengths, kind.block_size, end)
    return data, shape


def _sizes_of(kinds: Sequence[RowKind]) -> list[int]:
    return [kind.block_size for kind in kinds]


def _fill_rows(
    f: FlatBatch, tables: Sequence[Ints], starts: Ints, lengths: Ints, block_size: int, first: int
) -> int:
    """Where the rows of a kind lie, whose blocks are listed from `first` on; gives their end."""
    known, num_decodes, blocks = len(tables), int(f.decodes[0]), -(-lengths // block_size)
    f.slots[:] = -1
    f.parts[:] = -1
    f.joins[:] = -1
    f.slots[:num_decodes] = [
        int(table[start // block_size]) * block_size + start % block_size
        for table, start in zip(tables[:num_decodes], starts[:num_decodes].tolist(), strict=True)
    ]
    at = num_decodes
    for table, start, length in zip(
        tables[num_decodes:], starts[num_decodes:], lengths[num_decodes:], strict=True
    ):
        index = np.arange(start, length, dtype=np.int32)
        f.slots[at : at + len(index)] = table[index // block_size] * block_size + index % block_size
        at += len(index)
    end = first + int(blocks.sum())
    if known:
        own = [table[:n] for table, n in zip(tables, blocks.tolist(), strict=True)]
        np.concatenate(own, out=f.indices[first:end])
    f.indptr[0] = first
    f.indptr[1 : known + 1] = first + np.cumsum(blocks)
    f.indptr[known + 1 :] = end
    ends = lengths[:num_decodes]
    behind = np.maximum(ends - f.window, 0) if f.window else np.zeros_like(ends)
    parts, joins = decode_parts.parts_of(ends - behind, f.shape.at_once)
    parts[:, 1:3] += behind[parts[:, 0], None]
    f.parts[: len(parts)] = parts
    f.joins[: len(joins)] = joins
    return end


def _fill_decodes(f: FlatBatch, sequences: Sequence[FlatSequence]) -> None:
    """All at once: this is between two steps, and the device waits."""
    count = len(sequences)
    if not count:
        return
    f.ids[:count] = [s.ids[0] if s.source < 0 else 0 for s in sequences]
    f.sources[:count] = [s.source for s in sequences]
    if f.limits is not None:
        f.limits[:count] = [s.start for s in sequences]
    f.positions[:, :count] = [s.positions if type(s.positions) is int else 0 for s in sequences]
    for i, sequence in enumerate(sequences):
        if type(sequence.positions) is not int:
            f.positions[:, i : i + 1] = sequence.positions


def _fill_chunk(f: FlatBatch, at: int, sequence: FlatSequence) -> int:
    """One sequence with several queries, from token `at` of the row; gives how many."""
    start, count = sequence.start, len(sequence.ids)
    here = slice(at, at + count)
    f.ids[here] = sequence.ids
    if f.limits is not None:
        f.limits[here] = np.arange(start, start + count, dtype=np.int32)
        for first, stop in sequence.pictures:
            f.limits[at + first - start : at + stop - start] = stop - 1
    f.positions[:, here] = (
        np.arange(sequence.positions, sequence.positions + count, dtype=np.int32)
        if isinstance(sequence.positions, int)
        else sequence.positions
    )
    return count


def view(
    data: Any,
    shape: BatchShape,
    tile_size: int,
    chunks: tuple[FlatChunk, ...] = (),
    others: Sequence[RowKind] = (),
) -> FlatBatch:
    """The packed integers, cut: a tensor on the device, or what is filled in on the host."""
    fields: list[Any] = []
    at = 0
    for size in _sizes(shape):
        fields.append(data[at : at + size])
        at += -(-size // ALIGNED) * ALIGNED
    fields[3] = fields[3].reshape(3, shape.num_tokens)
    fields[8] = fields[8].reshape(shape.num_tiles, 2)
    fields[9] = fields[9].reshape(shape.num_sequences, shape.num_state_blocks)
    fields[10] = fields[10].reshape(shape.num_parts, 4)
    fields[11] = fields[11].reshape(shape.num_joins, 3)
    fields, more = [*fields[:14], data[at:], chunks], fields[14:]
    whole = FlatBatch(shape, tile_size, *fields)
    if not others:
        return whole
    limits, *more = more
    batches = [
        replace(
            whole,
            slots=more[n],
            indptr=more[n + 1],
            parts=more[n + 2].reshape(shape.num_parts, 4),
            joins=more[n + 3].reshape(shape.num_joins, 3),
            window=kind.window,
            limits=limits,
        )
        for kind, n in zip(others, range(0, len(more), 4), strict=True)
    ]
    return replace(whole, limits=limits, others=tuple(batches))


def _tiles(counts: Ints, lengths: Ints, tile_size: int) -> Ints:
    """Tiles of the sequences with several queries, most keys first: the long ones must not start
    last."""
    tiles = [
        (int(lengths[i] - counts[i]) + first, i, first)
        for i in np.flatnonzero(counts > 1)
        for first in range(0, int(counts[i]), tile_size)
    ]
    tiles.sort(reverse=True)
    return np.array([(i, first) for _, i, first in tiles], np.int32).reshape(len(tiles), 2)
