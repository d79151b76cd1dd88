"""Triton kernels for rows of eight bits, and their products.

Many rows are multiplied by torch's scaled product, few (decodes) by a kernel of our own
(`triton_few`), since that product reads weights at half of the memory's speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from epd.engine.kernels.eight_bits import FP8, LARGEST, SMALLEST_MAXIMUM, Scaled
from epd.engine.kernels.triton_few import FEW, scaled_product_of_few

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
    return scaled_product_of_few(x, weight, bias, dtype)
