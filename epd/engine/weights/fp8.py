"""Linear layers in eight bits: `--quantization fp8`.

Theory of operation
-------------------
Weights become e4m3 as they are read, one after the other, with a scale for each output channel, so
that a device need not hold them in more bits.  What comes into a layer becomes e4m3 as it comes,
with a scale for each row, so no row depends on its neighbours.  Sums are fp32 and are multiplied by
both scales.  The decoder's layers are changed.  Embeddings, head, norms, attention, the experts
that a router chooses among, and weights that write into states or forget stay as they are.  So does
a tower: the bundled one's rows would be 7 times as far from float32 as they are in bfloat16.  Each
of a layer's four products alone takes them more than twice as far.

On CUDA the kernels are `triton_fp8` and torch's scaled product; elsewhere the specification
(`torch_ops`) computes the same numbers from the same roundings, slowly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from epd.config import ConfigError
from epd.engine.base import Taker
from epd.engine.kernels import kernels_for
from epd.engine.kernels.eight_bits import FP8, Scaled, scaled
from epd.engine.language.few_rows import linears

logger = logging.getLogger(__name__)
MULTIPLE = 16  # of both sizes of a weight: what the device's product takes


class Fp8Linear(nn.Module):
    """A linear layer of eight bits; takes rows that are `Scaled` already, too."""

    def __init__(self, weight: Scaled, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._hold(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.dtype = dtype

    @classmethod
    def on_meta(cls, plain: nn.Linear, dtype: torch.dtype) -> Fp8Linear:
        """Of this one's shape, for rows of `dtype`; `take` gives it its weight."""
        bias = None if plain.bias is None else plain.bias.data
        return cls(scaled(plain.weight.data.to("meta")), bias, dtype)

    def take(self, weight: torch.Tensor) -> None:
        """`[out, in]` in more bits, which it does not keep."""
        # Ahead of what its making leaves free: put into a piece of that, it would keep the rest.
        values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        found = scaled(weight)
        self._hold(Scaled(values.copy_(found.values), found.scales))

    def _hold(self, weight: Scaled) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.scales = nn.Parameter(weight.scales, requires_grad=False)

    @classmethod
    def side_by_side(cls, layers: Sequence[Any]) -> Fp8Linear:
        """One layer for several products of one input; they keep no memory of their own."""
        values = torch.cat([layer.weight for layer in layers])
        scales = torch.cat([layer.scales for layer in layers])
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        parts = values.split([len(layer.weight) for layer in layers])
        for layer, part in zip(layers, parts, strict=True):
            layer.weight.data = part
        return cls(Scaled(values, scales), bias, layers[0].dtype)

    def forward(self, x: torch.Tensor | Scaled) -> torch.Tensor:
        ops = kernels_for(self.weight.device.type)
        weight = Scaled(self.weight, self.scales)
        if isinstance(x, Scaled):
            product: torch.Tensor = ops.scaled_product(x, weight, self.bias, self.dtype)
            return product
        rows = ops.scaled(x.reshape(-1, x.shape[-1]))
        return self.forward(rows).view(*x.shape[:-1], -1)


def exchange(model: nn.Module, layers: nn.Module, dtype: torch.dtype) -> dict[str, Taker]:
    """The linear modules of these layers of a model on meta, but for odd sizes: by a weight's name,
    its taker."""
    (prefix,) = (path for path, module in model.named_modules() if module is layers)
    takers: dict[str, Taker] = {}
    left = 0
    for path, plain in linears(layers):
        if plain.in_features % MULTIPLE or plain.out_features % MULTIPLE:
            left += 1
        else:
            eight = Fp8Linear.on_meta(plain, dtype)
            layers.set_submodule(path, eight)
            takers[f"{prefix}.{path}.weight"] = eight.take
    logger.info("fp8: %d linear layers, and %d of odd sizes as they were", len(takers), left)
    return takers


def check(device: str, dtype: torch.dtype) -> None:
    """Raises ConfigError where a device has no product of eight bits."""
    if device.startswith("cuda") and dtype != torch.bfloat16:
        raise ConfigError("--quantization fp8 computes in bfloat16 on a GPU; give --dtype bfloat16")
    _check_numbers(device, "fp8 products; leave --quantization out")


def check_kv(device: str, dtype: torch.dtype) -> None:
    """Raises ConfigError where a device lacks the numbers."""
    if device.startswith("cuda") and dtype == torch.float32:
        raise ConfigError(
            "--kv-cache-dtype fp8 computes in 16 bits on a GPU; give --dtype bfloat16 or float16"
        )
    _check_numbers(device, "fp8 numbers; leave --kv-cache-dtype out")


def _check_numbers(device: str, lacks: str) -> None:
    if device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"{torch.cuda.get_device_name(device)} has no {lacks}")
