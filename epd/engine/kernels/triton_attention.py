"""Paged attention in Triton: of decodes beside that of prompts, and prompts in tiles of queries.

Theory of operation
-------------------
Keys and values are read where they lie: a token's row is found through the sequence's block table,
one entry per `block_size` tokens.  New keys and values are in the pool already.  Those of eight
bits become fp16, which holds them exactly, before they are multiplied.  A key's scale is multiplied
into its score and a value's into its weight: one product per head and token, not per number.
*Decodes* have kernels of their own (`triton_decode`).

*Prefill* works on tiles of queries of one head (FlashAttention 2).  The host lists the tiles of all
chunks, so chunks of any lengths, with any history, are one launch.  Keys that all queries of a tile
may see are summed without a mask; only the diagonal needs one.  Chunks with a tile of queries or
more have their keys and values laid side by side first (`triton_prompts`).  Here are smaller ones,
such as drafts, those without room there, float32, wide heads and those that see a window.

In a window a tile begins with the first key that its first query sees, since blocks before may have
other owners.  It ends with the last that any of its queries sees (`FlatBatch.limits`), which may be
one behind it.  All its keys are masked, and a query may see none of the first ones.

What pads a captured batch (rows behind its decodes, tiles of no sequence) is left at once: programs
for it read nothing and write nothing.

Prompts wait for the matrix units and decodes for memory, and neither fills the device to the end.
So a captured step runs the decodes' kernels on a branch of its own, beside the prompts' kernel, and
these take so few registers that they fit beside it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels import triton_device
from epd.engine.kernels.triton_decode import attend_decodes
from epd.engine.kernels.triton_paged import RAISED, pointers, rows, scales_at, strides
from epd.engine.kernels.triton_prompts import ALIGNED, attend_laid, first_row, fits, lay

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer

LOG2E = 1.4426950408889634


@triton.jit
def _tile(
    total, weight, top, q, keys, values, key_scales, value_scales, indices, first, start, end,
    limit, own, kv_head, scale, stride, scale_stride, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr, FP8: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries over the keys `[start, end)`; `limit`: the last key each query sees,
    `own`: its own place.  Without MASKED there are whole tiles of keys, and every query sees all of
    them."""
    d = tl.arange(0, BLOCK_D)
    for n in tl.range(start, end, BLOCK_N, num_stages=STAGES):
        position = n + tl.arange(0, BLOCK_N)
        ok = (position < end) | (not MASKED)
        block = tl.load(indices + first + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        row = rows(block, position, kv_head, stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        mask = ok[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + row[:, None] + d[None, :], mask=mask, other=0.0)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        elif FP8:
            factor = scales_at(key_scales, block, position, kv_head, scale_stride, ok, BLOCK_SIZE)
            score = tl.dot(q, tl.trans(k.to(q.dtype))) * (factor * scale)[None, :]
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        if MASKED:
            seen = ok[None, :] & (position[None, :] <= limit[:, None])
            if WINDOW:
                seen = seen & (position[None, :] > own[:, None] - WINDOW)
            score = tl.where(seen, score, float("-inf"))
        above = tl.maximum(top, tl.max(score, axis=1))
        if WINDOW:  # what has seen nothing so far counts from anywhere
            above = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        weight = weight * shrink + tl.sum(p, axis=1)
        v = tl.load(values + row[:, None] + d[None, :], mask=mask, other=0.0)
        if FP8:
            factor = scales_at(value_scales, block, position, kv_head, scale_stride, ok, BLOCK_SIZE)
            p *= (factor * RAISED)[None, :]
        if EXACT:
            total = total * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            total = tl.dot(p.to(q.dtype), v.to(q.dtype), total * shrink[:, None])
        top = above
    return total, weight, top


@triton.jit
def _reach(limits, m, m0, count, history, length, WINDOW: tl.constexpr):
    """First key of a tile in a window, the one behind its last, and the last that each query
    sees."""
    limit = tl.load(limits + m, mask=m < count, other=0)
    end = tl.minimum(length, tl.max(limit, axis=0) + 1)
    return tl.maximum(0, history + m0 + 1 - WINDOW), end, limit


@triton.jit(do_not_specialize=["max_rows"])
def _prefill(
    query, keys, values, key_scales, value_scales, tiles, decodes, cu_q, indptr, indices, seq_lens,
    limits, out, scale, max_rows, stride, scale_stride, LEAST: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, WINDOW: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
    FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) // PARTS * 2
    sequence = tl.load(tile)
    if sequence < 0:
        return
    if not EXACT:
        row = first_row(
            sequence, tl.load(decodes), cu_q, indptr, seq_lens, max_rows, LEAST, BLOCK_SIZE,
            ALIGNED,
        )  # fmt: skip
        if row >= 0:
            return
    m0 = tl.load(tile + 1) + tl.program_id(1) % PARTS * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    head = tl.program_id(0)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    at = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - at
    if PARTS > 1:  # noqa: SIM102 - only this is known when it is compiled
        if m0 >= count:
            return
    length = tl.load(seq_lens + sequence)
    first = tl.load(indptr + sequence)
    history = length - count
    d = tl.arange(0, BLOCK_D)
    q_mask = (m < count)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = ((at + m).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + q_at, mask=q_mask, other=0.0)
    if FP8:
        q = q.to(tl.float16)
    top, weight = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    own = history + m
    whole = (history + m0 + 1) // BLOCK_N * BLOCK_N  # keys that every query of the tile sees
    end, limit = tl.minimum(length, history + m0 + BLOCK_M), own
    if WINDOW:
        whole, end, limit = _reach(limits + at, m, m0, count, history, length, WINDOW)
    else:
        total, weight, top = _tile(
            total, weight, top, q, keys, values, key_scales, value_scales, indices, first, 0, whole,
            limit, own, kv_head, scale, stride, scale_stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
            BLOCK_SIZE, BLOCK_N, WINDOW, False, EXACT, FP8, STAGES,
        )  # fmt: skip
    total, weight, top = _tile(
        total, weight, top, q, keys, values, key_scales, value_scales, indices, first, whole, end,
        limit, own, kv_head, scale, stride, scale_stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_D,
        BLOCK_SIZE, BLOCK_N, WINDOW, True, EXACT, FP8, STAGES,
    )  # fmt: skip
    if WINDOW:  # rows behind the last query may have seen nothing
        weight = tl.where(m < count, weight, 1.0)
    if FP8:
        weight *= RAISED
    tl.store(out + q_at, (total / weight[:, None]).to(out.dtype.element_ty), mask=q_mask)


def attend(
    query: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    scaling: float,
) -> torch.Tensor:
    return attend_with(attend_prompts, query, layer, batch, scaling)


Prompts = Callable[[torch.Tensor, "KvLayer", "FlatBatch", float], torch.Tensor]


def attend_with(
    prompts: Prompts, query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    """`prompts` gives memory for all rows, and in it those of the sequences behind the decodes."""
    shape = batch.shape
    has_decodes = bool(shape.num_decodes)
    has_prompts = bool(shape.num_tiles) and shape.num_sequences > shape.num_decodes
    beside = has_decodes and has_prompts and query.is_cuda
    branch = _Branch(query.device) if beside and torch.cuda.is_current_stream_capturing() else None
    # First: their programs need most of a multiprocessor, those of decodes little.
    out = prompts(query, layer, batch, scaling) if has_prompts else torch.empty_like(query)
    if has_decodes:
        with branch or contextlib.nullcontext():
            attend_decodes(query, layer, batch, scaling * LOG2E, out)
    return out


class _Branch:
    """A branch of a captured step: begins where it is made, and ends with its block, which runs
    beside what was launched since.

    Memory that is freed on a stream is given out again on that stream only, so the two share none.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device)
        self._stream = _branch_stream(device)
        self._stream.wait_stream(self._main)
        self._within = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._within.__enter__()

    def __exit__(self, *error: object) -> None:
        self._within.__exit__(*error)
        self._main.wait_stream(self._stream)


@functools.cache
def _branch_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Tiling(NamedTuple):
    """Keys of a tile, how many warps and stages work on it, and its queries, at most."""

    block_n: int
    num_warps: int
    num_stages: int
    most_queries: int = 128


def _prompt_tiling(device: torch.device, block_d: int) -> _Tiling:
    """Blocks are looked up one stage ahead of their keys, so 7 stages bring two tiles ahead of the
    one that is summed, where there is memory for them.  Wide heads have what there is
    room for."""
    if block_d > 256:
        is_large = triton_device.shared_nbytes(device) >= 200_000
        return _Tiling(32 if is_large else 16, 8, 2, 64 if is_large else 32)
    if block_d > 128:
        return _Tiling(16 if triton_device.is_small(device) else 32, 8, 3)
    return _Tiling(64, 8, 7 if triton_device.shared_nbytes(device) >= 170_000 else 3)


def attend_prompts(
    query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    out = torch.empty_like(query)
    max_rows, are_all = 0, False
    if fits(query, layer) and not batch.window:
        rows, are_all = lay(query, layer, batch, batch.tile_size)
        attend_laid(query, rows, layer, batch, scaling * LOG2E, out)
        max_rows = rows.shape[1]
    if not are_all:
        attend_rest(query, layer, batch, scaling, out, max_rows, batch.tile_size)
    return out


def attend_rest(
    query: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    scaling: float,
    out: torch.Tensor,
    max_rows: int,
    least: int,
) -> None:
    """Of the prompts that have no place in so many rows (`first_row`), in their blocks."""
    block_size, num_kv_heads, head_dim = layer.keys.numbers.shape[1:]
    is_fp8 = layer.keys.scales is not None
    exact = query.dtype == torch.float32 and not is_fp8
    block_d = triton.next_power_of_2(head_dim)
    tiling = _prompt_tiling(query.device, block_d)
    if is_fp8 and block_d <= 128:
        tiling = FP8_PROMPTS
    if exact:
        few = (16, 4, 1, 16) if block_d > 256 else (tiling.block_n, 4, 1)
        tiling = _Tiling(32, 4, 2) if block_d <= 128 else _Tiling(*few)
    block_m = min(batch.tile_size, tiling.most_queries)
    parts = batch.tile_size // block_m
    limits = batch.tiles if batch.limits is None else batch.limits
    # Heads vary fastest: those that share keys run side by side and find them in the cache.
    _prefill[(query.shape[1], batch.shape.num_tiles * parts)](
        query, *pointers(layer), batch.tiles, batch.decodes, batch.cu_q, batch.indptr,
        batch.indices, batch.seq_lens, limits, out, scaling * LOG2E, max_rows, *strides(layer),
        LEAST=least, NUM_HEADS=query.shape[1], NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=block_d, BLOCK_SIZE=block_size, ALIGNED=ALIGNED, WINDOW=batch.window, PARTS=parts,
        BLOCK_M=block_m, BLOCK_N=tiling.block_n, EXACT=exact, FP8=is_fp8,
        STAGES=tiling.num_stages if is_fp8 else None, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip


FP8_PROMPTS = _Tiling(128, 8, 3)  # the best that was measured on an H200; its pipeline has scales
