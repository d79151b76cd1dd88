"""Triton kernels for products of eight bits: rows to `Scaled`, and products of few rows.

Theory of operation
-------------------
Many rows are multiplied by torch's scaled product.  Of few rows (decodes) all time goes into
reading the weights, which that product does at half of the memory's speed, so they have a kernel
here: a tile of output channels by all rows, the weights as the left operand, since a matrix unit
takes no fewer than 64 rows there and no fewer than 8 on the right.  Where there are few tiles the
sum is cut into parts; whoever ends last of a tile's parts adds them up, always in the same order,
so the same batch gives the same bits.

The counters of parts that have ended are one list for the device: products run one after another.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from epd.engine.eight_bits import FP8, LARGEST, SMALLEST_MAXIMUM, Scaled

FEW, BLOCK_N = 64, 64  # rows that this kernel multiplies at most; channels of a tile
NUM_PROGRAMS = 132  # multiprocessors of a Hopper device
MAX_TILES = 4096
PART, SMALLEST = tl.constexpr(1 / LARGEST), tl.constexpr(SMALLEST_MAXIMUM)


def empty(shape: Sequence[int], like: torch.Tensor) -> Scaled:
    """Rows of that shape, to be filled."""
    values = torch.empty(shape, dtype=FP8, device=like.device)
    num_rows = values.numel() // values.shape[-1]
    return Scaled(values, torch.empty(num_rows, 1, dtype=torch.float32, device=like.device))


@triton.jit
def store_scaled(value, out, scale, inside):  # noqa: ANN201 - a kernel's part
    """A row, whole in this program; zero outside."""
    wide = value.to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(wide), axis=0), SMALLEST) * PART
    tl.store(scale, factor)
    tl.store(out, (wide * tl.div_rn(1.0, factor)).to(tl.float8e4nv), mask=inside)


@triton.jit
def _scaled(x, out, scales, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * size + at, mask=at < size, other=0.0)
    store_scaled(value, out + row * size + at, scales + row, at < size)


def scaled(x: torch.Tensor) -> Scaled:
    rows, size = empty(x.shape, x), x.shape[-1]
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    _scaled[(x.numel() // size,)](x.contiguous(), *rows, size, BLOCK=block, num_warps=warps)
    return rows


@triton.jit
def _store(
    total, x_scales, scales, bias, out, m, n, num_rows, size, BIAS: tl.constexpr
):  # fmt: skip
    total *= tl.load(scales + n, mask=n < size, other=0.0)[:, None]
    total *= tl.load(x_scales + m, mask=m < num_rows, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    inside = (n < size)[:, None] & (m < num_rows)[None, :]
    at = m.to(tl.int64)[None, :] * size + n[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _few(
    x, x_scales, weight, scales, bias, out, parts, ended, num_rows, size, depth, part,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
    if PARTS == 1:
        _store(total, x_scales, scales, bias, out, m, n, num_rows, size, BIAS)
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
            _store(total, x_scales, scales, bias, out, m, n, num_rows, size, BIAS)


def scaled_product(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    if len(x.values) > FEW:
        return torch._scaled_mm(  # noqa: SLF001 - it has no public name
            x.values,
            weight.values.t(),
            scale_a=x.scales,
            scale_b=weight.scales.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    return _product_of_few(x, weight, bias, dtype)


def _product_of_few(
    x: Scaled, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    (num_rows, depth), size = x.values.shape, len(weight.values)
    block_m, block_n, block_k, num_parts, stages = _shape(num_rows, size, depth)
    tiles = triton.cdiv(size, block_n)
    out = torch.empty(num_rows, size, dtype=dtype, device=x.values.device)
    parts = x.scales
    if num_parts > 1:
        parts = x.scales.new_empty(tiles * num_parts * block_n * block_m)
    part = triton.cdiv(triton.cdiv(depth, block_k), num_parts) * block_k
    _few[(tiles, num_parts)](
        *x, *weight, weight.scales if bias is None else bias, out, parts, _ended(out.device),
        num_rows, size, depth, part, BIAS=bias is not None, WHOLE=depth % block_k == 0,
        PARTS=num_parts, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
        num_stages=stages,
    )  # fmt: skip
    return out


def _shape(num_rows: int, size: int, depth: int) -> tuple[int, int, int, int, int]:
    """Tile of rows, channels and depth; parts; stages of the pipeline."""
    block_m = max(16, triton.next_power_of_2(num_rows))
    tiles = triton.cdiv(size, BLOCK_N)
    if tiles > NUM_PROGRAMS:  # two programs share a multiprocessor's memory
        return block_m, BLOCK_N, 256 if block_m < FEW else 128, 1, 3
    parts = min(round(NUM_PROGRAMS / tiles), depth // 512)
    return block_m, BLOCK_N, 256, max(1, parts), 5


@functools.cache
def _ended(device: torch.device) -> torch.Tensor:
    """Of each tile, how many of its parts have ended; whoever ends last puts it back to 0."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
