"""What adapters add to a product, in Triton.

Theory of operation
-------------------
Only the device has which row is whose, so a captured step serves any mix.  A program is a tile of
rows by one adapter and one part of the product.  It reads and writes the rows that are this
adapter's; without any it ends at once.  Rows of a sequence lie side by side, so that tiles of
prompts have one adapter or two.  Tiles of decodes have several, whose programs each read the
weights of one adapter: these bytes are what a step of decodes costs.

The first kernel makes `A x`, in parts of its sum where there are few rows.  The second adds the
parts up, in one order, multiplies by B and adds to the columns of a part.  Where these begin is
read on the device, so the compiler gets a number that divides it: else each access is of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels.low_rank import AdapterStack

FEW = 256  # rows that lie in low tiles, since each may be another adapter's
MOST_RANKS = 64  # that a program has in hand
LEAST_DEPTH, MOST_PARTS = 512, 8  # of the sum over channels
WIDE = 16  # numbers: no access is wider
NUM_PROGRAMS = 264  # two for each multiprocessor of a Hopper device


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x, places, a, ranks, inner, num_rows, depth, part_depth, PARTS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.program_id(1)  # of a place and a part
    own = tl.load(places + m, mask=m < num_rows, other=-1) == pair // PARTS
    rank = tl.load(ranks + pair)
    if rank * tl.max(own.to(tl.int32), axis=0) == 0:
        return
    k = tl.arange(0, BLOCK_K)
    begin = tl.program_id(2) * part_depth
    end = tl.minimum(begin + part_depth, depth)
    rows = x + m.to(tl.int64)[:, None] * depth + k[None, :]
    sums = inner + (tl.program_id(2).to(tl.int64) * num_rows + m[:, None]) * (PARTS * RANK)
    for first in range(0, RANK, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        channels = a + (pair.to(tl.int64) * RANK + r)[None, :] * depth + k[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for start in range(begin, end, BLOCK_K):
            inside = start + k < end
            v = tl.load(rows + start, mask=own[:, None] & inside[None, :], other=0.0)
            here = inside[:, None] & (r < rank)[None, :]
            w = tl.load(channels + start, mask=here, other=0.0)
            total = tl.dot(v, w, total, input_precision="ieee")
        at = sums + (pair % PARTS) * RANK + r[None, :]
        tl.store(at, total, mask=own[:, None] & (r < rank)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    inner, places, b, ranks, ends, out, num_rows, size, SUMS: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.program_id(2)
    own = tl.load(places + m, mask=m < num_rows, other=-1) == pair // PARTS
    part = pair % PARTS
    first_column = tl.load(ends + part) // UNIT * UNIT + tl.program_id(1) * BLOCK_N
    end = tl.load(ends + part + 1) // UNIT * UNIT
    rank = tl.load(ranks + pair)
    if (rank * tl.max(own.to(tl.int32), axis=0) == 0) | (first_column >= end):
        return
    n = first_column + tl.arange(0, BLOCK_N)
    row = m.to(tl.int64)[:, None]
    kind = out.dtype.element_ty
    place = out + row * size + n[None, :]
    mask = own[:, None] & (n < end)[None, :]
    before = tl.load(place, mask=mask, other=0.0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, RANK, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        low = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        here = own[:, None] & (r < rank)[None, :]
        at = inner + row * (PARTS * RANK) + part * RANK + r[None, :]
        for _ in range(SUMS):
            low += tl.load(at, mask=here, other=0.0)
            at += num_rows * (PARTS * RANK)
        channels = b + ((pair // PARTS).to(tl.int64) * size + n)[None, :] * RANK + r[:, None]
        w = tl.load(channels, mask=(r < rank)[:, None] & (n < end)[None, :], other=0.0)
        total = tl.dot(low.to(kind), w, total, input_precision="ieee")
    tl.store(place, (before.to(tl.float32) + total).to(kind), mask=mask)


class _Tiling(NamedTuple):
    rows: int
    columns: int
    depth: int
    num_stages: int


def _tiling(num_rows: int, itemsize: int) -> _Tiling:
    if num_rows <= FEW:
        return _Tiling(32, 64, 256 // itemsize, 3)
    return _Tiling(64, 128, 64, 3) if itemsize == 2 else _Tiling(32, 64, 32, 2)


def add_low_rank(
    out: torch.Tensor, x: torch.Tensor, low: AdapterStack, places: torch.Tensor
) -> None:
    (num_rows, size), depth = out.shape, x.shape[1]
    num_places, parts, rank, _ = low.a.shape
    tiling = _tiling(num_rows, x.itemsize)
    tiles = triton.cdiv(num_rows, tiling.rows)
    sums = max(1, min(MOST_PARTS, depth // LEAST_DEPTH, NUM_PROGRAMS // tiles))
    part_depth = triton.cdiv(triton.cdiv(depth, tiling.depth), sums) * tiling.depth
    sums = triton.cdiv(depth, part_depth)
    block = min(MOST_RANKS, max(16, triton.next_power_of_2(rank)))
    inner = torch.empty(sums, num_rows, parts * rank, dtype=torch.float32, device=x.device)
    _shrink[(tiles, num_places * parts, sums)](
        x.contiguous(), places, low.a, low.ranks, inner, num_rows, depth, part_depth, PARTS=parts,
        RANK=rank, BLOCK_M=tiling.rows, BLOCK_R=block, BLOCK_K=tiling.depth, num_warps=4,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    _expand[(tiles, triton.cdiv(low.widest, tiling.columns), num_places * parts)](
        inner, places, low.b, low.ranks, low.ends, out, num_rows, size, SUMS=sums, PARTS=parts,
        RANK=rank, UNIT=math.gcd(low.unit, WIDE), BLOCK_M=tiling.rows, BLOCK_N=tiling.columns,
        BLOCK_R=block, num_warps=4, num_stages=2,
    )  # fmt: skip
