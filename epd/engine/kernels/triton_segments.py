"""Attention of a vision tower in Triton: segments of any lengths in one launch.

Theory of operation
-------------------
A batch of images is one row of patches, and each patch attends to its own segment (an image, a
frame, a window), in both directions.  The host lists the tiles of queries of all segments, so
neither their number nor their lengths cost launches, and a shape that was never seen needs no plan.

FlashAttention 2 on descriptors: queries, keys and values are read where the product left them, in
`[T, 3, num_heads, D]`.  The copy engine of Hopper brings them as boxes of rows; older devices load
them plainly.  A box is as wide as the next power of two of D: what it has of the next head meets
zeros in the query, and is not written.  Keys behind the segment's end are masked in its last tile
alone.  All arithmetic of the softmax is fp32, in powers of two.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


NARROW = Tiling(64, 128, 4, 2)  # heads of up to 64; both are the best that was measured on an H200
WIDE = Tiling(128, 64, 4, 2)


@triton.jit
def _step(
    total, weight, top, q, packed, n, end, column, scale,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of queries over the keys `[n, n + BLOCK_N)`."""
    k = packed.load([n, SIZE + column])
    score = tl.dot(q, k.T)
    if MASKED:
        position = n + tl.arange(0, BLOCK_N)
        score = tl.where((position < end)[None, :], score, float("-inf"))
    above = tl.maximum(top, tl.max(score, axis=1) * scale)
    p = tl.exp2(score * scale - above[:, None])
    shrink = tl.exp2(top - above)
    weight = weight * shrink + tl.sum(p, axis=1)
    v = packed.load([n, 2 * SIZE + column])
    if MASKED:  # zero times what is not finite in a neighbour's row would be this row's fault, too
        v = tl.where((position < end)[:, None], v, 0.0)
    total = tl.dot(p.to(v.dtype), v, total * shrink[:, None])
    return total, weight, above


@triton.jit
def _segments(
    packed, qkv, tiles, out, scale, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) * 3
    first = tl.load(tiles + tile)  # of the tile's queries
    start = tl.load(tiles + tile + 1)  # of the segment
    end = tl.load(tiles + tile + 2)
    column = tl.program_id(1) * HEAD_DIM
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (m < end)[:, None] & (d < HEAD_DIM)[None, :]
    row = m.to(tl.int64)[:, None]
    q = tl.load(qkv + row * 3 * SIZE + column + d[None, :], mask=mask, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = start + (end - start) // BLOCK_N * BLOCK_N
    for n in range(start, whole, BLOCK_N):
        total, weight, top = _step(
            total, weight, top, q, packed, n, end, column, scale, SIZE, BLOCK_N, False
        )
    if whole < end:
        total, weight, top = _step(
            total, weight, top, q, packed, whole, end, column, scale, SIZE, BLOCK_N, True
        )
    place = out + row * SIZE + column + d[None, :]
    tl.store(place, (total / weight[:, None]).to(q.dtype), mask=mask)


def tiling_for(head_dim: int) -> Tiling:
    return NARROW if head_dim <= 64 else WIDE


def list_segments(
    bounds: list[int], head_dim: int, room: tuple[int, int] | None = None
) -> torch.Tensor | None:
    """int32 `[num_tiles, 3]`: first query, begin and end of its segment; the longest segments
    first, since what begins last should be short."""
    block_m = tiling_for(head_dim).block_m
    segments = sorted(itertools.pairwise(bounds), key=lambda ends: ends[0] - ends[1])
    tiles = [(first, start, end) for start, end in segments for first in range(start, end, block_m)]
    if room is not None:
        patches, count = room
        most = patches // block_m + count  # each segment may end in a tile of its own
        if len(tiles) > most:
            return None
        tiles += [(0, 0, 0)] * (most - len(tiles))
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 3)


def attend_segments(qkv: torch.Tensor, segments: torch.Tensor, scaling: float) -> torch.Tensor:
    """qkv of 16 bits."""
    num_tokens, _, num_heads, head_dim = qkv.shape
    tiling = tiling_for(head_dim)
    size = num_heads * head_dim
    out = qkv.new_empty(num_tokens, size)
    block_d = max(16, triton.next_power_of_2(head_dim))
    packed = TensorDescriptor(qkv, [num_tokens, 3 * size], [3 * size, 1], [tiling.block_n, block_d])
    _segments[(len(segments), num_heads)](
        packed, qkv, segments, out, scaling * LOG2E, SIZE=size, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    return out
