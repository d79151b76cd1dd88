"""Linear layers whose weights stay as they are stored: in four or eight bits.

Theory of operation
-------------------
A decoder's linear layers are changed before anything is read, and get their weights as `Packed`.
Products are computed in the dtype of their inputs, from the numbers that the weight means.
transformers computes the same from these files, in several times the memory.  A rank of a
group keeps some rows or columns of a weight, at the borders of its scales' blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from epd.engine.kernels import kernels_for
from epd.engine.kernels.packed import Packed
from epd.engine.weights.pieces import StoredPiece
from epd.model_files.config_sizes import PRODUCTS

Keeper = Callable[[Packed, StoredPiece], None]
# Called by their rows alone.  A latent's factors and the inputs that forget are read as matrices.
CALLED = PRODUCTS | frozenset(
    "gate_up_proj q_a_proj q_b_proj kv_a_proj_with_mqa per_layer_input_gate "
    "per_layer_projection".split()
)


class PackedLinear(nn.Module):
    def __init__(self, out_features: int, in_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias
        self.weight: Packed

    def take(self, weight: Packed, piece: StoredPiece | None = None) -> None:
        """Its tensors are parameters, since memory is counted by these."""
        if weight.numbers.is_cuda:
            weight = weight.laid_out()
        self.weight = weight
        for name, tensor in weight.tensors().items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @classmethod
    def side_by_side(cls, layers: Sequence[nn.Module]) -> nn.Module:
        """One layer for several products of one input; they keep no memory of their own."""
        own = [layer for layer in layers if isinstance(layer, cls)]
        weight = Packed.joined([layer.weight for layer in own])
        if weight is None or len(own) < len(layers):
            return Several(layers)
        biases = [layer.bias for layer in own if layer.bias is not None]
        bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        joined = cls(sum(layer.out_features for layer in own), own[0].in_features, bias)
        joined.take(weight)
        at = 0
        for layer in own:
            layer.take(weight.narrowed(-2, [range(at, at + layer.out_features)]))
            at += layer.out_features
        return joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ops = kernels_for(x.device.type)
        rows = x.reshape(-1, self.in_features)
        product: torch.Tensor = ops.packed_product(rows, self.weight, self.bias)
        return product.view(*x.shape[:-1], -1)


class Several(nn.Module):
    """Products of one input whose weights are stored in different ways."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self._layers], -1)


def exchange(layers: nn.Module, prefix: str, names: Iterable[str]) -> dict[str, Keeper]:
    """The linear modules of these layers of a model on meta whose weights are among `names`: by a
    weight's name, what it is given to."""
    keepers: dict[str, Keeper] = {}
    wanted = frozenset(names)
    for path, plain in list(layers.named_modules()):
        name, kind = f"{prefix}.{path}.weight", path.rpartition(".")[2]
        if name in wanted and type(plain) is nn.Linear and kind in CALLED:
            layer = PackedLinear(plain.out_features, plain.in_features, plain.bias)
            layers.set_submodule(path, layer)
            keepers[name] = layer.take
    return keepers
