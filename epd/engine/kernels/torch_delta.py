"""Gated delta-net layers over the states of a step, in plain torch: what `triton_delta` computes.

Rows of a layer's projection are `[queries and keys | values | gates]`; the first two pass a short
convolution, whose last inputs are kept of each sequence, and then the delta rule (`delta_rule`),
whose matrices are.  A sequence that begins in this step reads neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from epd.engine import delta_rule
from epd.engine.delta_rule import Heads, Tokens

if TYPE_CHECKING:
    from epd.engine.flat_batch import FlatBatch, FlatChunk
    from epd.engine.kv_pool import SequenceTensor

__all__ = ["convolve", "convolve_chunks", "recall", "recall_chunks"]


def convolve(
    rows: torch.Tensor, taps: torch.Tensor, kept: SequenceTensor, layer: int, batch: FlatBatch
) -> None:
    """SiLU of the causal convolution of each sequence's rows, in place.

    rows `[T, at least channels]`, taps `[inputs, channels]`; `kept`: the last inputs but one.
    """
    known, tables = _decodes(batch)
    if len(known):
        channels = taps.shape[1]
        before = _begun(kept.read(layer, tables), batch.seq_lens[known] > 1).to(rows.dtype)
        window = torch.cat([before, rows[known, None, :channels]], 1)
        rows[known, :channels] = _convolved(window, taps)[:, 0]
        kept.write(layer, tables, window[:, 1:])
    convolve_chunks(rows, taps, kept, layer, batch)


def convolve_chunks(
    rows: torch.Tensor, taps: torch.Tensor, kept: SequenceTensor, layer: int, batch: FlatBatch
) -> None:
    """Of sequences with several rows, one by one."""
    last, channels = len(taps) - 1, taps.shape[1]
    for chunk in batch.chunks:
        table, here = _table(batch, chunk), rows[chunk.at : chunk.at + chunk.count, :channels]
        before = rows.new_zeros(last, channels)
        if chunk.start:
            before = kept.read(layer, table)[0].to(rows.dtype)
        window = torch.cat([before, here])[None]
        here.copy_(_convolved(window, taps)[0])
        kept.write(layer, table, window[:, window.shape[1] - last :])


def recall(
    rows: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
) -> torch.Tensor:
    """What the states answer, normed and gated, `[T, values]`.

    rows `[T, channels + values]`; strengths `[T, 2 num_values]`: of writing and of decay.
    """
    out = torch.zeros(len(rows), heads.values, dtype=rows.dtype, device=rows.device)
    known, tables = _decodes(batch)
    if len(known):
        before = _begun(kept.read(layer, tables), batch.seq_lens[known] > 1)
        tokens = _tokens(rows[known], strengths[known], heads)
        answers, after = delta_rule.step(tokens, before)
        out[known] = _gated(answers, rows[known], heads)
        kept.write(layer, tables, after)
    recall_chunks(rows, strengths, heads, kept, layer, batch, out)
    return out


def recall_chunks(
    rows: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
    out: torch.Tensor,
) -> None:
    """Of sequences with several rows, one by one."""
    for chunk in batch.chunks:
        table, here = _table(batch, chunk), slice(chunk.at, chunk.at + chunk.count)
        before = kept.read(layer, table)[0] if chunk.start else None
        tokens = _tokens(rows[here], strengths[here], heads)
        answers, after = delta_rule.chunk(tokens, before)
        out[here] = _gated(answers, rows[here], heads)
        kept.write(layer, table, after[None])


def _decodes(batch: FlatBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences with one row, which is that of their number, and the blocks of their states."""
    states = batch.states[: batch.shape.num_decodes].long()
    known = (states[:, 0] >= 0).nonzero()[:, 0]
    return known, states[known]


def _table(batch: FlatBatch, chunk: FlatChunk) -> torch.Tensor:
    return batch.states[chunk.sequence][None].long()


def _begun(kept: torch.Tensor, has_begun: torch.Tensor) -> torch.Tensor:
    """What was kept of those that have, and zeros: of others anything may lie there."""
    return kept.where(has_begun.view(-1, *[1] * (kept.dim() - 1)), 0)


def _convolved(window: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    weight = taps.t()[:, None]
    out = functional.conv1d(window.transpose(1, 2), weight, groups=len(weight))
    return functional.silu(out).transpose(1, 2)


def _tokens(rows: torch.Tensor, strengths: torch.Tensor, heads: Heads) -> Tokens:
    keys = heads.num_keys * heads.key_dim
    query, key, value, _ = rows.split([keys, keys, heads.values, heads.values], -1)
    repeats = heads.num_values // heads.num_keys
    query, key = (
        part.unflatten(-1, (heads.num_keys, -1)).repeat_interleave(repeats, 1)
        for part in (query, key)
    )
    writing, decay = strengths.chunk(2, -1)
    steps = functional.softplus(decay.float() + heads.bias)
    value = value.unflatten(-1, (heads.num_values, -1))
    return Tokens(query, key, value, heads.rate * steps, writing.sigmoid())


def _gated(answers: torch.Tensor, rows: torch.Tensor, heads: Heads) -> torch.Tensor:
    gates = rows[:, -heads.values :].unflatten(-1, (heads.num_values, -1))
    wide = answers.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + heads.eps)
    normed = (heads.gain * wide.to(answers.dtype)).float()
    return (normed * functional.silu(gates.float())).to(answers.dtype).flatten(1)
