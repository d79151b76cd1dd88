"""Packed weights made wide in memory, in Triton.

Theory of operation
-------------------
Of many rows the time goes into the product.  The weight is made wide in memory once, and torch
multiplies.  Before four bits lay in tiles that took a fifth to two fifths more time than bf16's
product of 2,048 rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from epd.engine.kernels.packed import Packed
from epd.engine.kernels.packed.triton_numbers import FP4, FP8, INT4, KINDS, NO_ZERO, e2m1, scale_of


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


def given(weight: Packed) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
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
    (size, depth), (tensors, kinds) = weight.shape, given(weight)
    out = torch.empty(size, depth, dtype=dtype, device=weight.numbers.device)
    _widen[(triton.cdiv(size, 16), triton.cdiv(depth, 128))](
        *tensors, out, size, depth, weight.scales.shape[-1], **kinds, TILED=weight.tiled,
        BLOCK_N=16, BLOCK_K=128, num_warps=4,
    )  # fmt: skip
    return out
