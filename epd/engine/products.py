"""Several products of one input as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from epd.engine.few_rows import FewRowsLinear
from epd.engine.fp8 import Fp8Linear


def side_by_side(*projections: Any) -> nn.Module:
    """One weight (and bias) for several products of one input; the modules keep views."""
    if isinstance(projections[0], Fp8Linear):
        return Fp8Linear.side_by_side(projections)
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
