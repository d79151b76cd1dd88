"""Products with packed weights in plain torch: what `triton_packed` must compute."""

from __future__ import annotations

import torch
from torch.nn import functional

from epd.engine.kernels.packed import Packed
from epd.engine.kernels.routing import Routed
from epd.engine.kernels.torch_experts import multiply_each


def packed_product(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`[T, N]`: x `[T, H]` by each row of weight `[N, H]`, whose numbers are rounded to the dtype
    of `x` first."""
    return functional.linear(x, weight.widened().to(x.dtype), bias)


def multiply_packed_experts(
    x: torch.Tensor, gate_up: Packed, down: Packed, routed: Routed, *, gelu: bool = False
) -> torch.Tensor:
    """As `multiply_experts`, of weights whose numbers are rounded to the dtype of `x` first."""

    def wide(weight: Packed, expert: int) -> torch.Tensor:
        return weight.of_expert(expert).widened().to(x.dtype)

    return multiply_each(x, lambda e: (wide(gate_up, e), wide(down, e)), routed, gelu=gelu)
