"""Gated delta-net layers over the states of a step, in plain torch: what `triton_delta` computes.

A layer's projection gives queries, keys and values, which pass a short convolution, whose last
inputs are kept of each sequence, and then the delta rule (`delta_rule`), whose matrices are.  A
sequence that begins in this step reads neither.  Sequences with one token come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from epd.engine.kernels import delta_rule
from epd.engine.kernels.delta_rule import Heads, Tokens

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

__all__ = ["convolve", "recall"]


def convolve(
    rows: torch.Tensor, taps: torch.Tensor, kept: SequenceTensor, layer: int, batch: FlatBatch
) -> torch.Tensor:
    """SiLU of the causal convolution of each sequence's rows, `[T, channels]`.

    rows `[T, channels]`, taps `[inputs, channels]`; `kept`: the last inputs but one.  What pads
    comes out as anything.
    """
    out, last = torch.zeros_like(rows), len(taps) - 1
    ones, tables = _ones(batch)
    if ones:
        before = _begun(kept.read(layer, tables), batch.seq_lens[:ones] > 1).to(rows.dtype)
        window = torch.cat([before, rows[:ones, None]], 1)
        out[:ones] = _convolved(window, taps)[:, 0]
        kept.write(layer, tables, window[:, 1:])
    for here, table, has_begun in _chunks(batch):
        before = rows.new_zeros(last, rows.shape[1])
        if has_begun:
            before = kept.read(layer, table)[0].to(rows.dtype)
        window = torch.cat([before, rows[here]])[None]
        out[here] = _convolved(window, taps)[0]
        kept.write(layer, table, window[:, window.shape[1] - last :])
    return out


def recall(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
) -> torch.Tensor:
    """What the states answer, normed and gated, `[T, values]`; what pads, zeros.

    mixed `[T, channels]`, as convolved; gates `[T, values]`; strengths `[T, 2 num_values]`: of
    writing and of decay.
    """
    out = torch.zeros_like(gates)
    ones, tables = _ones(batch)
    if ones:
        before = _begun(kept.read(layer, tables), batch.seq_lens[:ones] > 1)
        answers, after = delta_rule.step(_tokens(mixed[:ones], strengths[:ones], heads), before)
        out[:ones] = _gated(answers, gates[:ones], heads)
        kept.write(layer, tables, after)
    for here, table, has_begun in _chunks(batch):
        before = kept.read(layer, table)[0] if has_begun else None
        answers, after = delta_rule.chunk(_tokens(mixed[here], strengths[here], heads), before)
        out[here] = _gated(answers, gates[here], heads)
        kept.write(layer, table, after[None])
    return out


def _ones(batch: FlatBatch) -> tuple[int, torch.Tensor]:
    """How many sequences have one token, and the blocks of their states."""
    count = int(batch.decodes)
    return count, batch.states[:count].long()


def _chunks(batch: FlatBatch) -> Iterator[tuple[slice, torch.Tensor, bool]]:
    """Of sequences with several tokens: where they are, the blocks of the state, and whether there
    are tokens before them."""
    cu_q, lengths = batch.cu_q.tolist(), batch.seq_lens.tolist()
    for i in range(int(batch.decodes), len(lengths)):
        if cu_q[i] < cu_q[i + 1]:
            has_begun = lengths[i] > cu_q[i + 1] - cu_q[i]
            yield slice(cu_q[i], cu_q[i + 1]), batch.states[i][None].long(), has_begun


def _begun(kept: torch.Tensor, has_begun: torch.Tensor) -> torch.Tensor:
    """What was kept of those that have, and zeros: of others anything may lie there."""
    return kept.where(has_begun.view(-1, *[1] * (kept.dim() - 1)), 0)


def _convolved(window: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    weight = taps.t()[:, None]
    out = functional.conv1d(window.transpose(1, 2), weight, groups=len(weight))
    return functional.silu(out).transpose(1, 2)


def _tokens(mixed: torch.Tensor, strengths: torch.Tensor, heads: Heads) -> Tokens:
    keys = heads.num_keys * heads.key_dim
    query, key, value = mixed.split([keys, keys, heads.values], -1)
    repeats = heads.num_values // heads.num_keys
    query, key = (
        part.unflatten(-1, (heads.num_keys, -1)).repeat_interleave(repeats, 1)
        for part in (query, key)
    )
    writing, decay = strengths.chunk(2, -1)
    steps = functional.softplus(decay.float() + heads.bias)
    value = value.unflatten(-1, (heads.num_values, -1))
    return Tokens(query, key, value, heads.rate * steps, writing.sigmoid())


def _gated(answers: torch.Tensor, gates: torch.Tensor, heads: Heads) -> torch.Tensor:
    wide = answers.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + heads.eps)
    normed = (heads.gain * wide.to(answers.dtype)).float()
    gates = gates.unflatten(-1, (heads.num_values, -1)).float()
    return (normed * functional.silu(gates)).to(answers.dtype).flatten(1)
