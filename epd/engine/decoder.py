"""A decoder stack as few kernels: transformers' weights, our order of operations.

Theory of operation
-------------------
transformers runs about a hundred small operations per layer.  On a GPU each costs a launch, and
each that is not a matrix product reads and writes all activations once more.  Here a layer is four
products and five kernels: the norm takes the residual sum with it; query, key and value are one
product, as are gate and up; head norms, rope and the write into the KV pool are one kernel.

Only layers of the common shape are taken over (RMS norms, biased or plain projections, optional
head norms, SwiGLU or any module in its place): `FusedDecoder.fits` says whether a stack is one.
What else there is runs through transformers' code and the seam of `epd.engine.attention`.

Weights of fused products are laid side by side in new memory and the modules' own become views of
it, so nothing is held twice.  Where they have eight bits (`fp8`), norm and gate give their rows so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from epd.engine.eight_bits import Scaled
from epd.engine.flat_batch import FlatBatch
from epd.engine.fp8 import Fp8Linear
from epd.engine.kv_pool import KvPool

_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})
_ALSO = frozenset({"rotary_emb", "rotary_fn"})


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Deepstack: `rows[level]` are added behind layer `level` at tokens `[at, at + len)`."""

    at: int
    rows: torch.Tensor  # [levels, count, H]


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: nn.Module
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: nn.Module
    mlp_norm: torch.Tensor
    mlp: Callable[[torch.Tensor | Scaled], torch.Tensor]
    takes_fp8: tuple[bool, bool]  # the first product, and the MLP


class FusedDecoder:
    """The decoder layers and the final norm of a loaded stack."""

    def __init__(self, stack: Any, kernels: Any) -> None:
        self._kernels = kernels
        self._rotary = stack.rotary_emb
        first = stack.layers[0]
        self._eps = float(first.input_layernorm.variance_epsilon)
        self._scaling = float(first.self_attn.scaling)
        self._norm: torch.Tensor = stack.norm.weight
        self.is_dense = True  # no module of unknown inside: a step can be captured
        self._layers = [self._fuse(layer) for layer in stack.layers]

    @staticmethod
    def fits(stack: Any) -> bool:
        """Whether all layers have the shape that this decoder knows."""
        return all(
            {name for name, _ in layer.named_children()} == _PARTS
            and {name for name, _ in layer.self_attn.named_children()} - _ALSO <= _ATTENTION
            for layer in stack.layers
        )

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        batch: FlatBatch,
        pool: KvPool,
        added: Sequence[AddedRows] = (),
    ) -> torch.Tensor:
        """Hidden states behind the final norm, `[T, H]`.

        embeds `[T, H]`, overwritten; positions `[3, 1, T]` or `[1, T]`.
        """
        ops = self._kernels
        cos, sin = (part[0].contiguous() for part in self._rotary(embeds[None], positions))
        residual = embeds
        first = self._layers[0]
        x = ops.rms_norm(residual, first.input_norm, self._eps, fp8=first.takes_fp8[0])
        for index, layer in enumerate(self._layers):
            kv = pool.layer(index)
            query = ops.rope_and_store(
                layer.qkv(x), layer.head_norms, self._eps, cos, sin, batch.slots, kv
            )
            attended = ops.attend(query, kv, batch, self._scaling)
            x = layer.output(attended.flatten(1))
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, self._eps, fp8=layer.takes_fp8[1])
            x = layer.mlp(x)
            for addition in added:
                if index < len(addition.rows):
                    rows = addition.rows[index]
                    x[addition.at : addition.at + len(rows)] += rows
            if index + 1 < len(self._layers):
                following = self._layers[index + 1]
                norm, fp8 = following.input_norm, following.takes_fp8[0]
                x = ops.add_rms_norm(x, residual, norm, self._eps, fp8=fp8)
        hidden: torch.Tensor = ops.add_rms_norm(x, residual, self._norm, self._eps)
        return hidden

    def _fuse(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = None
        if getattr(attention, "q_norm", None) is not None:
            norms = (attention.q_norm.weight, attention.k_norm.weight)
        qkv = _side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        known, takes_fp8 = self._fuse_mlp(mlp)
        return _Layer(
            layer.input_layernorm.weight,
            qkv,
            norms,
            attention.o_proj,
            layer.post_attention_layernorm.weight,
            known,
            (isinstance(qkv, Fp8Linear), takes_fp8),
        )

    def _fuse_mlp(self, mlp: Any) -> tuple[Callable[[Any], torch.Tensor], bool]:
        """And whether it takes rows of eight bits."""
        parts = {name for name, _ in mlp.named_children()}
        if not parts >= {"gate_proj", "up_proj", "down_proj"} or not _is_silu(mlp.act_fn):
            self.is_dense = False
            return (lambda x: _only_tensor(mlp(x[None]))[0]), False
        gate_up, down = _side_by_side(mlp.gate_proj, mlp.up_proj), mlp.down_proj
        ops, fp8 = self._kernels, isinstance(down, Fp8Linear)
        return (lambda x: down(ops.silu_mul(gate_up(x), fp8=fp8))), isinstance(gate_up, Fp8Linear)


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-3, 3, 7)
    return torch.equal(activation(probe), nn.functional.silu(probe))


def _only_tensor(output: Any) -> torch.Tensor:
    """Mixtures of experts of some families give their router's logits too."""
    return output[0] if isinstance(output, tuple) else output


def _side_by_side(*projections: Any) -> nn.Module:
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
    joined = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return joined
