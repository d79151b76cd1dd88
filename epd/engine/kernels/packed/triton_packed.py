"""Products with packed weights in Triton.

Theory of operation
-------------------
Of few rows (decodes) the time goes into reading the weight.  It is made wide in registers on its
way to the matrix unit, whose left operand it is; parts of sums are those of `triton_few`.  Numbers
of four bits lie as a thread needs them (`tiles`): what is read goes into the unit without another
way through shared memory.  Where a thread's numbers have a scale of their own, each is multiplied
by it, of e2m1 by the multiplication that is there already.  Else the sum is.

A mixture's experts are multiplied by the same kernel (`packed_experts`): a program has a tile of
the rows that chose an expert, in the place of all rows.

Of many rows the time goes into the product.  The weight is made wide in memory once, which took a
fifth to two fifths more time than bf16's product of 2,048 rows, and torch multiplies."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn import functional

from epd.engine.kernels.packed import Packed
from epd.engine.kernels.packed.triton_numbers import (
    EIGHT,
    FP4,
    FP8,
    INT4,
    KINDS,
    NO_ZERO,
    both,
    e2m1,
    halves,
    scale_of,
    widening,
)
from epd.engine.kernels.triton_few import FEW, NUM_PROGRAMS, ended_of, store_sum

CHUNK = tl.constexpr(128)  # columns of a tile


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
    OWN: tl.constexpr, ONCE: tl.constexpr, WIDENING: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    if OWN:
        p = p // 2 % 4 * 32 + p // 16 * 4 + p // 8 % 2 * 2 + p % 2
        p = tl.max_contiguous(tl.multiple_of(p, 2), 2)
    second: tl.constexpr = 16 if OWN else 64
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
        if OWN or ONCE:
            total = tl.dot(value, tl.trans(given), total)
            total = tl.dot(other, tl.trans(behind), total)
        elif COLUMNS == 64:
            total += tl.dot(value, tl.trans(given)) * scale_of(this, E8M0)[:, None]
            this = tl.load(scales + n * groups + start // COLUMNS + 1)
            total += tl.dot(other, tl.trans(behind)) * scale_of(this, E8M0)[:, None]
        else:
            product = tl.dot(value, tl.trans(given))
            product = tl.dot(other, tl.trans(behind), product)
            total += product * scale_of(this, E8M0)[:, None]
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
        if ONCE:
            total = tl.dot(value, tl.trans(given), total)
        else:
            at = n // ROWS * groups + start // COLUMNS
            scale = scale_of(tl.load(scales + at, mask=here), E8M0)
            total += tl.dot(value, tl.trans(given)) * scale[:, None]
    return total


@triton.jit
def _few(
    x, numbers, scales, zeros, gains, bias, out, parts, ended, num_rows, size, depth, part, groups,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, GAINS: tl.constexpr, OWN: tl.constexpr, ONCE: tl.constexpr,
    WHOLE: tl.constexpr, BIAS: tl.constexpr, WIDENING: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, depth)
    m = tl.arange(0, BLOCK_M)[:, None]
    if KIND == FP8:
        total = _sum_of_eight(
            x + m * depth, m < num_rows, numbers, scales, first, size, depth, begin, end, groups,
            ROWS, COLUMNS, E8M0, ONCE, WIDENING, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = _sum_of_four(
            x + m * depth, m < num_rows, numbers, scales, zeros, first, depth, begin, end, groups,
            KIND, COLUMNS, E8M0, ZEROS, OWN, ONCE, WIDENING, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if ONCE:
        n = first + tl.arange(0, BLOCK_N)
        total *= scale_of(tl.load(scales + n // ROWS, mask=n < size), E8M0)[:, None]
    store_sum(
        total, gains, gains, bias, out, parts, ended, num_rows, size, BIAS, False, GAINS, PARTS,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _widen(
    numbers, scales, zeros, gains, out, size, depth, groups, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr,
    GAINS: tl.constexpr, TILED: tl.constexpr, OWN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < size)[:, None] & (k < depth)[None, :]
    gain = tl.load(gains + n, mask=n < size, other=0.0)[:, None] if GAINS else 1.0
    row, column = n.to(tl.int64)[:, None], k[None, :]
    if KIND == FP8:
        value = tl.load(numbers + row * depth + column, mask=mask).to(tl.float32)
    elif TILED:
        lower, g = row // 8 % 2, row % 8
        if OWN:
            t, s, h = column // 32 % 4, column // 4 % 8, column // 2 % 2
        else:
            t, s, h = column // 2 % 4, column // 16 % 8, column // 8 % 2
        lane = row % 64 // 16 * 32 + g * 4 + t
        at = row // 64 * (depth * 8) + column // 128 * 1024 + s // 4 * 512 + lane * 4 + s % 4
        half = tl.load(numbers + at, mask=mask, other=0) >> 16 * (column % 2)
        pair = 2 * h + lower
        if KIND == INT4:
            code = (half >> 4 * pair) & 15
        else:
            place = 3 * tl.minimum(pair, 2)
            code = ((half >> 6 - place) & 7) | ((half >> 12 - place) & 8)
            last = ((half >> 9) & 6) | ((half >> 13) & 1) | ((half >> 11) & 8)
            code = tl.where(pair < 3, code, last)
        value = e2m1(code) if KIND == FP4 else code.to(tl.float32)
    else:
        code = tl.load(numbers + row * (depth // 2) + column // 2, mask=mask, other=0)
        code = (code.to(tl.int32) >> 4 * (column % 2)) & 15
        value = e2m1(code) if KIND == FP4 else code.to(tl.float32)
    at = (row // ROWS) * groups + column // COLUMNS
    if KIND == INT4:
        value -= tl.load(zeros + at, mask=mask).to(tl.float32) if ZEROS else NO_ZERO
    value *= scale_of(tl.load(scales + at, mask=mask), E8M0) * gain
    tl.store(out + row * depth + column, value.to(out.dtype.element_ty), mask=mask)


def _given(weight: Packed) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """The tensors of a weight, and what a kernel is compiled for."""
    is_e8m0 = weight.scales.dtype == torch.float8_e8m0fnu
    scales = weight.scales.view(torch.uint8) if is_e8m0 else weight.scales
    numbers = weight.numbers.view(torch.int32) if weight.tiled else weight.numbers
    each = (scales if tensor is None else tensor for tensor in (weight.zeros, weight.gains))
    return (numbers, scales, *each), {
        "KIND": KINDS[weight.kind],
        "ROWS": weight.block[0],
        "COLUMNS": weight.block[1],
        "E8M0": is_e8m0,
        "ZEROS": weight.zeros is not None,
        "GAINS": weight.gains is not None,
        "OWN": weight.own,
    }


def widened(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]`, without its order."""
    (size, depth), (tensors, kinds) = weight.shape, _given(weight)
    out = torch.empty(size, depth, dtype=dtype, device=weight.numbers.device)
    _widen[(triton.cdiv(size, 16), triton.cdiv(depth, 128))](
        *tensors, out, size, depth, weight.scales.shape[-1], **kinds, TILED=weight.tiled,
        BLOCK_N=16, BLOCK_K=128, num_warps=4,
    )  # fmt: skip
    return out


def packed_product(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    if 0 < len(x) <= FEW and x.itemsize == 2 and (weight.tiled or weight.kind == "fp8"):
        return _product_of_few(x.contiguous(), weight, bias)
    return functional.linear(x, widened(weight, x.dtype), bias)


class Tiling(NamedTuple):
    """Of products of few rows."""

    block_n: int
    warps: int
    stages: int
    share: int  # of programs for each multiprocessor, at most


def tiling(weight: Packed, num_rows: int) -> Tiling:
    if num_rows <= 16 or weight.shape[-2] % 128:
        return Tiling(64, 4, 3, 8)
    return Tiling(128, 8, 3, 4)


def _product_of_few(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None) -> torch.Tensor:
    (size, depth), num_rows = weight.shape, len(x)
    tensors, kinds = _given(weight)
    block_n, warps, stages, share = tiling(weight, num_rows)
    block_m = max(16, triton.next_power_of_2(num_rows))
    block_k = math.gcd(128, weight.block[1]) if weight.block[1] < depth else 128
    tiles = triton.cdiv(size, block_n)
    chunks = triton.cdiv(depth, 128)
    part = triton.cdiv(chunks, max(1, min(share * NUM_PROGRAMS // tiles, chunks // 2)))
    parts = triton.cdiv(chunks, part)
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    sums = out
    if parts > 1:
        sums = torch.empty(tiles * parts * block_n * block_m, dtype=torch.float32, device=x.device)
    ptx = ""
    if x.dtype == torch.bfloat16 and not triton.knobs.runtime.interpret:  # which has no PTX
        if weight.tiled:
            ptx = widening(weight.kind, own=weight.own)
        elif depth % block_k == 0:
            ptx, tensors = EIGHT, (tensors[0].view(torch.int16), *tensors[1:])
    _few[(tiles, parts)](
        x, *tensors, out if bias is None else bias, out, sums, ended_of(x.device), num_rows, size,
        depth, part * 128, weight.scales.shape[-1], **kinds, ONCE=weight.block[1] >= depth,
        WHOLE=depth % block_k == 0, BIAS=bias is not None, WIDENING=ptx, PARTS=parts,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
