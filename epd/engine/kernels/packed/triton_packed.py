"""Products with packed weights in Triton.

Theory of operation
-------------------
Of few rows (decodes) the time goes into reading the weight.  It is made wide in registers on its
way to the matrix unit, whose left operand it is; parts of sums are those of `triton_few`.  Numbers
of four bits lie as a thread needs them (`tiles`): what is read goes into the unit without another
way through shared memory.  Where a thread's numbers have a scale of their own, each is multiplied
by it, of e2m1 by the multiplication that is there already.  Else the sum is.

No product is the sum that a loop carries.  Triton 3.6 lets such a one run on while the next numbers
are made, in registers that it still reads.  On an H200 groups of eight rows of 64 were wrong.

Of experts a program has a tile of the rows that chose one, in the place of all rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from epd.engine.kernels.packed import Packed, tiles
from epd.engine.kernels.packed.triton_numbers import (
    EIGHT,
    FP4,
    FP8,
    NO_ZERO,
    both,
    halves,
    scale_of,
    widening,
)
from epd.engine.kernels.packed.triton_widened import given, widened
from epd.engine.kernels.routing import Routed
from epd.engine.kernels.triton_experts import Placed, placed, rows_of_tile, weighed
from epd.engine.kernels.triton_few import FEW, NUM_PROGRAMS, ended_of, store_sum
from epd.engine.kernels.triton_ops import silu_mul

CHUNK = tl.constexpr(tiles.COLUMNS)
LEAST_LAID = 16  # rows of which more are put in the order of tiles ahead of a product


@triton.jit
def _of_threads(
    given, row, lane, column, groups, HALF: tl.constexpr, COLUMNS: tl.constexpr, OWN: tl.constexpr
):  # fmt: skip
    """`[R, 128]` of what groups of columns have: of a thread's in a half of a tile."""
    if OWN:
        group = (column + HALF * 16 + lane % 4 * 32) // COLUMNS
    else:
        group = (column + HALF * 64) // COLUMNS
    return tl.reshape(tl.load(given + row * groups + group), [row.shape[0] // 128, 128])


@triton.jit
def _of_halves(given, row, lane, column, groups, COLUMNS: tl.constexpr, OWN: tl.constexpr):
    """Likewise of the upper and lower row, for the first half and for the second."""
    a = _of_threads(given, row, lane, column, groups, 0, COLUMNS, OWN)
    b = _of_threads(given, row + 8, lane, column, groups, 0, COLUMNS, OWN)
    c, d = a, b
    if (32 if OWN else 128) > COLUMNS:
        c = _of_threads(given, row, lane, column, groups, 1, COLUMNS, OWN)
        d = _of_threads(given, row + 8, lane, column, groups, 1, COLUMNS, OWN)
    return a, b, c, d


@triton.jit
def _sum_of_four(
    columns, is_row, numbers, scales, zeros, first, depth, begin, end, groups,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr,
    OWN: tl.constexpr, ONCE: tl.constexpr, LAID: tl.constexpr, WIDENING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`[BLOCK_N, BLOCK_M]`: of columns from `begin` to `end`; `columns` `[BLOCK_M, 1]` are where
    inputs begin."""
    kind: tl.constexpr = columns.dtype.element_ty
    tiles: tl.constexpr = BLOCK_N // 64
    lane, word = tl.arange(0, 128 * tiles), tl.arange(0, 512)
    row = first + lane // 32 * 16 + lane % 32 // 4
    n, tile = first + tl.arange(0, BLOCK_N), first // 64 + tl.arange(0, tiles)
    words = numbers + tile.to(tl.int64)[:, None] * (depth * 8) + word[None, :]
    p = tl.arange(0, 64)
    if OWN and not LAID:
        p = p // 2 % 4 * 32 + p // 16 * 4 + p // 8 % 2 * 2 + p % 2
        p = tl.max_contiguous(tl.multiple_of(p, 2), 2)
    second: tl.constexpr = 16 if OWN and not LAID else 64
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    none = tl.full([tiles, 128], NO_ZERO, tl.uint8)
    less = none, none, none, none
    scale, by = less, n
    if OWN:
        scale = _of_halves(scales, row, lane, begin, groups, COLUMNS, OWN)
    elif not ONCE:
        by = tl.load(scales + n * groups + begin // COLUMNS)
    if ZEROS:
        less = _of_halves(zeros, row, lane, begin, groups, COLUMNS, OWN)
    for start in range(begin, end, CHUNK):
        upper = tl.reshape(tl.load(words + start * 8), [tiles, 128, 4])
        lower = tl.reshape(tl.load(words + start * 8 + 512), [tiles, 128, 4])
        given = tl.load(columns + start + p[None, :], mask=is_row, other=0.0)
        behind = tl.load(columns + start + second + p[None, :], mask=is_row, other=0.0)
        now, above, this = scale, less, by
        # Those of the next tile, which are here when this one is done.
        after = tl.minimum(start + CHUNK, depth - CHUNK)
        if OWN:
            scale = _of_halves(scales, row, lane, after, groups, COLUMNS, OWN)
        elif not ONCE:
            by = tl.load(scales + n * groups + after // COLUMNS)
        if ZEROS:
            less = _of_halves(zeros, row, lane, after, groups, COLUMNS, OWN)
        value = halves(upper, above, now, 0, KIND, OWN, E8M0, WIDENING, kind)
        other = halves(lower, above, now, 2, KIND, OWN, E8M0, WIDENING, kind)
        if COLUMNS == 64 and not ONCE:
            total += tl.dot(value, tl.trans(given)) * scale_of(this, E8M0)[:, None]
            this = tl.load(scales + n * groups + start // COLUMNS + 1)
            total += tl.dot(other, tl.trans(behind)) * scale_of(this, E8M0)[:, None]
        else:
            product = tl.dot(value, tl.trans(given))
            product = tl.dot(other, tl.trans(behind), product)
            total += product if OWN or ONCE else product * scale_of(this, E8M0)[:, None]
    if KIND == FP4 and WIDENING != "":
        total *= 128.0
    return total


@triton.jit
def _sum_of_eight(
    columns, is_row, numbers, scales, first, size, depth, begin, end, groups, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, E8M0: tl.constexpr, ONCE: tl.constexpr, WIDENING: tl.constexpr,
    WHOLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Likewise of numbers of eight bits."""
    kind: tl.constexpr = columns.dtype.element_ty
    n, k = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    here = n < size
    rows = n.to(tl.int64)[:, None] * depth
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = (WHOLE | (start + k < depth))[None, :]
        if WIDENING == "":
            value = tl.load(numbers + rows + start + k[None, :], mask=inside & here[:, None])
            value = value.to(kind)
            if not WHOLE:
                value = tl.where(inside, value, 0.0)
        else:
            two = rows // 2 + start // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
            value = tl.load(numbers + two, mask=here[:, None]).to(tl.int32)
            value = tl.inline_asm_elementwise(WIDENING, "=r,r", [value], tl.int32, True, 1)
            value = tl.reshape(both(value, kind), [BLOCK_N, BLOCK_K])
        given = tl.load(columns + start + k[None, :], mask=inside & is_row, other=0.0)
        at = n // ROWS * groups + (0 if ONCE else start // COLUMNS)
        scale = scale_of(tl.load(scales + at, mask=here), E8M0)
        total += tl.dot(value, tl.trans(given)) * scale[:, None]
    return total


@triton.jit
def _sum(
    columns, is_row, numbers, scales, zeros, first, size, depth, begin, end, groups,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, OWN: tl.constexpr, ONCE: tl.constexpr, WHOLE: tl.constexpr,
    LAID: tl.constexpr, WIDENING: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    if KIND == FP8:
        total = _sum_of_eight(
            columns, is_row, numbers, scales, first, size, depth, begin, end, groups, ROWS, COLUMNS,
            E8M0, ONCE, WIDENING, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = _sum_of_four(
            columns, is_row, numbers, scales, zeros, first, depth, begin, end, groups, KIND,
            COLUMNS, E8M0, ZEROS, OWN, ONCE, LAID, WIDENING, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if ONCE and KIND != FP8:
        n = first + tl.arange(0, BLOCK_N)
        total *= scale_of(tl.load(scales + n // ROWS, mask=n < size), E8M0)[:, None]
    return total


@triton.jit
def _few(
    x, numbers, scales, zeros, gains, bias, out, parts, ended, num_rows, size, depth, part, groups,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, GAINS: tl.constexpr, OWN: tl.constexpr, ONCE: tl.constexpr,
    WHOLE: tl.constexpr, LAID: tl.constexpr, BIAS: tl.constexpr, WIDENING: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(1) * part
    m = tl.arange(0, BLOCK_M)[:, None]
    total = _sum(
        x + m * depth, m < num_rows, numbers, scales, zeros, tl.program_id(0) * BLOCK_N, size,
        depth, begin, tl.minimum(begin + part, depth), groups, KIND, ROWS, COLUMNS, E8M0, ZEROS,
        OWN, ONCE, WHOLE, LAID, WIDENING, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    store_sum(
        total, gains, gains, bias, out, parts, ended, num_rows, size, BIAS, False, GAINS, PARTS,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _experts(
    x, numbers, scales, zeros, gains, out, pairs, tiles, size, depth, groups, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr,
    GAINS: tl.constexpr, OWN: tl.constexpr, ONCE: tl.constexpr, WHOLE: tl.constexpr,
    LAID: tl.constexpr, WIDENING: tl.constexpr, SHARED: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(size, BLOCK_N)
    tile = tl.program_id(0) // num_columns
    num_rows = tl.load(tiles + 2 * tile + 1)
    if num_rows <= 0:
        return
    first = tl.program_id(0) % num_columns * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(pairs + tile * BLOCK_M + m, mask=m < num_rows, other=0).to(tl.int64)
    expert = tl.load(tiles + 2 * tile).to(tl.int64)
    scaled = expert * tl.cdiv(size, ROWS) * groups
    total = _sum(
        x + (pair // SHARED * depth)[:, None], (m < num_rows)[:, None],
        numbers + expert * size * depth // ITEMS, scales + scaled, zeros + scaled, first, size,
        depth, 0, depth, groups, KIND, ROWS, COLUMNS, E8M0, ZEROS, OWN, ONCE, WHOLE, LAID,
        WIDENING, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    n = first + tl.arange(0, BLOCK_N)
    if GAINS:
        total *= tl.load(gains + expert * size + n, mask=n < size, other=0.0)[:, None]
    at = out + (pair * size)[None, :] + n[:, None]
    inside = (n < size)[:, None] & (m < num_rows)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def packed_product(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    if 0 < len(x) <= FEW and x.itemsize == 2 and (weight.tiled or weight.kind == "fp8"):
        return _product_of_few(x, weight, bias)
    return functional.linear(x, widened(weight, x.dtype), bias)


def _given_to_few(
    x: torch.Tensor, weight: Packed, rows: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, int | str]]:
    """Inputs, and likewise; bfloat16 is made in PTX, which the interpreter has not."""
    (tensors, kinds), depth, columns = given(weight), weight.shape[-1], weight.block[1]
    ptx, block_k = "", 128 if columns >= depth else math.gcd(128, columns)
    is_whole = depth % block_k == 0
    is_laid = weight.tiled and weight.own and rows > LEAST_LAID
    if is_laid:
        x = tiles.laid_out(x)
    if x.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret:
        if weight.tiled:
            ptx = widening(weight.kind, own=weight.own)
        elif is_whole:
            ptx, tensors = EIGHT, (tensors[0].view(torch.int16), *tensors[1:])
    kinds |= {"ONCE": columns >= depth, "WHOLE": is_whole, "LAID": is_laid, "BLOCK_K": block_k}
    return x.contiguous(), tensors, {**kinds, "WIDENING": ptx}


class ProductTiling(NamedTuple):
    """Of products of few rows."""

    block_n: int
    warps: int
    stages: int
    share: int  # of programs for each multiprocessor, at most


def tiling(weight: Packed, num_rows: int) -> ProductTiling:
    if weight.own and weight.shape[-2] % 128 == 0:
        return ProductTiling(128, 4, 3, 4)
    return ProductTiling(64, 4, 3, 4)


def _product_of_few(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    (size, depth), num_rows = weight.shape, len(x)
    x, tensors, kinds = _given_to_few(x, weight, num_rows)
    block_n, warps, stages, share = tiling(weight, num_rows)
    block_m = max(16, triton.next_power_of_2(num_rows))
    num_tiles = triton.cdiv(size, block_n)
    chunks = triton.cdiv(depth, 128)
    part = triton.cdiv(chunks, max(1, min(share * NUM_PROGRAMS // num_tiles, chunks // 2)))
    parts = triton.cdiv(chunks, part)
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    sums = out
    if parts > 1:
        sums = x.new_empty(num_tiles * parts * block_n * block_m, dtype=torch.float32)
    _few[(num_tiles, parts)](
        x, *tensors, out if bias is None else bias, out, sums, ended_of(x.device), num_rows, size,
        depth, part * 128, weight.scales.shape[-1], **kinds, BIAS=bias is not None, PARTS=parts,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def multiply_packed_experts(
    x: torch.Tensor, gate_up: Packed, down: Packed, routed: Routed, *, gelu: bool = False
) -> torch.Tensor:
    num_pairs, top_k = routed.experts.numel(), routed.experts.shape[1]
    rows = min(rows_of_tile(num_pairs, len(routed.counts), x.itemsize), FEW)
    place = placed(routed, rows)
    active = silu_mul(_product_of_experts(x, gate_up, place, num_pairs, top_k), gelu=gelu)
    return weighed(_product_of_experts(active, down, place, num_pairs, 1), routed)


def _product_of_experts(
    x: torch.Tensor, weight: Packed, place: Placed, num_pairs: int, shared: int
) -> torch.Tensor:
    """`[pairs, N]`; a row of `x` is of so many pairs."""
    _, size, depth = weight.shape
    x, tensors, kinds = _given_to_few(x, weight, place.rows)
    block_n, warps, stages, _ = tiling(weight, place.rows)
    out = x.new_empty(num_pairs, size)
    _experts[(len(place.tiles) * triton.cdiv(size, block_n),)](
        x, *tensors, out, place.pairs, place.tiles, size, depth, weight.scales.shape[-1], **kinds,
        SHARED=shared, ITEMS=weight.shape[-1] // tensors[0].shape[-1], BLOCK_M=place.rows,
        BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
