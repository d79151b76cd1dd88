"""Products of few rows in Triton, in eight bits or sixteen.

Theory of operation
-------------------
Of few rows (decodes) all time goes into reading the weights, so a program takes a tile of output
channels by all rows.  The weights are the left operand: a matrix unit takes at least 64 rows there
and 8 on the right.  Where there are few tiles the sum is cut into parts.  The program that ends
last adds a tile's parts up, always in the same order: the same batch gives the same bits.

The counters of parts that have ended are one list for the device: products run one after another.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels import triton_device
from epd.engine.kernels.eight_bits import Scaled

FEW, BLOCK_N = 64, 64  # rows that this kernel multiplies at most; channels of a tile
BLOCK_NBYTES = 256  # of a channel, that are read at a time
NUM_PROGRAMS = 132  # multiprocessors of a Hopper device
MAX_TILES = 4096


@triton.jit
def _store(
    total, x_scales, scales, bias, out, m, n, num_rows, size, BIAS: tl.constexpr,
    ROWS_SCALED: tl.constexpr, CHANNELS_SCALED: tl.constexpr,
):  # fmt: skip
    if CHANNELS_SCALED:
        total *= tl.load(scales + n, mask=n < size, other=0.0)[:, None]
    if ROWS_SCALED:
        total *= tl.load(x_scales + m, mask=m < num_rows, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    inside = (n < size)[:, None] & (m < num_rows)[None, :]
    at = m.to(tl.int64)[None, :] * size + n[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_sum(  # noqa: ANN201 - a kernel's part
    total, x_scales, scales, bias, out, parts, ended, num_rows, size, BIAS: tl.constexpr,
    ROWS_SCALED: tl.constexpr, CHANNELS_SCALED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile's sum, or this program's part of it, `[BLOCK_N, BLOCK_M]`."""
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if PARTS == 1:
        _store(
            total, x_scales, scales, bias, out, m, n, num_rows, size, BIAS, ROWS_SCALED,
            CHANNELS_SCALED,
        )  # fmt: skip
    else:
        area: tl.constexpr = BLOCK_N * BLOCK_M
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        mine = parts + (tile * PARTS).to(tl.int64) * area + at
        tl.store(mine + tl.program_id(1) * area, total)
        tl.debug_barrier()
        if tl.atomic_add(ended + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(ended + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in range(PARTS):
                total += tl.load(mine + other * area, cache_modifier=".cg")
            _store(
                total, x_scales, scales, bias, out, m, n, num_rows, size, BIAS, ROWS_SCALED,
                CHANNELS_SCALED,
            )  # fmt: skip


@triton.jit
def _few(
    x, x_scales, weight, scales, bias, out, parts, ended, num_rows, size, depth, part,
    BIAS: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, depth)
    rows = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    columns = x + m[:, None] * depth + k[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = WHOLE | (start + k < depth)[None, :]
        w = tl.load(rows + start, mask=inside & (n < size)[:, None], other=0.0)
        v = tl.load(columns + start, mask=inside & (m < num_rows)[:, None], other=0.0)
        total = tl.dot(w, tl.trans(v), total)
    store_sum(
        total, x_scales, scales, bias, out, parts, ended, num_rows, size, BIAS, SCALED, SCALED,
        PARTS, BLOCK_M, BLOCK_N,
    )  # fmt: skip


class _Tiling(NamedTuple):
    rows: int
    depth: int  # channels of the input that are read at a time
    parts: int  # of the sum
    num_stages: int


def product_of_few(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Of `[n, depth]` with n up to FEW, in 16 bits."""
    return _product(x, weight, None, bias, x.dtype)


def scaled_product_of_few(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Likewise in eight bits."""
    return _product(x.values, weight.values, (x.scales, weight.scales), bias, dtype)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    (num_rows, depth), size = x.shape, len(weight)
    tiling = _tiling(num_rows, size, depth, x.itemsize, triton_device.shared_nbytes(x.device))
    tiles, parts = triton.cdiv(size, BLOCK_N), tiling.parts
    out = torch.empty(num_rows, size, dtype=dtype, device=x.device)
    sums = out
    if parts > 1:
        shape = tiles * parts * BLOCK_N * tiling.rows
        sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    part = triton.cdiv(triton.cdiv(depth, tiling.depth), parts) * tiling.depth
    x_scales, weight_scales = scales or (out, out)
    _few[(tiles, parts)](
        x, x_scales, weight, weight_scales, out if bias is None else bias, out, sums,
        ended_of(out.device), num_rows, size, depth, part, BIAS=bias is not None,
        SCALED=scales is not None, WHOLE=depth % tiling.depth == 0, PARTS=parts,
        BLOCK_M=tiling.rows, BLOCK_N=BLOCK_N, BLOCK_K=tiling.depth, num_warps=4,
        num_stages=tiling.num_stages,
    )  # fmt: skip
    return out


def _tiling(num_rows: int, size: int, depth: int, itemsize: int, shared: int) -> _Tiling:
    rows, tiles = max(16, triton.next_power_of_2(num_rows)), triton.cdiv(size, BLOCK_N)
    block = BLOCK_NBYTES // itemsize
    if tiles > NUM_PROGRAMS:  # two programs share a multiprocessor's memory
        return _Tiling(rows, block if rows < FEW else block // 2, 1, 3)
    parts = min(round(NUM_PROGRAMS / tiles), depth // (2 * block))
    held = shared // ((BLOCK_N + rows) * BLOCK_NBYTES)  # of weights and rows, on their way
    return _Tiling(rows, block, max(1, parts), min(5, 1 + held))


@functools.cache
def ended_of(device: torch.device) -> torch.Tensor:
    """Of each tile, how many of its parts have ended; whoever ends last puts it back to 0."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
