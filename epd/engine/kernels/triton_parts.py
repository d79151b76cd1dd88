"""Parts of decodes: a program's input, its result, and how sums are joined.

A program of a decode kernel sums one part of one sequence for the queries of one KV head.  If that
is all of the sequence, it writes the result.  Otherwise it leaves an unnormalised sum with its
maximum and weight, and `join` makes the result of these (FlashDecoding).  The batch lists the parts
and where their sums lie (`decode_parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch

JOINED = 16  # sums that a program of `_join` has in its registers: most sequences have few


class PartSums(NamedTuple):
    """What programs leave, float32."""

    totals: torch.Tensor  # [num_sums, num_heads, block_d]
    stats: torch.Tensor  # [num_sums, num_heads, 2]: maximum, in powers of two, and weight


def room_for_sums(query: torch.Tensor, batch: FlatBatch, block_d: int) -> PartSums:
    shape = batch.shape.num_sums, query.shape[1]
    return PartSums(
        query.new_empty(*shape, block_d, dtype=torch.float32),
        query.new_empty(*shape, 2, dtype=torch.float32),
    )


@triton.jit
def part_at(parts, number):  # noqa: ANN201 - parts of kernels have no types
    """Its sequence (-1: there is no such part), first key, end, and place (-1: it is whole)."""
    at = parts + number * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def leave(  # noqa: ANN201
    total, top, weight, place, head, inside, out, out_at, out_mask, totals, stats,
    NUM_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`total` `[queries, BLOCK_D]`, `top` and `weight` of the part at `place`; `head`: of the
    queries, those `inside`.  `out_at`: where the result of whole sequences goes, by `out_mask`."""
    if place < 0:
        result = (total / weight[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at, result, mask=out_mask)
    else:
        at = place.to(tl.int64) * NUM_HEADS + head
        d = tl.arange(0, BLOCK_D)
        tl.store(totals + at[:, None] * BLOCK_D + d[None, :], total, mask=inside[:, None])
        tl.store(stats + at * 2, top, mask=inside)
        tl.store(stats + at * 2 + 1, weight, mask=inside)


@triton.jit
def _join(
    totals, stats, joins, out, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    join = joins + tl.program_id(1) * 3
    sequence = tl.load(join)
    if sequence < 0:
        return
    first, end = tl.load(join + 1), tl.load(join + 2)
    d = tl.arange(0, BLOCK_D)
    highest = float("-inf")
    norm = 0.0
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_S):
        place = start + tl.arange(0, BLOCK_S)
        ok = place < end
        at = place.to(tl.int64) * NUM_HEADS + head
        top = tl.load(stats + at * 2, mask=ok, other=float("-inf"))
        weight = tl.load(stats + at * 2 + 1, mask=ok, other=0.0)
        part = tl.load(totals + at[:, None] * BLOCK_D + d[None, :], mask=ok[:, None], other=0.0)
        above = tl.maximum(highest, tl.max(top, axis=0))
        share = tl.exp2(top - above)
        shrink = tl.exp2(highest - above)
        norm = norm * shrink + tl.sum(weight * share, axis=0)
        total = total * shrink + tl.sum(part * share[:, None], axis=0)
        highest = above
    at = (sequence.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out + at + d, (total / norm).to(out.dtype.element_ty), mask=d < HEAD_DIM)


def join(sums: PartSums, batch: FlatBatch, out: torch.Tensor) -> None:
    """Into `out` `[T, num_heads, head_dim]`, where sequences were cut."""
    num_heads, head_dim = out.shape[1:]
    block_d = sums.totals.shape[2]
    _join[(num_heads, batch.shape.num_joins)](
        *sums, batch.joins, out, NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_S=JOINED, num_warps=4,
    )  # fmt: skip
