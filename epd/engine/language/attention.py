"""Paged attention behind transformers' attention seam.

Theory of operation
-------------------
A step flattens all its sequences (prefill chunks and decodes) into one row of T tokens, so the
linear layers see one big batch.  Only attention needs the bounds of sequences: each layer calls
`paged_attention`, which writes the new keys and values into the pool by slot and then attends

- a first chunk (nothing before it): causally over its own keys, as they are stored; nothing is
  gathered;
- a later chunk: over the gathered blocks of its history and itself, with a causal mask;
- decodes: together, padded to the longest of their group and masked.  Groups are powers of two of
  the block count, so that padding at most doubles the work however unequal the lengths are.

Layers may differ (`Look`).  Some see only a window of the last tokens, in which rows of a picture
may see each other both ways.  Some read the rows of a layer before them.  What a layer sees is a
mask over the rows that are gathered from the blocks of its kind.  They begin with the first block
that the window reaches: one before it may have another owner (`layouts.PASSED`).

A table is padded with the sequence's own first block, so no sequence ever reads another's memory.

`register` puts the function under the name `epd_paged`; no mask function is registered under that
name, and the model code then builds no mask.  Metadata travels as the extra keyword `paged`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.language.kv_pool import KvLayer, KvPool
from epd.layouts import RowBlocks

NAME = "epd_paged"


class Reach(NamedTuple):
    """What a query sees."""

    window: int = 0  # of the last tokens, itself among them; 0: all
    both_ways: bool = False  # and, in the window, those of its own picture behind it


EVERYTHING = Reach()  # before it


class Look(NamedTuple):
    """How a layer of the stack attends."""

    layer: int  # of the pool, whose rows it reads
    writes: bool = True  # these rows; else a layer before it has
    reach: Reach = EVERYTHING


Masks = Mapping[Reach, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[at, at + count)` of the row: one sequence's chunk with more than one query."""

    at: int
    count: int
    total: int  # tokens of the sequence, this chunk included
    blocks: torch.Tensor | None  # [num_blocks] int64; None: no history
    masks: Masks  # [count, num_blocks * block_size] bool; without history [count, count]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, of similar length."""

    at: torch.Tensor  # [n] int64, places in the row
    blocks: torch.Tensor  # [n, num_blocks] int64
    masks: Masks  # [n, 1, 1, num_blocks * block_size] bool


@dataclass(frozen=True, slots=True)
class KindBatch:
    """The metadata of a step for the layers whose rows lie in the same blocks."""

    slot_blocks: torch.Tensor  # [T] int64: block of each token
    slot_offsets: torch.Tensor  # [T] int64: its place in the block
    chunks: list[Chunk]
    decodes: list[DecodeGroup]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The metadata of a step for attention."""

    pool: KvPool
    looks: Sequence[Look]  # of the stack's layers; empty: each sees everything, in rows of its own
    of_layers: Sequence[KindBatch]  # of the pool's


@dataclass(frozen=True, slots=True)
class Extent:
    """One sequence's part of a step: tokens `[start, start + count)` in the blocks of `table`."""

    start: int
    count: int
    table: Sequence[int]
    pictures: Sequence[tuple[int, int]] = ()  # first place in the sequence, and behind the last


def register() -> None:
    """Register the seam with transformers; repeating it is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def fresh_blocks(extents: Sequence[Extent], rows: RowBlocks) -> list[int]:
    """Blocks whose first slot is written in this step."""
    blocks: list[int] = []
    for extent in extents:
        first, last = rows.count(extent.start), rows.count(extent.start + extent.count)
        blocks.extend(extent.table[first:last])
    return blocks


def plan(extents: Sequence[Extent], pool: KvPool, looks: Sequence[Look] = ()) -> PagedBatch:
    """Metadata of a step; sequences lie in the row in the given order."""
    layout, device = pool.layout, pool.memory.device
    if not layout.kinds:
        reaches = {look.reach for look in looks} or {EVERYTHING}
        batch = _plan(extents, layout.block_size, device, reaches)
        return PagedBatch(pool, looks, [batch] * layout.num_layers)
    found: dict[int, KindBatch] = {}
    for number, kind in enumerate(layout.kinds):
        columns = layout.columns(number)
        own = [replace(one, table=_of_kind(one.table, columns, layout.rows)) for one in extents]
        reaches = {look.reach for look in looks if look.layer in kind.layers}
        batch = _plan(own, kind.block_size, device, reaches, kind.window)
        found |= dict.fromkeys(kind.layers, batch)
    return PagedBatch(pool, looks, [found[layer] for layer in range(layout.num_layers)])


def _of_kind(table: Sequence[int], columns: Sequence[int], rows: RowBlocks) -> list[int]:
    """Its blocks in a table of all kinds."""
    size = len(rows.starts)
    places = (first + column for first in range(0, len(table), size) for column in columns)
    return [table[place] for place in places if place < len(table)]


def _plan(
    extents: Sequence[Extent],
    size: int,
    device: torch.device,
    reaches: Iterable[Reach],
    window: int = 0,
) -> KindBatch:
    """`size`: tokens in a block; `window`: of all reaches."""
    slot_blocks: list[np.ndarray[Any, Any]] = []
    slot_offsets: list[np.ndarray[Any, Any]] = []
    chunks: list[Chunk] = []
    groups: dict[int, list[tuple[int, int, np.ndarray[Any, Any]]]] = defaultdict(list)
    at = 0
    for extent in extents:
        total = extent.start + extent.count
        first = max(0, extent.start + 1 - window) // size if window else 0
        table = np.asarray(extent.table[first : -(-total // size)], dtype=np.int64)
        index = np.arange(extent.start, total)
        slot_blocks.append(table[index // size - first])
        slot_offsets.append(index % size)
        if extent.count == 1 and extent.start > 0:
            groups[(len(table) - 1).bit_length()].append((at, total - first * size, table))
        else:
            chunks.append(_chunk(at, extent, first * size, table, size, device, reaches))
        at += extent.count
    return KindBatch(
        slot_blocks=torch.from_numpy(np.concatenate(slot_blocks)).to(device),
        slot_offsets=torch.from_numpy(np.concatenate(slot_offsets)).to(device),
        chunks=chunks,
        decodes=[_group(members, size, device, reaches) for _, members in sorted(groups.items())],
    )


def _chunk(
    at: int,
    extent: Extent,
    first: int,
    table: np.ndarray[Any, Any],
    size: int,
    device: torch.device,
    reaches: Iterable[Reach],
) -> Chunk:
    """`first`: token of the table."""
    is_first, total = extent.start == 0, extent.start + extent.count
    query = torch.arange(extent.start, total, device=device)
    key = query if is_first else torch.arange(first, first + len(table) * size, device=device)
    masks: dict[Reach, torch.Tensor | None] = {}
    for reach in reaches:
        masks[reach] = _seen(extent, query, key, reach)
    if is_first and EVERYTHING in masks:
        masks[EVERYTHING] = None  # causal attention of torch
    blocks = None if is_first else torch.from_numpy(table).to(device)
    return Chunk(at, extent.count, total, blocks, masks)


def _seen(extent: Extent, query: torch.Tensor, key: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Which keys each query sees, `[queries, keys]`, by their places in the sequence."""
    last = query.clone()  # that each sees
    for first, stop in extent.pictures if reach.both_ways else ():
        last[(query >= first) & (query < stop)] = stop - 1
    seen = key[None] <= last[:, None]
    if reach.window:
        seen &= key[None] > query[:, None] - reach.window
    return seen


def _group(
    members: list[tuple[int, int, np.ndarray[Any, Any]]],
    size: int,
    device: torch.device,
    reaches: Iterable[Reach],
) -> DecodeGroup:
    longest = max(len(table) for _, _, table in members)
    blocks = np.empty((len(members), longest), dtype=np.int64)
    for row, (_, _, table) in zip(blocks, members, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    totals = np.array([total for _, total, _ in members])[:, None]
    places = np.arange(longest * size)[None]
    masks: dict[Reach, torch.Tensor | None] = {}
    for reach in reaches:
        first = totals - reach.window if reach.window else 0
        seen = torch.from_numpy((places < totals) & (places >= first))
        masks[reach] = seen.to(device)[:, None, None]
    return DecodeGroup(
        torch.tensor([at for at, _, _ in members], device=device),
        torch.from_numpy(blocks).to(device),
        masks,
    )


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedBatch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the whole step.

    query `[1, num_heads, T, head_dim]`, key and value `[1, num_kv_heads, T, head_dim]` after rope;
    gives `[1, T, num_heads, head_dim]`.
    """
    assert paged is not None, "the model was called without its `paged` metadata"
    index = int(module.layer_idx)  # type: ignore[arg-type]
    look = paged.looks[index] if paged.looks else Look(index)
    layer, batch = paged.pool.layer(look.layer), paged.of_layers[look.layer]
    place = batch.slot_blocks, batch.slot_offsets
    if look.writes:
        key, value = (
            part.write(*place, rows[0].transpose(0, 1)).transpose(0, 1)[None]
            for part, rows in zip(layer, (key, value), strict=True)
        )
    output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    for chunk in batch.chunks:
        end = chunk.at + chunk.count
        attended = _attend_chunk(chunk, look.reach, query, key, value, layer, scaling)
        output[chunk.at : end] = attended[0].transpose(0, 1)
    for group in batch.decodes:
        output.index_copy_(0, group.at, _attend_decodes(group, look.reach, query, layer, scaling))
    return output[None], None


def _attend_chunk(
    chunk: Chunk,
    reach: Reach,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: KvLayer,
    scaling: float | None,
) -> torch.Tensor:
    """`[1, num_heads, count, head_dim]`."""
    here, mask = slice(chunk.at, chunk.at + chunk.count), chunk.masks[reach]
    grouped = query.shape[1] != key.shape[1]
    if chunk.blocks is None:
        return scaled_dot_product_attention(
            query[:, :, here],
            key[:, :, here],
            value[:, :, here],
            attn_mask=mask,
            is_causal=mask is None and chunk.count > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
    return scaled_dot_product_attention(
        query[:, :, here],
        layer.keys.read(chunk.blocks, query.dtype).flatten(0, 1).transpose(0, 1)[None],
        layer.values.read(chunk.blocks, query.dtype).flatten(0, 1).transpose(0, 1)[None],
        attn_mask=mask,
        scale=scaling,
        enable_gqa=grouped,
    )


def _attend_decodes(
    group: DecodeGroup,
    reach: Reach,
    query: torch.Tensor,
    layer: KvLayer,
    scaling: float | None,
) -> torch.Tensor:
    """`[n, num_heads, head_dim]`; the heads of one KV head are packed as its queries."""
    num_kv_heads, head_dim = layer.keys.numbers.shape[-2:]
    gathered = (len(group.at), -1, num_kv_heads, head_dim)
    blocks = group.blocks.view(-1)  # index_select copies whole blocks; advanced indexing does not
    packed = query[0].index_select(1, group.at).transpose(0, 1)
    attended = scaled_dot_product_attention(
        packed.reshape(len(group.at), num_kv_heads, -1, head_dim),
        layer.keys.read(blocks, query.dtype).view(gathered).transpose(1, 2),
        layer.values.read(blocks, query.dtype).view(gathered).transpose(1, 2),
        attn_mask=group.masks[reach],
        scale=scaling,
    )
    return attended.reshape(len(group.at), -1, head_dim)
