"""Mixtures of experts in plain torch: what `triton_experts` must compute, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from epd.engine.kernels.routing import Routed, Routing
from epd.engine.kernels.torch_ops import silu_mul


def route(logits: torch.Tensor, routing: Routing, slots: torch.Tensor | None = None) -> Routed:
    """Of logits `[T, E]`; tokens whose slot is below 0 go nowhere."""
    wide = logits.float()
    scores = wide.sigmoid() if routing.is_sigmoid else wide.softmax(-1)
    choice = scores if routing.bias is None else scores + routing.bias
    if routing.kept_groups < routing.num_groups:
        groups = choice.unflatten(-1, (routing.num_groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(routing.kept_groups, dim=-1).indices
        others = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, value=False)
        choice = groups.masked_fill(others[..., None], -torch.inf).flatten(1)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scaling
    if routing.factors is not None:
        weights = weights * routing.factors[experts]
    if slots is not None:
        experts = experts.masked_fill((slots < 0)[:, None], -1)
        weights = weights.masked_fill((slots < 0)[:, None], 0.0)
    return ranked(experts, weights, logits.shape[1])


def ranked(experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routed:
    is_pair = functional.one_hot(experts.flatten().long() + 1, num_experts + 1)[:, 1:]
    before = (is_pair.cumsum(0) - is_pair) * is_pair
    ranks = before.sum(1).view_as(experts)
    return Routed(experts.int(), weights, ranks.int(), is_pair.sum(0).int())


def multiply_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routed: Routed,
    *,
    gelu: bool = False,
) -> torch.Tensor:
    """`[T, H]`: of each token the sum of what its experts give, times their weights.

    gate_up `[E, 2 I, H]`, down `[E, H, I]`; `gelu`: as of `silu_mul`.  Products are rounded to the
    precision of `x`, the sum at its end."""
    return multiply_each(x, lambda e: (gate_up[e], down[e]), routed, gelu=gelu)


def multiply_each(
    x: torch.Tensor,
    weights: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    routed: Routed,
    *,
    gelu: bool,
) -> torch.Tensor:
    """Likewise; `weights`: of an expert, gate and up, and down."""
    out = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for expert in routed.counts.nonzero().flatten().tolist():
        token, place = torch.where(routed.experts == expert)
        gate_up, down = weights(expert)
        active = silu_mul(functional.linear(x[token], gate_up), gelu=gelu)
        rows = functional.linear(active, down)  # type: ignore[arg-type]
        out.index_add_(0, token, rows.to(out.dtype) * routed.weights[token, place, None])
    return out.to(x.dtype)


def add_gated(out: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor) -> None:
    """`out += sigmoid(gate) * rows` in place; gate `[T, 1]`."""
    out += gate.sigmoid() * rows
