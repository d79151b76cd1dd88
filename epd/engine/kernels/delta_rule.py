"""The gated delta rule: the recurrence of linear attention layers, in plain torch.

Theory of operation
-------------------
A head keeps a matrix S `[key_dim, value_dim]`.  A token with key k, value v, decay exp(g) and
strength b changes it to `S' = exp(g) S + k b (v - k (exp(g) S))`: what the key recalls is moved
towards the value.  It answers `q S'`.

One token (`step`) is just that.  Many (`chunk`) are computed `SPAN` at a time: within a span the
corrections depend on each other as a unit triangular system, which is solved at once; between spans
only S is handed on.  Keys and queries have length one; everything is computed in float32.

Source: "Gated Delta Networks" (Yang et al.); the order of operations is that of transformers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

SPAN = 64
_EPS = 1e-6


class Tokens(NamedTuple):
    """What a layer says of n tokens; g is the logarithm of the decay."""

    query: torch.Tensor  # [n, heads, key_dim]
    key: torch.Tensor
    value: torch.Tensor  # [n, heads, value_dim]
    g: torch.Tensor  # [n, heads]
    beta: torch.Tensor

    def at(self, places: slice | torch.Tensor) -> Tokens:
        return Tokens(*(part[places] for part in self))


class Heads(NamedTuple):
    """Of a layer: sizes, and what is the same for every token."""

    num_keys: int
    num_values: int  # a multiple: neighbours share a key
    key_dim: int
    value_dim: int
    rate: torch.Tensor  # float32 [num_values]: of decay, below 0
    bias: torch.Tensor  # float32 [num_values]: of decay
    gain: torch.Tensor  # [value_dim], of the norm of answers
    eps: float

    @property
    def values(self) -> int:
        """Numbers of all heads' values."""
        return self.num_values * self.value_dim


def step(tokens: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each of n sequences: what it answers, `[n, heads, value_dim]`, and the states
    behind it, `[n, heads, key_dim, value_dim]`."""
    query, key, value, g, beta = tokens
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    state = state * g.exp()[..., None, None]
    recalled = (state * key[..., None]).sum(-2)
    correction = (value.float() - recalled) * beta.float()[..., None]
    state = state + key[..., None] * correction[..., None, :]
    return (state * query[..., None]).sum(-2).to(value.dtype), state


def chunk(tokens: Tokens, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of one sequence: what they answer, `[n, heads, value_dim]`, and the state behind them,
    `[heads, key_dim, value_dim]`; before them there is this one, or zeros."""
    query, key, value, g, beta = tokens
    count, dtype = len(query), value.dtype
    query, key = _spans(_unit(query) * query.shape[-1] ** -0.5), _spans(_unit(key))
    value, beta = _spans(value.float()), _spans(beta.float()[..., None])
    decay = _spans(g.float()[..., None])[..., 0].cumsum(-1)  # of logarithms, within a span
    k_beta, v_beta = key * beta, value * beta
    later = torch.ones(SPAN, SPAN, dtype=torch.bool, device=key.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, float("-inf")).exp()
    system = (k_beta @ key.transpose(-1, -2)) * between
    attended = (query @ key.transpose(-1, -2)) * between
    told = torch.cat([v_beta, k_beta * decay.exp()[..., None]], -1)
    told = torch.linalg.solve_triangular(system, told, upper=False, unitriangular=True)
    new_values, old_keys = told.split([value.shape[-1], key.shape[-1]], -1)
    query = query * decay.exp()[..., None]
    key = key * (decay[..., -1:] - decay).exp()[..., None]
    whole = decay[..., -1].exp()[..., None, None]
    answers = torch.empty_like(value)
    if state is None:
        state = value.new_zeros(len(value), key.shape[-1], value.shape[-1])
    for span in range(value.shape[1]):
        corrections = new_values[:, span] - old_keys[:, span] @ state
        answers[:, span] = query[:, span] @ state + attended[:, span] @ corrections
        state = state * whole[:, span] + key[:, span].transpose(-1, -2) @ corrections
    return answers.flatten(1, 2)[:, :count].transpose(0, 1).to(dtype), state


def _unit(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _spans(x: torch.Tensor) -> torch.Tensor:
    """`[count, heads, size]` as `[heads, spans, SPAN, size]`; zeros pad the last one."""
    x = pad(x.transpose(0, 1), (0, 0, 0, -len(x) % SPAN))
    return x.unflatten(1, (-1, SPAN))
