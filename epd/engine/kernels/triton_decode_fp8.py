"""Attention of decodes over keys and values of eight bits.

Theory of operation
-------------------
As `triton_decode`, and half of the bytes: what was hidden behind reading no longer is,
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

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels import triton_device
from epd.engine.kernels.triton_paged import RAISED, pointers, rows, scales_at, strides
from epd.engine.kernels.triton_parts import PartSums, leave, part_at

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer

BLOCK_N, NUM_WARPS, STAGES = 64, 2, 5  # the best that was measured on an H200, of heads of 128


def _tiling(device: torch.device, block_d: int) -> tuple[int, int, int]:
    """Keys of a tile, warps and stages: as many bytes of wide heads, and sums in registers."""
    if block_d <= 128:
        return BLOCK_N, NUM_WARPS, STAGES
    if block_d <= 256:
        return BLOCK_N // 2, NUM_WARPS, STAGES
    return BLOCK_N // 2, 2 * NUM_WARPS, STAGES - triton_device.is_small(device)


@triton.jit
def _pairs(x):
    """The even and the odd numbers of pairs in 16 bits, in fp16.

    Declared impure, or the pairs would be read from memory one by one, in the product's layout.
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


@triton.jit
def _decode(
    query, keys, values, key_scales, value_scales, parts, indptr, indices, out, totals, stats,
    scale, stride, pair_stride, scale_stride, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    sequence, begin, end, place = part_at(parts, tl.program_id(1))
    if sequence < 0:
        return
    first = tl.load(indptr + sequence)
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
    leave(
        total, top, weight, place, head, g < GROUP, out, q_at, q_mask, totals, stats, NUM_HEADS,
        BLOCK_D,
    )  # fmt: skip


def decode_fp8(
    query: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    scale: float,
    out: torch.Tensor,
    sums: PartSums,
) -> None:
    keys, values, *scales = pointers(layer)
    stride, scale_stride = strides(layer)
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    group, block_d = query.shape[1] // num_kv_heads, sums.totals.shape[2]
    block_n, num_warps, stages = _tiling(query.device, block_d)
    _decode[(num_kv_heads, batch.shape.num_parts)](
        query, keys, values.view(torch.int16), *scales, batch.parts, batch.indptr, batch.indices,
        out, *sums, scale, stride, stride // 2, scale_stride, NUM_HEADS=query.shape[1],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, BLOCK_G=max(8, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_SIZE=block_size, BLOCK_N=block_n,
        STAGES=stages, num_warps=num_warps,
    )  # fmt: skip
