"""Linear layers whose products of few rows are a kernel of our own, on a GPU.

For steps of few decodes in 16 bits, whose weights it reads faster than torch's.  It is no choice by
time at start: instances that chose differently would round differently, and so might answer the
same request with other tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from epd.engine.kernels import kernels_for
from epd.model_files.config_sizes import PRODUCTS

MOST_ROWS = 48


class FewRowsLinear(nn.Linear):
    """More rows, and those of 32 bits, are multiplied by torch."""

    @classmethod
    def of(cls, plain: nn.Linear) -> FewRowsLinear:
        """With the same weights."""
        layer = cls(plain.in_features, plain.out_features, bias=False, device="meta")
        layer.weight, layer.bias = plain.weight, plain.bias
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if not 0 < len(rows) <= MOST_ROWS or x.itemsize != 2:
            return super().forward(x)
        ops = kernels_for(x.device.type)
        product: torch.Tensor = ops.product_of_few(rows.contiguous(), self.weight, self.bias)
        return product.view(*x.shape[:-1], -1)


def linears(layers: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Of decoder layers, those of `PRODUCTS`, by path."""
    named = layers.named_modules()
    return [(p, m) for p, m in named if type(m) is nn.Linear and p.rpartition(".")[2] in PRODUCTS]


def exchange(layers: nn.Module) -> None:
    for path, plain in linears(layers):
        layers.set_submodule(path, FewRowsLinear.of(plain))
