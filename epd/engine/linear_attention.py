"""Linear attention layers over the states of the sequences of a step.

Theory of operation
-------------------
Such a layer keeps two tensors of a sequence (`state_kinds`): the last inputs of a short convolution
and the matrices of the delta rule.  A step has sequences with one token, which are computed
together, and chunks, which are computed one by one, each from the state behind the chunk before it.
The first chunk of a sequence begins with zeros and reads nothing, so a block needs no clearing.

A layer's own modules (projections, norm) are transformers'; what replaces it is between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import conv1d, silu, softplus

from epd.engine import delta_rule
from epd.engine.copies import to_device
from epd.engine.delta_rule import Tokens
from epd.engine.kv_pool import KvPool, SequenceTensor


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `[at, at + count)` of the row: a chunk of one sequence."""

    at: int
    count: int
    table: torch.Tensor  # [1, blocks] int64
    is_first: bool  # of its sequence


@dataclass(frozen=True, slots=True)
class StateBatch:
    """What linear attention must know of a step; the same for every layer."""

    tensors: list[SequenceTensor]
    runs: list[Run]
    at: torch.Tensor  # [n] int64: places in the row of the tokens that stand alone
    tables: torch.Tensor  # [n, blocks] int64: their sequences'


class Step(Protocol):
    """What layers are told of a step."""

    @property
    def states(self) -> StateBatch | None: ...


@dataclass(frozen=True, slots=True)
class StateExtent:
    """One sequence's part of a step: tokens `[start, start + count)`, its state in `blocks`."""

    start: int
    count: int
    blocks: Sequence[int]


def plan_states(extents: Sequence[StateExtent], pool: KvPool) -> StateBatch:
    """Sequences lie in the row in the given order."""
    device = pool.tensor.device
    runs, places, tables, at = [], [], [], 0
    for extent in extents:
        if extent.count == 1 and extent.start > 0:
            places.append(at)
            tables.append(list(extent.blocks))
        else:
            table = to_device([list(extent.blocks)], torch.int64, device)
            runs.append(Run(at, extent.count, table, extent.start == 0))
        at += extent.count
    return StateBatch(
        pool.sequence_tensors(),
        runs,
        to_device(places, torch.int64, device),
        to_device(tables, torch.int64, device).view(-1, pool.layout.num_state_blocks),
    )


class GatedDeltaNet(nn.Module):
    """A gated delta-net layer of transformers, over the states of many sequences."""

    def __init__(self, layer: Any, index: int) -> None:
        """`index`: among the layers of this kind."""
        super().__init__()
        self._layer = layer
        self._index = index
        self._sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        self._repeats = layer.num_v_heads // layer.num_k_heads

    def forward(
        self, hidden_states: torch.Tensor, paged: Step | None = None, **_: Any
    ) -> torch.Tensor:
        """`[1, T, H]`, both ways."""
        assert paged is not None, "the model was called without its `paged` metadata"
        states = paged.states
        assert states is not None  # the family declares them
        layer, x = self._layer, hidden_states[0]
        mixed = self._convolved(layer.in_proj_qkv(x), states)
        query, key, value = mixed.split(self._sizes, -1)
        query, key = (
            part.unflatten(-1, (layer.num_k_heads, -1)).repeat_interleave(self._repeats, 1)
            for part in (query, key)
        )
        value = value.unflatten(-1, (layer.num_v_heads, -1))
        beta = layer.in_proj_b(x).sigmoid()
        steps = softplus(layer.in_proj_a(x).float() + layer.dt_bias)
        decay = -layer.A_log.float().exp() * steps
        attended = self._recalled(Tokens(query, key, value, decay, beta), states)
        gate = layer.in_proj_z(x).view(-1, layer.head_v_dim)
        normed = layer.norm(attended.reshape(-1, layer.head_v_dim), gate)
        out: torch.Tensor = layer.out_proj(normed.view(len(x), -1))
        return out[None]

    def _convolved(self, mixed: torch.Tensor, states: StateBatch) -> torch.Tensor:
        """`[T, channels]` behind the convolution; of each sequence the last inputs are kept."""
        weight, bias = self._layer.conv1d.weight, self._layer.conv1d.bias
        kept, last = states.tensors[0], weight.shape[-1] - 1
        out = torch.empty_like(mixed)
        if len(states.at):
            before = kept.read(self._index, states.tables)
            window = torch.cat([before.to(mixed.dtype), mixed[states.at][:, None]], 1)
            ends = conv1d(window.transpose(1, 2), weight, bias, groups=len(weight))
            out[states.at] = ends[..., 0]
            kept.write(self._index, states.tables, window[:, 1:])
        for run in states.runs:
            here = slice(run.at, run.at + run.count)
            before = mixed.new_zeros(last, mixed.shape[1])
            if not run.is_first:
                before = kept.read(self._index, run.table)[0].to(mixed.dtype)
            window = torch.cat([before, mixed[here]])
            out[here] = conv1d(window.t()[None], weight, bias, groups=len(weight))[0].t()
            kept.write(self._index, run.table, window[None, len(window) - last :])
        return silu(out)

    def _recalled(self, tokens: Tokens, states: StateBatch) -> torch.Tensor:
        """`[T, heads, value_dim]` of the delta rule; each sequence's matrices are kept."""
        kept, out = states.tensors[1], torch.empty_like(tokens.value)
        if len(states.at):
            before = kept.read(self._index, states.tables)
            out[states.at], after = delta_rule.step(tokens.at(states.at), before)
            kept.write(self._index, states.tables, after)
        for run in states.runs:
            here = slice(run.at, run.at + run.count)
            before = kept.read(self._index, run.table)[0]
            if run.is_first:
                before = torch.zeros_like(before)
            out[here], after = delta_rule.chunk(tokens.at(here), before)
            kept.write(self._index, run.table, after[None])
        return out
