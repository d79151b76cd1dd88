"""A mixture of experts in the place of transformers' module, over the same weights.

Theory of operation
-------------------
transformers asks the device which experts were hit and runs them one by one, so a step waits for
the host in every layer.  Here pairs of tokens and experts are sorted on the device (`kernels`), and
all experts are two products of fixed shape, whatever the tokens chose.

Modules keep their names, since weights and the sums over ranks go by these.  Where ranks have parts
of each expert, the result of `experts` is a part of a sum, as is that of a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.functional import linear

from epd.engine.kernels import kernels_for
from epd.engine.kernels.packed import Packed
from epd.engine.kernels.routing import Routed, Routing
from epd.engine.language.products import Foreign, is_silu, swiglu

WEIGHTS = ("gate_up_proj", "down_proj")
_SHARED = ("shared_expert", "shared_experts")  # the one that every token goes to


class Experts(nn.Module):
    """Gate and up of each expert one behind the other `[E, 2 I, H]`, and down `[E, H, I]`."""

    def __init__(self, plain: Foreign) -> None:
        super().__init__()
        self.gate_up_proj = plain.gate_up_proj
        self.down_proj = plain.down_proj
        self._ops = kernels_for(plain.down_proj.device.type)

    def forward(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        out: torch.Tensor = self._ops.multiply_experts(x, self.gate_up_proj, self.down_proj, routed)
        return out


class PackedExperts(nn.Module):
    """Likewise, of weights in few bits; `weights.kept_experts` gives them to it."""

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.act_fn = act_fn
        self.weights: dict[str, Packed] = {}

    def hold(self, name: str, weight: Packed) -> None:
        """Its tensors are parameters, since memory is counted by these."""
        self.weights[name] = weight
        for part, tensor in weight.tensors().items():
            self.register_parameter(f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        gate_up, down = self.weights["gate_up_proj"], self.weights["down_proj"]
        ops = kernels_for(x.device.type)
        out: torch.Tensor = ops.multiply_packed_experts(x, gate_up, down, routed)
        return out


class Mixture(nn.Module):
    def __init__(self, block: Foreign, routing: Routing) -> None:
        super().__init__()
        self.gate = block.gate
        is_packed = isinstance(block.experts, PackedExperts)
        self.experts = block.experts if is_packed else Experts(block.experts)
        self._ops = kernels_for(block.gate.weight.device.type)
        self._routing = routing
        self._shared = None
        for name in _SHARED:
            if hasattr(block, name):
                shared = getattr(block, name)
                self.add_module(name, shared)
                self._shared, _ = swiglu(shared, self._ops)
        self.shared_expert_gate = getattr(block, "shared_expert_gate", None)

    @staticmethod
    def fits(block: Foreign) -> bool:
        names = {name for name, _ in block.named_children()}
        known = {"gate", "experts", *_SHARED, "shared_expert_gate"}
        if not {"gate", "experts"} <= names <= known:
            return False
        weights = {name for name, _ in block.experts.named_parameters()}
        has_them = isinstance(block.experts, PackedExperts) or weights == set(WEIGHTS)
        return has_them and is_silu(block.experts.act_fn)

    def forward(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., H]`, both ways; `slots` `[T]`: rows of tokens with one below 0 only pad."""
        rows = x.reshape(-1, x.shape[-1])
        routed = self._ops.route(self._logits(rows), self._routing, slots)
        out: torch.Tensor = self.experts(rows, routed)
        if self._shared is not None:
            shared = self._shared(rows)
            if self.shared_expert_gate is None:
                out += shared
            else:
                self._ops.add_gated(out, shared, self.shared_expert_gate(rows))
        return out.view_as(x)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.gate.weight
        if self._routing.is_sigmoid:
            return linear(rows.float(), weight.float())
        return linear(rows, weight)


def adopt(layers: Iterable[Foreign], routing_of: Callable[[Foreign], Routing]) -> None:
    """Exchange the mixtures of loaded layers; `routing_of`: how their router chooses."""
    for layer in layers:
        if Mixture.fits(layer.mlp):
            layer.mlp = Mixture(layer.mlp, routing_of(layer.mlp.gate))


def by_softmax(router: Foreign) -> Routing:
    """Of Qwen's routers."""
    return Routing(int(router.top_k))


def by_groups(router: Foreign) -> Routing:
    """Of routers as DeepSeek-V3 has them, or with a softmax and no bias in place of the sigmoid."""
    bias = getattr(router, "e_score_correction_bias", None)
    return Routing(
        int(router.top_k),
        is_sigmoid=bias is not None,
        normalised=bool(router.norm_topk_prob),
        scaling=float(router.routed_scaling_factor),
        num_groups=int(router.num_group),
        kept_groups=int(router.topk_group),
        bias=bias,
    )
