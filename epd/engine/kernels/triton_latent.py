"""Triton kernels of latent attention: functions and arguments are those of `torch_latent`.

Theory of operation
-------------------
*Decodes* read latent rows where they lie.  All heads share a row, so a program takes many heads as
the rows of its products, and the same tile of rows is key and value.  Rows of eight bits have a
scale each, for latent and key together; scores, and then weights, are multiplied by it.  Parts of
sequences are those of the batch (`triton_parts`).

*Prompts* attend, in tiles of queries of one head, to keys and values that were expanded for all
queries of their chunk.  The key's last part stays in the latent row, which all heads share.  Keys
that all queries of a tile see are summed without a mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels import eight_bits, triton_device
from epd.engine.kernels.triton_paged import RAISED, scales_at
from epd.engine.kernels.triton_paged import rows as rows_at
from epd.engine.kernels.triton_parts import join, leave, part_at, room_for_sums

if TYPE_CHECKING:
    from epd.engine.kernels.torch_latent import Expanded, Norm
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvPart

__all__ = ["attend_expanded", "attend_latent", "store_latent", "turn_queries"]
LOG2E = 1.4426950408889634
LARGEST = tl.constexpr(eight_bits.LARGEST)
INVERSE = tl.constexpr(1 / eight_bits.LARGEST)
SMALLEST = tl.constexpr(eight_bits.SMALLEST_MAXIMUM)


@triton.jit
def _normed(place, gain, eps, at, inside, SIZE: tl.constexpr):
    """A row's numbers `at`, normed as transformers' modules round."""
    value = tl.load(place + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    factor = tl.load(gain + at, mask=inside, other=0.0)
    return ((wide * scale).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)).to(value.dtype)


@triton.jit
def _turned(
    place, cos, sin, token, inside, at, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The two halves of rows at `place` (a column), turned, as they are stored."""
    low_at, high_at = at, at + HALF
    if INTERLEAVED:
        low_at, high_at = 2 * at, 2 * at + 1
    low = tl.load(place + low_at, mask=inside, other=0.0)
    high = tl.load(place + high_at, mask=inside, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    angle = token * 2 * HALF + at
    c = tl.load(cos + angle, mask=at < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=at < HALF, other=0.0).to(tl.float32)
    return (a * c - b * s).to(low.dtype), (b * c + a * s).to(low.dtype)


@triton.jit
def _store_latent(
    rows, rank_gain, gain, cos, sin, slots, ranks, pool, scales, rank_eps, eps, stride,
    scale_stride, NUM_RANKS: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, INTERLEAVED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = rows + token * (NUM_RANKS + LATENT + 2 * HALF)
    if tl.program_id(1) == 1:
        q = tl.arange(0, BLOCK_Q)
        ranked = _normed(row, rank_gain, rank_eps, q, q < NUM_RANKS, NUM_RANKS)
        tl.store(ranks + token * NUM_RANKS + q, ranked, mask=q < NUM_RANKS)
    else:
        slot = tl.load(slots + token).to(tl.int64)  # what pads has none
        block = slot // BLOCK_SIZE
        target = pool + rows_at(block, slot, 0, stride, 1, LATENT + 2 * HALF, BLOCK_SIZE)
        c, h = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_HALF)
        latent = _normed(row + NUM_RANKS, gain, eps, c, c < LATENT, LATENT)
        key = row + NUM_RANKS + LATENT
        low, high = _turned(key, cos, sin, token, h < HALF, h, HALF, INTERLEAVED)
        if FP8:
            latent, low, high = latent.to(tl.float32), low.to(tl.float32), high.to(tl.float32)
            halves = tl.maximum(tl.max(tl.abs(low), axis=0), tl.max(tl.abs(high), axis=0))
            most = tl.maximum(tl.max(tl.abs(latent), axis=0), halves)
            scale = tl.maximum(most, SMALLEST) * INVERSE
            place = scales + block * scale_stride + slot % BLOCK_SIZE
            tl.store(place, scale, mask=slot >= 0)
            latent, low, high = _eighth(latent, scale), _eighth(low, scale), _eighth(high, scale)
        tl.store(target + c, latent, mask=(c < LATENT) & (slot >= 0))
        stored = (h < HALF) & (slot >= 0)
        tl.store(target + LATENT + h, low, mask=stored)
        tl.store(target + LATENT + HALF + h, high, mask=stored)


@triton.jit
def _eighth(x, scale):
    return tl.clamp(x * (1.0 / scale), -LARGEST, LARGEST).to(tl.float8e4nv)


def store_latent(
    rows: torch.Tensor,
    norms: tuple[Norm, Norm],
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool: KvPart,
    *,
    interleaved: bool,
) -> torch.Tensor:
    (rank_gain, rank_eps), (gain, eps) = norms
    num_ranks, num_latent, half = len(rank_gain), len(gain), cos.shape[1] // 2
    ranks = rows.new_empty(len(rows), num_ranks)
    scales, scale_stride = _scales(pool)
    _store_latent[(len(rows), 2)](
        rows, rank_gain, gain, cos, sin, slots, ranks, pool.numbers, scales, rank_eps, eps,
        pool.numbers.stride(0), scale_stride, NUM_RANKS=num_ranks, LATENT=num_latent, HALF=half,
        BLOCK_Q=triton.next_power_of_2(num_ranks), BLOCK_L=triton.next_power_of_2(num_latent),
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_SIZE=pool.numbers.shape[1],
        INTERLEAVED=interleaved, FP8=pool.scales is not None, num_warps=4,
    )  # fmt: skip
    return ranks


def _scales(pool: KvPart) -> tuple[torch.Tensor, int]:
    """Of eight bits, and from block to block; where there are none, anything."""
    return (pool.numbers, 0) if pool.scales is None else (pool.scales, pool.scales.stride(0))


@triton.jit
def _turn_queries(
    query, cos, sin, out, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)[:, None]
    row = token * NUM_HEADS + head
    place = query + row * HEAD_DIM + HEAD_DIM - 2 * HALF
    at = tl.arange(0, BLOCK_HALF)[None, :]
    stored = (at < HALF) & (head < NUM_HEADS)
    low, high = _turned(place, cos, sin, token, stored, at, HALF, INTERLEAVED)
    target = out + row * 2 * HALF + at
    tl.store(target, low, mask=stored)
    tl.store(target + HALF, high, mask=stored)


def turn_queries(
    query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = query.shape
    out = query.new_empty(num_tokens, num_heads, cos.shape[1])
    group, half = min(16, triton.next_power_of_2(num_heads)), cos.shape[1] // 2
    _turn_queries[(num_tokens, triton.cdiv(num_heads, group))](
        query, cos, sin, out, NUM_HEADS=num_heads, HEAD_DIM=head_dim, HALF=half, GROUP=group,
        BLOCK_HALF=triton.next_power_of_2(half), INTERLEAVED=interleaved, num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _product(a, b, total, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a.to(b.dtype), b, total)


@triton.jit
def _decode(
    query, turned, pool, scales, parts, indptr, indices, out, totals, stats, scale, token_stride,
    head_stride, stride, scale_stride, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    LATENT: tl.constexpr, BLOCK_L: tl.constexpr, TURNED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    sequence, begin, end, place = part_at(parts, tl.program_id(1))
    if sequence < 0:
        return
    first = tl.load(indptr + sequence)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = head < NUM_HEADS
    c = tl.arange(0, BLOCK_L)
    t = tl.arange(0, BLOCK_T)
    q_at = query + sequence.to(tl.int64) * token_stride + head[:, None] * head_stride
    mask = inside[:, None] & (c < LATENT)[None, :]
    q = tl.load(q_at + c[None, :], mask=mask, other=0.0)
    row_of = (sequence.to(tl.int64) * NUM_HEADS + head)[:, None]
    t_mask = inside[:, None] & (t < TURNED)[None, :]
    q_turned = tl.load(turned + row_of * TURNED + t[None, :], mask=t_mask, other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_H], tl.float32)
    total = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        ok = position < end
        block = tl.load(indices + first + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        row = pool + rows_at(block, position, 0, stride, 1, LATENT + TURNED, BLOCK_SIZE)[:, None]
        seen = ok[:, None] & (c < LATENT)[None, :]
        latent = tl.load(row + c[None, :], mask=seen, other=0.0)
        seen = ok[:, None] & (t < TURNED)[None, :]
        key = tl.load(row + LATENT + t[None, :], mask=seen, other=0.0)
        if FP8:
            latent, key = latent.to(q.dtype), key.to(q.dtype)
        score = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        score = _product(q, tl.trans(latent), score, EXACT)
        score = _product(q_turned, tl.trans(key), score, EXACT) * scale
        if FP8:
            own = scales_at(scales, block, position, 0, scale_stride, ok, BLOCK_SIZE)
            score = score * own[None, :]
        score = tl.where(ok[None, :], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, axis=1))
        p = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        weight = weight * shrink + tl.sum(p, axis=1)
        if FP8:
            p = p * (own * RAISED)[None, :]
        total = _product(p, latent, total * shrink[:, None], EXACT)
        top = above
    if FP8:
        total = total / RAISED
    leave(
        total, top, weight, place, head, inside, out, row_of * LATENT + c[None, :], mask, totals,
        stats, NUM_HEADS, BLOCK_L,
    )  # fmt: skip


class _Tiling(NamedTuple):
    heads: int
    rows: int
    num_warps: int
    num_stages: int


def _decode_tiling(query: torch.Tensor) -> _Tiling:
    """Fits the registers and memory of a multiprocessor of Hopper, as the compiler reports them.
    Blocks are looked up ahead of their rows, so 5 stages bring one or two tiles ahead."""
    if query.dtype == torch.float32:
        return _Tiling(16, 16, 4, 1)
    num_heads = query.shape[1]
    if num_heads <= 16 or triton_device.is_small(query.device):
        return _Tiling(16, 32, 4, 5)
    return _Tiling(64, 32, 8, 5) if num_heads > 32 else _Tiling(32, 64, 8, 5)


def attend_latent(
    query: torch.Tensor, turned: torch.Tensor, pool: KvPart, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    num_heads, num_latent = query.shape[1:]
    tiling = _decode_tiling(query)
    # No part is of what pads, and that must be finite.
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    block_l = max(16, triton.next_power_of_2(num_latent))
    sums = room_for_sums(query, batch, block_l)
    scales, scale_stride = _scales(pool)
    _decode[(triton.cdiv(num_heads, tiling.heads), batch.shape.num_parts)](
        query, turned, pool.numbers, scales, batch.parts, batch.indptr, batch.indices, out, *sums,
        scaling * LOG2E, query.stride(0), query.stride(1), pool.numbers.stride(0), scale_stride,
        NUM_HEADS=num_heads, BLOCK_H=tiling.heads, LATENT=num_latent, BLOCK_L=block_l,
        TURNED=turned.shape[2], BLOCK_T=max(16, triton.next_power_of_2(turned.shape[2])),
        BLOCK_SIZE=pool.numbers.shape[1], BLOCK_N=tiling.rows, EXACT=query.dtype == torch.float32,
        FP8=pool.scales is not None, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    join(sums, batch, out)
    return out


@triton.jit
def _keys(
    total, weight, top, q, q_turned, numbers, rows, start, end, limit, scale, pitch, row_pitch,
    KEY: tl.constexpr, BLOCK_K: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr,
    TURNED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """One tile of queries over the keys `[start, end)`; `limit`: the last key each query sees.
    Without MASKED there are whole tiles of keys, and every query sees all of them."""
    k, v, t = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_T)
    for n in range(start, end, BLOCK_N):
        position = n + tl.arange(0, BLOCK_N)
        ok = ((position < end) | (not MASKED))[:, None]
        row = numbers + position.to(tl.int64)[:, None] * pitch
        key = tl.load(row + k[None, :], mask=ok & (k < KEY)[None, :], other=0.0)
        shared = tl.load(
            rows + position.to(tl.int64)[:, None] * row_pitch + t[None, :],
            mask=ok & (t < TURNED)[None, :], other=0.0,
        )  # fmt: skip
        score = tl.zeros([q.shape[0], BLOCK_N], tl.float32)
        score = _product(q, tl.trans(key), score, EXACT)
        score = _product(q_turned, tl.trans(shared), score, EXACT) * scale
        if MASKED:
            score = tl.where(position[None, :] <= limit[:, None], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, axis=1))
        p = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        weight = weight * shrink + tl.sum(p, axis=1)
        value = tl.load(row + KEY + v[None, :], mask=ok & (v < VALUE)[None, :], other=0.0)
        total = _product(p, value, total * shrink[:, None], EXACT)
        top = above
    return total, weight, top


@triton.jit(do_not_specialize=["first_sequence", "end_sequence", "first_head"])
def _prompts(
    query, turned, numbers, rows, tiles, cu_q, indptr, seq_lens, out, first_sequence, end_sequence,
    first_head, scale, pitch, row_pitch, NUM_HEADS: tl.constexpr, KEY: tl.constexpr,
    BLOCK_K: tl.constexpr, VALUE: tl.constexpr, BLOCK_V: tl.constexpr, TURNED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(tiles + tl.program_id(1) * 2)
    if (sequence < first_sequence) | (sequence >= end_sequence):
        return
    m0 = tl.load(tiles + tl.program_id(1) * 2 + 1)
    m = m0 + tl.arange(0, BLOCK_M)
    at = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - at
    length = tl.load(seq_lens + sequence)
    begin = (tl.load(indptr + sequence) - tl.load(indptr + first_sequence)) * BLOCK_SIZE
    numbers += begin.to(tl.int64) * pitch + tl.program_id(0) * (KEY + VALUE)
    rows += begin.to(tl.int64) * row_pitch + row_pitch - TURNED
    k, v, t = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_T)
    known = (m < count)[:, None]
    query_row = ((at + m).to(tl.int64) * NUM_HEADS + first_head + tl.program_id(0))[:, None]
    q_at = query + query_row * (KEY + TURNED) + k[None, :]
    q = tl.load(q_at, mask=known & (k < KEY)[None, :], other=0.0)
    t_at = turned + query_row * TURNED + t[None, :]
    q_turned = tl.load(t_at, mask=known & (t < TURNED)[None, :], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    limit = length - count + m
    whole = (length - count + m0 + 1) // BLOCK_N * BLOCK_N  # keys that all queries of the tile see
    end = tl.minimum(length, length - count + m0 + BLOCK_M)
    total, weight, top = _keys(
        total, weight, top, q, q_turned, numbers, rows, 0, whole, limit, scale, pitch, row_pitch,
        KEY, BLOCK_K, VALUE, BLOCK_V, TURNED, BLOCK_T, BLOCK_N, False, EXACT,
    )  # fmt: skip
    total, weight, top = _keys(
        total, weight, top, q, q_turned, numbers, rows, whole, end, limit, scale, pitch, row_pitch,
        KEY, BLOCK_K, VALUE, BLOCK_V, TURNED, BLOCK_T, BLOCK_N, True, EXACT,
    )  # fmt: skip
    place = out + query_row * VALUE + v[None, :]
    result = (total / weight[:, None]).to(out.dtype.element_ty)
    tl.store(place, result, mask=known & (v < VALUE)[None, :])


def attend_expanded(
    query: torch.Tensor,
    turned: torch.Tensor,
    expanded: Expanded,
    batch: FlatBatch,
    scaling: float,
    out: torch.Tensor,
) -> None:
    numbers, rows = expanded.numbers, expanded.rows
    key_dim, exact = numbers.shape[2] - out.shape[2], query.dtype == torch.float32
    block_k, block_v, block_t = (
        max(16, triton.next_power_of_2(size)) for size in (key_dim, out.shape[2], turned.shape[2])
    )
    _prompts[(numbers.shape[1], batch.shape.num_tiles)](
        query, turned, numbers, rows, batch.tiles, batch.cu_q, batch.indptr, batch.seq_lens, out,
        expanded.sequences.start, expanded.sequences.stop, expanded.first_head, scaling * LOG2E,
        numbers.stride(0), rows.stride(0), NUM_HEADS=query.shape[1], KEY=key_dim, BLOCK_K=block_k,
        VALUE=out.shape[2], BLOCK_V=block_v, TURNED=turned.shape[2], BLOCK_T=block_t,
        BLOCK_SIZE=expanded.block_size, BLOCK_M=batch.tile_size, BLOCK_N=16 if exact else 64,
        EXACT=exact, num_warps=8, num_stages=1 if exact else 3,
    )  # fmt: skip
