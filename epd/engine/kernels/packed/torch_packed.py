"""Products with packed weights in plain torch: what `triton_packed` must compute."""

from __future__ import annotations

import torch
from torch.nn import functional

from epd.engine.kernels.packed import Packed


def packed_product(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`[T, N]`: x `[T, H]` by each row of weight `[N, H]`, whose numbers are rounded to the dtype
    of `x` first."""
    return functional.linear(x, weight.widened().to(x.dtype), bias)
