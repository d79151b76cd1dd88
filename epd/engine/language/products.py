"""Several products of one input as one; gate, up and down of an MLP as two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from epd.engine.kernels.eight_bits import Scaled
from epd.engine.language.few_rows import FewRowsLinear
from epd.engine.weights.fp8 import Fp8Linear
from epd.engine.weights.packed_linear import PackedLinear

Foreign = Any  # a module of transformers, or of kernels: what it has, it has by name only
Product = Callable[[torch.Tensor | Scaled], torch.Tensor]


def side_by_side(*projections: Foreign) -> nn.Module:
    """One weight (and bias) for several products of one input; the modules keep views."""
    packed = [p for p in projections if isinstance(p, PackedLinear)]
    if joins := getattr((packed or projections)[0], "side_by_side", None):
        several: nn.Module = joins(projections)
        return several
    weight = torch.cat([p.weight for p in projections])
    bias = torch.cat([p.bias for p in projections]) if projections[0].bias is not None else None
    at = 0
    for projection in projections:
        end = at + projection.out_features
        projection.weight.data = weight[at:end]
        if bias is not None:
            projection.bias.data = bias[at:end]
        at = end
    kind = FewRowsLinear if isinstance(projections[0], FewRowsLinear) else nn.Linear
    joined = kind(weight.shape[1], len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return joined


def is_swiglu(mlp: Foreign) -> bool:
    parts = {name for name, _ in mlp.named_children()}
    return parts >= {"gate_proj", "up_proj", "down_proj"} and is_silu(mlp.act_fn)


def is_silu(activation: Foreign) -> bool:
    probe = torch.linspace(-3, 3, 7)
    return torch.equal(activation(probe), nn.functional.silu(probe))


def swiglu(mlp: Foreign, ops: Foreign, *, gelu: bool = False) -> tuple[Product, Foreign]:
    """And the first of its products; `gelu`: that is its activation."""
    gate_up, down = side_by_side(mlp.gate_proj, mlp.up_proj), mlp.down_proj

    def product(x: Foreign) -> torch.Tensor:
        found: torch.Tensor = down(ops.silu_mul(gate_up(x), fp8=takes_fp8(down), gelu=gelu))
        return found

    return product, gate_up


def takes_fp8(product: Foreign) -> bool:
    """Whether rows of eight bits go into it in this step."""
    return isinstance(product, Fp8Linear) or getattr(product, "takes_fp8", False)
