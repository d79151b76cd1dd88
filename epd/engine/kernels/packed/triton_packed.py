"""Products with packed weights in Triton.

Theory of operation
-------------------
Of few rows (decodes) the time goes into reading the weight.  It is made wide in registers on its
way to the matrix unit; tiles and parts of sums are those of `triton_few`.  To convert integers to
floats would take longer than to read them.  So bits are put where a half of 16 bits has them, two
halves at a time, and one multiplication makes the exponent right.  A byte's two numbers of four
bits lie as far apart as a tile is wide (`Packed.laid_out`).  So a tile of bytes is two products,
and inputs are read as they lie.  Where one scale is for all columns of a tile, the product's sum
is multiplied by it.  Where there are more of them, each number is.

Of many rows the time goes into the product.  The weight is made wide in memory once, which took a
fifth to two fifths more time than bf16's product of 2,048 rows, and torch multiplies."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch.nn import functional

from epd.engine.kernels.packed import APART, MIDDLE, Kind, Packed
from epd.engine.kernels.triton_few import FEW, NUM_PROGRAMS, ended_of, store_sum

FP8, INT4, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_KINDS = {"fp8": 0, "int4": 1, "fp4": 2}
_MIDDLE = tl.constexpr(MIDDLE)
BLOCK_ITEMS = {"fp8": 128, "int4": APART, "fp4": APART}  # bytes of a channel, read at a time
# Of e2m1 in the upper part of 16 bits, for bfloat16 and for float16: how far left its sign goes and
# how far the rest, the bits of that, and the power of two that makes the exponent right.
_PLACES = {True: (4, -2, 0x01C0, 0x7E80), False: (4, 1, 0x0E00, 0x7400)}


@cache
def _widening(kind: Kind, dtype: torch.dtype, has_zeros: bool) -> str:
    """PTX that makes four bytes halves of `dtype`: first their lower halves, then their upper."""
    is_bf16 = dtype == torch.bfloat16
    lines = [".reg .b32 t, h, s, c, d;"]
    for out in range(4):
        if not out % 2:
            lines.append(f"shr.b32 t, $4, {2 * out}; and.b32 t, t, 0x0f0f0f0f;")
        if kind == "int4":  # below a 1 that means 128 or 1024, and is taken away again
            upper, one, less = (0x43, 0x3F80, 0xC300) if is_bf16 else (0x64, 0x3C00, 0xE400)
            less += 0 if has_zeros else MIDDLE
            chosen = (0x4140, 0x4342)[out % 2]
            lines.append(f"mov.b32 c, {upper:#x}; prmt.b32 h, t, c, {chosen:#x};")
            lines.append(f"mov.b32 c, {one * 0x10001:#x}; mov.b32 d, {less * 0x10001:#x};")
        else:
            sign, shift, mask, factor = _PLACES[is_bf16]
            to = f"shl.b32 h, h, {shift}" if shift > 0 else f"shr.b32 h, h, {-shift}"
            lines.append(f"prmt.b32 h, t, 0, {(0x1404, 0x3424)[out % 2]:#x};")
            lines.append(f"shl.b32 s, h, {sign}; and.b32 s, s, 0x80008000;")
            lines.append(f"{to}; and.b32 h, h, {mask * 0x10001:#x}; or.b32 h, h, s;")
            lines.append(f"mov.b32 c, {factor * 0x10001:#x}; mov.b32 d, 0x80008000;")
        lines.append(f"fma.rn.{'bf16x2' if is_bf16 else 'f16x2'} ${out}, h, c, d;")
    return "{" + " ".join(lines) + "}"


@triton.jit
def _e2m1(codes):
    magnitude = (codes & 7).to(tl.int32)
    wide = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, wide)
    return tl.where((codes & 8) != 0, -value, value)


@triton.jit
def _meant(found, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """float32: of items, the first numbers and the second ones."""
    if KIND == FP8:
        low = found.to(tl.float32)
        high = low
    elif KIND == FP4:
        low, high = _e2m1(found & 15), _e2m1(found >> 4)
    else:
        low, high = (found & 15).to(tl.float32), (found >> 4).to(tl.float32)
        if not ZEROS:
            low, high = low - _MIDDLE, high - _MIDDLE
    return low, high


@triton.jit
def _halves(
    found, KIND: tl.constexpr, ZEROS: tl.constexpr, WIDENING: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Likewise, in 16 bits."""
    if WIDENING == "":
        low, high = _meant(found, KIND, ZEROS)
        low, high = low.to(dtype), high.to(dtype)
    else:
        low, high = tl.inline_asm_elementwise(
            WIDENING, "=r,=r,=r,=r,r", [found], (tl.int16, tl.int16), True, 4
        )  # fmt: skip
        low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    return low, high


@triton.jit
def _scale_of(scales, at, mask, E8M0: tl.constexpr):
    scale = tl.load(scales + at, mask=mask)
    if E8M0:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _by_groups(value, middle, scale, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """Of numbers `[N, K]`, each group of columns less its zero, and times its scale."""
    grouped = tl.reshape(value, [value.shape[0], GROUPS, value.shape[1] // GROUPS])
    if ZEROS:
        grouped -= middle[:, :, None]
    return tl.reshape(grouped * scale[:, :, None], value.shape)


@triton.jit
def _add(
    total, value, x, scales, zeros, each, column, here, groups, COLUMNS: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """To sums `[N, M]`, the product of numbers from a column on with inputs `[M, K]`."""
    group = column // COLUMNS + tl.arange(0, GROUPS)
    at = each[:, None] + group[None, :]
    there = here[:, None] & (group < groups)[None, :]
    scale = _scale_of(scales, at, there, E8M0)
    middle = tl.load(zeros + at, mask=there).to(value.dtype) if ZEROS else scale
    if GROUPS > 1:
        value = _by_groups(value, middle, scale.to(value.dtype), GROUPS, ZEROS)
        total = tl.dot(value, tl.trans(x), total)
    else:
        if ZEROS:
            value -= middle
        total += tl.dot(value, tl.trans(x)) * scale
    return total


@triton.jit
def _few(
    x, numbers, scales, zeros, gains, bias, out, parts, ended, num_rows, size, depth, part, groups,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, GAINS: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr,
    WIDENING: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    kind: tl.constexpr = x.dtype.element_ty
    per_item: tl.constexpr = 1 if KIND == FP8 else 2
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, depth)
    rows = numbers + n.to(tl.int64)[:, None] * depth + k[None, :]
    columns = x + m[:, None] * (depth * per_item) + k[None, :]
    each, here = (n // ROWS) * groups, n < size
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = (start + k < depth)[None, :]
        mask = inside & (m < num_rows)[:, None]
        first = start * per_item
        found = tl.load(rows + start, mask=inside & here[:, None])
        given = tl.load(columns + first, mask=mask, other=0.0)
        low, high = _halves(found, KIND, ZEROS, WIDENING, kind)
        if KIND != FP8 and GROUPS == 1 and COLUMNS % (2 * BLOCK_K) == 0:  # they share a scale
            given_high = tl.load(columns + first + BLOCK_K, mask=mask, other=0.0)
            group = first // COLUMNS
            scale = _scale_of(scales, each + group, here, E8M0)[:, None]
            if ZEROS:
                middle = tl.load(zeros + each + group, mask=here).to(kind)[:, None]
                low, high = low - middle, high - middle
            product = tl.dot(low, tl.trans(given))
            total += tl.dot(high, tl.trans(given_high), product) * scale
        else:
            total = _add(
                total, low, given, scales, zeros, each, first, here, groups, COLUMNS, E8M0, ZEROS,
                GROUPS,
            )  # fmt: skip
            if KIND != FP8:
                given = tl.load(columns + first + BLOCK_K, mask=mask, other=0.0)
                total = _add(
                    total, high, given, scales, zeros, each, first + BLOCK_K, here, groups, COLUMNS,
                    E8M0, ZEROS, GROUPS,
                )  # fmt: skip
    store_sum(
        total, gains, gains, bias, out, parts, ended, num_rows, size, BIAS, False, GAINS, PARTS,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _widen(
    numbers, scales, zeros, gains, out, size, depth, groups, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr,
    GAINS: tl.constexpr, APART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    item = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (n < size)[:, None] & (item < depth)[None, :]
    found = tl.load(numbers + n.to(tl.int64)[:, None] * depth + item[None, :], mask=mask)
    gain = tl.load(gains + n, mask=n < size, other=0.0)[:, None] if GAINS else 1.0
    low, high = _meant(found, KIND, ZEROS)
    for second in tl.static_range(1 if KIND == FP8 else 2):
        value = high if second else low
        column, width = item, depth
        if KIND != FP8:
            column, width = item + item // APART * APART + second * APART, 2 * depth
        at = ((n // ROWS) * groups)[:, None] + (column // COLUMNS)[None, :]
        if ZEROS:
            value -= tl.load(zeros + at, mask=mask).to(tl.float32)
        value *= _scale_of(scales, at, mask, E8M0) * gain
        place = out + n.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(place, value.to(out.dtype.element_ty), mask=mask)


def _given(weight: Packed) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """The tensors of a weight, and what a kernel is compiled for."""
    is_e8m0 = weight.scales.dtype == torch.float8_e8m0fnu
    scales = weight.scales.view(torch.uint8) if is_e8m0 else weight.scales
    each = (scales if tensor is None else tensor for tensor in (weight.zeros, weight.gains))
    return (weight.numbers, scales, *each), {
        "KIND": _KINDS[weight.kind],
        "ROWS": weight.block[0],
        "COLUMNS": weight.block[1],
        "E8M0": is_e8m0,
        "ZEROS": weight.zeros is not None,
        "GAINS": weight.gains is not None,
    }


def widened(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """`[out, in]`, without its order."""
    (size, depth), (tensors, kinds) = weight.numbers.shape, _given(weight)
    out = torch.empty(size, weight.shape[1], dtype=dtype, device=weight.numbers.device)
    _widen[(triton.cdiv(size, 16), triton.cdiv(depth, 128))](
        *tensors, out, size, depth, weight.scales.shape[1], **kinds, APART=weight.apart, BLOCK_N=16,
        BLOCK_K=128, num_warps=4,
    )  # fmt: skip
    return out


def packed_product(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    if 0 < len(x) <= FEW and x.itemsize == 2 and (groups := _groups_of_tile(weight)):
        return _product_of_few(x.contiguous(), weight, bias, groups)
    return functional.linear(x, widened(weight, x.dtype), bias)


def _groups_of_tile(weight: Packed) -> int:
    """Scales that columns of a tile have; 0: it has another layout."""
    block, columns = BLOCK_ITEMS[weight.kind], weight.block[1]
    if weight.kind != "fp8" and weight.apart != APART:
        return 0
    if columns >= weight.shape[1] or columns % block == 0:
        return 1
    groups = block // columns
    return groups if block % columns == 0 and groups & groups - 1 == 0 else 0


def _product_of_few(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, groups: int
) -> torch.Tensor:
    (size, depth), (num_rows, _) = weight.numbers.shape, x.shape
    tensors, kinds = _given(weight)
    block_m = max(16, triton.next_power_of_2(num_rows))
    # More rows are more work for each number, which is made wide for all of them.
    block_n, warps, share = (64, 4, 8) if block_m == 16 else (128, 8, 4)
    block_k = BLOCK_ITEMS[weight.kind]
    tiles = triton.cdiv(size, block_n)
    parts = max(1, min(share * NUM_PROGRAMS // tiles, depth // (2 * block_k)))
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    sums = out
    if parts > 1:
        sums = torch.empty(tiles * parts * block_n * block_m, dtype=torch.float32, device=x.device)
    part = triton.cdiv(triton.cdiv(depth, block_k), parts) * block_k
    widening = ""
    if weight.kind != "fp8" and not triton.knobs.runtime.interpret:  # which has no PTX
        widening = _widening(weight.kind, x.dtype, weight.zeros is not None)
    _few[(tiles, parts)](
        x, *tensors, out if bias is None else bias, out, sums, ended_of(x.device), num_rows, size,
        depth, part, weight.scales.shape[1], **kinds, GROUPS=groups, BIAS=bias is not None,
        WIDENING=widening, PARTS=parts, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out
