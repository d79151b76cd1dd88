"""Attention of decodes over keys and values of eight bits.

Theory of operation
-------------------
As `triton_attention._decode`, and half of the bytes: what was hidden behind reading no longer is,
so little may be done for each number.

- Keys and values are the left operands: scores are `[tokens, queries]`, sums `[D, queries]`.  A
  matrix unit takes no fewer than 16 rows on its left and 8 columns on its right, so that few
  queries waste least there.
- Numbers become fp16, which holds them exactly and which one instruction makes of two.  Values are
  read as pairs of neighbours, since 16 bits is what shared memory transposes: even and odd numbers
  have sums of their own, joined at the end.
- The pipeline brings scales, too.  A tile waits for the blocks' numbers, then for what lies there:
  five stages bring one tile ahead of the one that is summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_paged import RAISED, num_parts, pointers, rows, scales_at, strides

if TYPE_CHECKING:
    from epd.engine.flat_batch import FlatBatch
    from epd.engine.kv_pool import KvLayer

BLOCK_N, NUM_WARPS, STAGES = 64, 2, 5  # the best that was measured on an H200


@triton.jit
def _pairs(x):
    """The even and the odd numbers of pairs in 16 bits, in fp16.

    Said to be impure, or the pairs would be read from memory one by one, as the product wants them.
    """
    return tl.inline_asm_elementwise(
        """{
            .reg .b16 low, high;
            .reg .b32 first, second;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            prmt.b32 $0, first, second, 0x5410;
            prmt.b32 $1, first, second, 0x7632;
        }""",
        "=r,=r,r",
        [x],
        dtype=(tl.float16, tl.float16),
        is_pure=False,
        pack=2,
    )


@triton.jit(do_not_specialize=["max_splits"])
def _decode(
    query, keys, values, key_scales, value_scales, decodes, indptr, indices, seq_lens, out, parts,
    stats, scale, stride, pair_stride, scale_stride, max_splits, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_decodes = tl.load(decodes)
    num_splits = num_parts(num_decodes, max_splits, NUM_KV_HEADS, NUM_PROGRAMS)
    if (sequence >= num_decodes) | (split >= num_splits):
        return
    length = tl.load(seq_lens + sequence)
    first = tl.load(indptr + sequence)
    part = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    begin = split * part
    end = tl.minimum(begin + part, length)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    pair = tl.arange(0, BLOCK_D // 2)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (sequence.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.trans(tl.load(query + q_at, mask=q_mask, other=0.0).to(tl.float16))
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_G], tl.float32)
    even = tl.zeros([BLOCK_D // 2, BLOCK_G], tl.float32)
    odd = tl.zeros([BLOCK_D // 2, BLOCK_G], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK_N)
        ok = position < end
        block = tl.load(indices + first + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        row = rows(block, position, kv_head, stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        k_mask = ok[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + row[:, None] + d[None, :], mask=k_mask, other=0.0)
        row = rows(block, position, kv_head, pair_stride, NUM_KV_HEADS, HEAD_DIM // 2, BLOCK_SIZE)
        v_mask = ok[:, None] & (pair < HEAD_DIM // 2)[None, :]
        v = tl.load(values + row[:, None] + pair[None, :], mask=v_mask, other=0)
        v_even, v_odd = _pairs(v)
        k_scale = scales_at(key_scales, block, position, kv_head, scale_stride, ok, BLOCK_SIZE)
        v_scale = scales_at(value_scales, block, position, kv_head, scale_stride, ok, BLOCK_SIZE)
        score = tl.dot(k.to(tl.float16), q) * (k_scale * scale)[:, None]
        score = tl.where(ok[:, None], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, axis=0))
        p = tl.exp2(score - above[None, :])
        shrink = tl.exp2(top - above)
        weight = weight * shrink + tl.sum(p, axis=0)
        p = (p * (v_scale * RAISED)[:, None]).to(tl.float16)
        even = tl.dot(tl.trans(v_even), p, even * shrink[None, :])
        odd = tl.dot(tl.trans(v_odd), p, odd * shrink[None, :])
        top = above
    total = tl.join(tl.trans(even), tl.trans(odd)).reshape(BLOCK_G, BLOCK_D) / RAISED
    if SPLIT:
        at = (sequence * NUM_HEADS + head).to(tl.int64) * max_splits + split
        tl.store(parts + at[:, None] * BLOCK_D + d[None, :], total, mask=(g < GROUP)[:, None])
        tl.store(stats + at * 2, top, mask=g < GROUP)
        tl.store(stats + at * 2 + 1, weight, mask=g < GROUP)
    else:
        total /= tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + q_at, total.to(out.dtype.element_ty), mask=q_mask)


def decode_fp8(
    grid: tuple[int, int, int],
    query: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    out: torch.Tensor,
    parts: torch.Tensor,
    stats: torch.Tensor,
    scale: float,
    sizes: dict[str, Any],
) -> None:
    """`grid`: decodes, KV heads and parts; `sizes`: as those of `triton_attention._decode`."""
    keys, values, *scales = pointers(layer)
    stride, scale_stride = strides(layer)
    _decode[grid](
        query, keys, values.view(torch.int16), *scales, batch.decodes, batch.indptr, batch.indices,
        batch.seq_lens, out, parts, stats, scale, stride, stride // 2, scale_stride, grid[2],
        **sizes, BLOCK_G=max(8, triton.next_power_of_2(sizes["GROUP"])), BLOCK_N=BLOCK_N,
        STAGES=STAGES, num_warps=NUM_WARPS,
    )  # fmt: skip
