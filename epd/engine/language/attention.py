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

A table is padded with the sequence's own first block, so no sequence ever reads another's memory.

`register` puts the function under the name `epd_paged`; no mask function is registered under that
name, and the model code then builds no mask.  Metadata travels as the extra keyword `paged`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.language.kv_pool import KvLayer, KvPool

NAME = "epd_paged"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[at, at + count)` of the row: one sequence's chunk with more than one query."""

    at: int
    count: int
    total: int  # tokens of the sequence, this chunk included
    blocks: torch.Tensor | None  # [num_blocks] int64; None: no history
    mask: torch.Tensor | None  # [count, num_blocks * block_size] bool


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each, of similar length."""

    at: torch.Tensor  # [n] int64, places in the row
    blocks: torch.Tensor  # [n, num_blocks] int64
    mask: torch.Tensor  # [n, 1, 1, num_blocks * block_size] bool


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The metadata of a step for attention; the same for every layer."""

    pool: KvPool
    slot_blocks: torch.Tensor  # [T] int64: block of each token
    slot_offsets: torch.Tensor  # [T] int64: its place in the block
    chunks: list[Chunk]
    decodes: list[DecodeGroup]


@dataclass(frozen=True, slots=True)
class Extent:
    """One sequence's part of a step: tokens `[start, start + count)` in the blocks of `table`."""

    start: int
    count: int
    table: Sequence[int]


def register() -> None:
    """Register the seam with transformers; repeating it is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def fresh_blocks(extents: Sequence[Extent], block_size: int) -> list[int]:
    """Blocks whose first slot is written in this step."""
    blocks: list[int] = []
    for extent in extents:
        first = -(-extent.start // block_size)
        last = (extent.start + extent.count - 1) // block_size
        blocks.extend(extent.table[first : last + 1])
    return blocks


def plan(extents: Sequence[Extent], pool: KvPool) -> PagedBatch:
    """Metadata of a step; sequences lie in the row in the given order."""
    size = pool.layout.block_size
    device = pool.tensor.device
    slot_blocks: list[np.ndarray[Any, Any]] = []
    slot_offsets: list[np.ndarray[Any, Any]] = []
    chunks: list[Chunk] = []
    groups: dict[int, list[tuple[int, int, np.ndarray[Any, Any]]]] = defaultdict(list)
    at = 0
    for extent in extents:
        total = extent.start + extent.count
        table = np.asarray(extent.table[: -(-total // size)], dtype=np.int64)
        index = np.arange(extent.start, total)
        slot_blocks.append(table[index // size])
        slot_offsets.append(index % size)
        if extent.count == 1 and extent.start > 0:
            groups[(len(table) - 1).bit_length()].append((at, total, table))
        else:
            chunks.append(_chunk(at, extent, total, table, size, device))
        at += extent.count
    return PagedBatch(
        pool=pool,
        slot_blocks=torch.from_numpy(np.concatenate(slot_blocks)).to(device),
        slot_offsets=torch.from_numpy(np.concatenate(slot_offsets)).to(device),
        chunks=chunks,
        decodes=[_group(members, size, device) for _, members in sorted(groups.items())],
    )


def _chunk(
    at: int,
    extent: Extent,
    total: int,
    table: np.ndarray[Any, Any],
    size: int,
    device: torch.device,
) -> Chunk:
    if extent.start == 0:
        return Chunk(at, extent.count, total, None, None)
    query = torch.arange(extent.start, total, device=device)
    key = torch.arange(len(table) * size, device=device)
    return Chunk(
        at, extent.count, total, torch.from_numpy(table).to(device), key[None] <= query[:, None]
    )


def _group(
    members: list[tuple[int, int, np.ndarray[Any, Any]]], size: int, device: torch.device
) -> DecodeGroup:
    longest = max(len(table) for _, _, table in members)
    blocks = np.empty((len(members), longest), dtype=np.int64)
    for row, (_, _, table) in zip(blocks, members, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    totals = np.array([total for _, total, _ in members])
    mask = np.arange(longest * size)[None] < totals[:, None]
    return DecodeGroup(
        torch.tensor([at for at, _, _ in members], device=device),
        torch.from_numpy(blocks).to(device),
        torch.from_numpy(mask).to(device)[:, None, None],
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
    layer = paged.pool.layer(int(module.layer_idx))  # type: ignore[arg-type]
    place = paged.slot_blocks, paged.slot_offsets
    key, value = (
        part.write(*place, rows[0].transpose(0, 1)).transpose(0, 1)[None]
        for part, rows in zip(layer, (key, value), strict=True)
    )
    output = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    for chunk in paged.chunks:
        end = chunk.at + chunk.count
        attended = _attend_chunk(chunk, query, key, value, layer, scaling)
        output[chunk.at : end] = attended[0].transpose(0, 1)
    for group in paged.decodes:
        output.index_copy_(0, group.at, _attend_decodes(group, query, layer, scaling))
    return output[None], None


def _attend_chunk(
    chunk: Chunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: KvLayer,
    scaling: float | None,
) -> torch.Tensor:
    """`[1, num_heads, count, head_dim]`."""
    here = slice(chunk.at, chunk.at + chunk.count)
    grouped = query.shape[1] != key.shape[1]
    if chunk.blocks is None:
        return scaled_dot_product_attention(
            query[:, :, here],
            key[:, :, here],
            value[:, :, here],
            is_causal=chunk.count > 1,
            scale=scaling,
            enable_gqa=grouped,
        )
    return scaled_dot_product_attention(
        query[:, :, here],
        layer.keys.read(chunk.blocks, query.dtype).flatten(0, 1).transpose(0, 1)[None],
        layer.values.read(chunk.blocks, query.dtype).flatten(0, 1).transpose(0, 1)[None],
        attn_mask=chunk.mask,
        scale=scaling,
        enable_gqa=grouped,
    )


def _attend_decodes(
    group: DecodeGroup, query: torch.Tensor, layer: KvLayer, scaling: float | None
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
        attn_mask=group.mask,
        scale=scaling,
    )
    return attended.reshape(len(group.at), -1, head_dim)
