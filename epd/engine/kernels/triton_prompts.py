"""Attention of prompts over keys and values that are laid side by side first.

Theory of operation
-------------------
All tiles of a prompt's queries read its keys; to find each in its block, one row of a head at a
time, costs more time than the products leave.  So a prompt's keys and values are copied, once in a
layer, row behind row into memory of their own.  There the copy engine of Hopper brings whole boxes
of them; older devices load them plainly.  Those of eight bits become the numbers that they mean,
once and not for each tile of queries.

Sequences with less than a tile of queries, and those without room, are read in their blocks
(`triton_attention`).  Both kernels decide so from the same integers on the device, since a captured
step has no lengths on the host.

A sequence begins at a multiple of `ALIGNED` rows.  The rows from its last key to the next multiple
are zero, so a box that reaches beyond the end has finite numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from epd.engine.kernels import triton_device
from epd.engine.kernels.triton_paged import pointers, strides

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer

ALIGNED = 128  # rows
MAX_NBYTES = 128 << 20  # of all prompts of a step: 32,768 tokens with 8 heads of 128, in 16 bits
PARTS = 64  # programs that copy one sequence
BOX_NBYTES = 16  # what rows must be a multiple of, for the copy engine
BLOCK_N, NUM_WARPS, NUM_STAGES = 64, 8, 3  # the best that was measured on an H200
WIDEST = 256  # head
SEVERAL = 2  # queries that every prompt has


@triton.jit
def first_row(  # noqa: ANN201 - parts of kernels have no types
    sequence, num_decodes, cu_q, indptr, seq_lens, max_rows, LEAST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where a sequence's keys and values lie; -1: in their blocks."""
    count = tl.load(cu_q + sequence + 1) - tl.load(cu_q + sequence)
    before = (tl.load(indptr + sequence) - tl.load(indptr + num_decodes)) * BLOCK_SIZE
    row = (before // ALIGNED + sequence - num_decodes) * ALIGNED
    rows = tl.cdiv(tl.load(seq_lens + sequence), ALIGNED) * ALIGNED
    return tl.where((count >= LEAST) & (row + rows <= max_rows), row, -1)


@triton.jit
def _lay(
    numbers, scales, out, block, place, length, stride, scale_stride, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One block; rows from `length` on are zero."""
    r = tl.arange(0, BLOCK_R)  # a token's head
    d = tl.arange(0, BLOCK_D)
    mask = (r < BLOCK_SIZE * NUM_KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    known = r // NUM_KV_HEADS < length
    offset = r[:, None] * HEAD_DIM + d[None, :]
    values = tl.load(numbers + block * stride + offset, mask=mask & known[:, None], other=0.0)
    if FP8:
        at = block * scale_stride + (r % NUM_KV_HEADS) * BLOCK_SIZE + r // NUM_KV_HEADS
        factor = tl.load(scales + at, mask=known & (r < BLOCK_SIZE * NUM_KV_HEADS), other=0.0)
        values = values.to(tl.float32) * factor[:, None]
    tl.store(out + place + offset, values.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_rows"])
def _gather(
    keys, values, key_scales, value_scales, out_keys, out_values, decodes, cu_q, indptr, indices,
    seq_lens, max_rows, stride, scale_stride, LEAST: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    num_decodes = tl.load(decodes)
    sequence = num_decodes + tl.program_id(1)
    row = first_row(
        sequence, num_decodes, cu_q, indptr, seq_lens, max_rows, LEAST, BLOCK_SIZE, ALIGNED
    )
    if row < 0:
        return
    length = tl.load(seq_lens + sequence)
    first = tl.load(indptr + sequence)
    end = tl.cdiv(length, ALIGNED) * ALIGNED
    for at in range(tl.program_id(0) * BLOCK_SIZE, end, tl.num_programs(0) * BLOCK_SIZE):
        block = tl.load(indices + first + at // BLOCK_SIZE, mask=at < length, other=0)
        place = (row + at).to(tl.int64) * NUM_KV_HEADS * HEAD_DIM
        _lay(
            keys, key_scales, out_keys, block.to(tl.int64), place, length - at, stride,
            scale_stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_R, FP8,
        )  # fmt: skip
        _lay(
            values, value_scales, out_values, block.to(tl.int64), place, length - at, stride,
            scale_stride, NUM_KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_R, FP8,
        )  # fmt: skip


@triton.jit
def _step(
    total, weight, top, q, keys, values, row, n, column, limit, scale,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of queries over the keys `[n, n + BLOCK_N)`; `limit`: the last that each sees."""
    k = keys.load([row + n, column])
    score = tl.dot(q, k.T)
    if MASKED:
        position = n + tl.arange(0, BLOCK_N)
        score = tl.where(position[None, :] <= limit[:, None], score, float("-inf"))
    above = tl.maximum(top, tl.max(score, axis=1) * scale)
    p = tl.exp2(score * scale - above[:, None])
    shrink = tl.exp2(top - above)
    weight = weight * shrink + tl.sum(p, axis=1)
    v = values.load([row + n, column])
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None])
    return total, weight, above


@triton.jit(do_not_specialize=["max_rows"])
def _prompts(
    query, keys, values, tiles, decodes, cu_q, indptr, seq_lens, out, scale, max_rows,
    LEAST: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(tiles + tl.program_id(1) * 2)
    if sequence < 0:
        return
    row = first_row(
        sequence, tl.load(decodes), cu_q, indptr, seq_lens, max_rows, LEAST, BLOCK_SIZE, ALIGNED
    )
    if row < 0:
        return
    m0 = tl.load(tiles + tl.program_id(1) * 2 + 1)
    m = m0 + tl.arange(0, BLOCK_M)
    head = tl.program_id(0)
    column = head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
    at = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - at
    length = tl.load(seq_lens + sequence)
    history = length - count
    d = tl.arange(0, BLOCK_D)
    mask = (m < count)[:, None] & (d < HEAD_DIM)[None, :]
    q_at = ((at + m).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + q_at, mask=mask, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = (history + m0 + 1) // BLOCK_N * BLOCK_N  # keys that every query of the tile sees
    end = tl.minimum(length, history + m0 + BLOCK_M)
    limit = history + m
    for n in range(0, whole, BLOCK_N):
        total, weight, top = _step(
            total, weight, top, q, keys, values, row, n, column, limit, scale, BLOCK_N, False
        )
    for n in range(whole, end, BLOCK_N):
        total, weight, top = _step(
            total, weight, top, q, keys, values, row, n, column, limit, scale, BLOCK_N, True
        )
    tl.store(out + q_at, (total / weight[:, None]).to(q.dtype), mask=mask)


class Laid(NamedTuple):
    """Keys and values of the prompts that `first_row` has a place for, side by side."""

    rows: torch.Tensor  # [2, rows, num_kv_heads * D], in the numbers of the queries
    are_all: bool  # the host knows that no prompt is without a place


def fits(query: torch.Tensor, layer: KvLayer) -> bool:
    """Whether prompts may be attended to this way: 16 bits, in rows for the copy engine, blocks
    that end where sequences do, heads whose tiles have room."""
    _, block_size, num_kv_heads, head_dim = layer.keys.numbers.shape
    nbytes = num_kv_heads * head_dim * query.itemsize
    is_even = nbytes % BOX_NBYTES == 0 and ALIGNED % block_size == 0
    return query.itemsize == 2 and is_even and head_dim <= WIDEST


def lay(query: torch.Tensor, layer: KvLayer, batch: FlatBatch, least: int) -> Laid:
    """Prompts with so many queries or more have a place, as long as there is room."""
    block_size, num_kv_heads, head_dim = layer.keys.numbers.shape[1:]
    width = num_kv_heads * head_dim
    prompts = batch.shape.num_sequences - batch.shape.num_decodes
    needed = len(batch.indices) * block_size // ALIGNED + prompts
    room = MAX_NBYTES // (2 * width * query.itemsize) // ALIGNED
    rows = query.new_empty(2, min(room, needed) * ALIGNED, width)
    _gather[(PARTS, prompts)](
        *pointers(layer), *rows, batch.decodes, batch.cu_q, batch.indptr, batch.indices,
        batch.seq_lens, rows.shape[1], *strides(layer), LEAST=least, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size, ALIGNED=ALIGNED,
        BLOCK_R=triton.next_power_of_2(block_size * num_kv_heads),
        FP8=layer.keys.scales is not None, num_warps=8,
    )  # fmt: skip
    have_enough = (
        least <= SEVERAL or min((chunk.count for chunk in batch.chunks), default=0) >= least
    )
    return Laid(rows, needed <= room and have_enough)


def _tiling(device: torch.device, block_d: int) -> tuple[int, int]:
    """Keys of a tile, and stages; wide heads have what memory has room for."""
    if block_d <= 128:
        return BLOCK_N, NUM_STAGES
    return 32 if triton_device.is_small(device) else BLOCK_N, 2


def attend_laid(
    query: torch.Tensor,
    rows: torch.Tensor,
    layer: KvLayer,
    batch: FlatBatch,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """Of the prompts that are laid, with a tile of queries or more.

    `scaling`: with that of powers of two.
    """
    block_size, num_kv_heads, head_dim = layer.keys.numbers.shape[1:]
    block_d = max(16, triton.next_power_of_2(head_dim))
    max_rows, width = rows.shape[1:]
    block_n, num_stages = _tiling(query.device, block_d)
    shape, pitch, box = [max_rows, width], [width, 1], [block_n, block_d]
    boxes = [TensorDescriptor(part, shape, pitch, box) for part in rows]
    _prompts[(query.shape[1], batch.shape.num_tiles)](
        query, *boxes, batch.tiles, batch.decodes, batch.cu_q, batch.indptr, batch.seq_lens, out,
        scaling, max_rows, LEAST=batch.tile_size, NUM_HEADS=query.shape[1],
        NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_SIZE=block_size,
        ALIGNED=ALIGNED, BLOCK_M=batch.tile_size, BLOCK_N=block_n, num_warps=NUM_WARPS,
        num_stages=num_stages,
    )  # fmt: skip
