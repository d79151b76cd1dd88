"""Attention of decodes: one query per sequence, its keys in parts.

Theory of operation
-------------------
All time goes into reading keys and values.  So the queries that share a KV head are one tile, its
rows padded to what a matrix unit takes.  Sequences are cut into parts of about one length
(`decode_parts`): few fill the device too, and a long one is not waited for.  A program takes one
part for one KV head; heads vary fastest, since a token's rows of all heads lie side by side.  There
is a program for each part that the batch has room for: those without one end at once.

Keys and values of eight bits have a kernel of their own (`triton_decode_fp8`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_decode_fp8 import decode_fp8
from epd.engine.kernels.triton_paged import rows
from epd.engine.kernels.triton_parts import PartSums, join, leave, part_at, room_for_sums

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer


@triton.jit
def _decode(
    query, keys, values, parts, indptr, indices, out, totals, stats, scale, stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    sequence, begin, end, place = part_at(parts, tl.program_id(1))
    if sequence < 0:
        return
    first = tl.load(indptr + sequence)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + g
    q_mask = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = (sequence.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + q_at, mask=q_mask, other=0.0)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        ok = position < end
        block = tl.load(indices + first + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        row = rows(block, position, kv_head, stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        mask = ok[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys + row[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(values + row[:, None] + d[None, :], mask=mask, other=0.0)
        if EXACT:
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(ok[None, :], score, float("-inf"))
        above = tl.maximum(top, tl.max(score, axis=1))
        p = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        weight = weight * shrink + tl.sum(p, axis=1)
        if EXACT:
            total = total * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        top = above
    leave(
        total, top, weight, place, head, g < GROUP, out, q_at, q_mask, totals, stats, NUM_HEADS,
        BLOCK_D,
    )  # fmt: skip


def attend_decodes(
    query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scale: float, out: torch.Tensor
) -> None:
    """Of the sequences with one query; `scale`: with that of powers of two."""
    sums = room_for_sums(query, batch, triton.next_power_of_2(query.shape[2]))
    if layer.keys.scales is not None:
        decode_fp8(query, layer, batch, scale, out, sums)
    else:
        _decode_plain(query, layer, batch, scale, out, sums)
    join(sums, batch, out)


def _decode_plain(
    query: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    scale: float,
    out: torch.Tensor,
    sums: PartSums,
) -> None:
    block_size, num_kv_heads, head_dim = layer.keys.numbers.shape[1:]
    group, exact = query.shape[1] // num_kv_heads, query.dtype == torch.float32
    block_d = sums.totals.shape[2]
    block_n, num_stages = 32 if exact else 64, 2 if exact or batch.shape.num_tiles else 3
    if block_d > 256:  # what memory has room for
        block_n, num_stages = 16, 1 if exact else 2
    _decode[(num_kv_heads, batch.shape.num_parts)](
        query, layer.keys.numbers, layer.values.numbers, batch.parts, batch.indptr, batch.indices,
        out, *sums, scale, layer.keys.numbers.stride(0), NUM_HEADS=query.shape[1],
        NUM_KV_HEADS=num_kv_heads, GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_SIZE=block_size, BLOCK_N=block_n, EXACT=exact,
        num_warps=4, num_stages=num_stages,
    )  # fmt: skip
