"""Gated delta-net layers over the states of a step, in plain torch: what `triton_delta` computes.

Theory of operation
-------------------
A layer's projection gives queries, keys and values, which pass a short convolution and then the
delta rule.  Of each sequence the convolution's last inputs and the rule's matrices are kept.  A
sequence that begins in this step reads neither.  Sequences with one token come first, and with
them those whose tokens are a run (`FlatBatch.runs`).  States of some runs are written later, by
`replay`, from what `Later` has of their tokens.

The rule.  A head keeps a matrix S `[key_dim, value_dim]`.  A token with key k, value v, decay
exp(g) and strength b changes it to `S' = exp(g) S + k b (v - k (exp(g) S))`: what the key recalls
is moved towards the value.  It answers `q S'`.  One token (`step`) is just that.  Many (`chunk`)
are computed `SPAN` at a time.  Within a span the corrections are a unit triangular system, which is
solved at once; between spans only S is handed on.  Keys and queries have length one; everything is
computed in float32.

Source: "Gated Delta Networks" (Yang et al.); the order of operations is that of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional
from torch.nn.functional import pad

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

__all__ = ["SPAN", "DeltaTokens", "Heads", "Later", "chunk", "convolve", "recall", "replay", "step"]

SPAN = 64
_EPS = 1e-6


class DeltaTokens(NamedTuple):
    """A layer's numbers for n tokens; g is the logarithm of the decay."""

    query: torch.Tensor  # [n, heads, key_dim]
    key: torch.Tensor
    value: torch.Tensor  # [n, heads, value_dim]
    g: torch.Tensor  # [n, heads]
    beta: torch.Tensor

    def at(self, places: slice | torch.Tensor) -> DeltaTokens:
        return DeltaTokens(*(part[places] for part in self))


class Later(NamedTuple):
    """What the decodes of a step bring to states; of many layers, with a dimension before."""

    rows: torch.Tensor  # [n, channels], before the convolution
    strengths: torch.Tensor  # [n, 2 num_values]


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
        return self.num_values * self.value_dim


def convolve(
    rows: torch.Tensor,
    taps: torch.Tensor,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
    later: Later | None = None,
) -> torch.Tensor:
    """SiLU of the causal convolution of each sequence's rows, `[T, channels]`.

    rows `[T, channels]`, taps `[inputs, channels]`; `kept`: the last inputs but one; `later`: where
    rows of decodes are left.  Padding comes out as anything."""
    out, last = torch.zeros_like(rows), len(taps) - 1
    if later is not None:
        later.rows[: int(batch.decodes)] = rows[: int(batch.decodes)]
    firsts, counts, tables, has_begun, are_now = _runs(batch)
    before = _begun(kept.read(layer, tables), has_begun).to(rows.dtype)
    for going, at in _tokens_of(firsts, counts):
        window = torch.cat([before[going], rows[at, None]], 1)
        out[at] = _convolved(window, taps)[:, 0]
        before[going] = window[:, 1:]
    kept.write(layer, tables[are_now], before[are_now])
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
    later: Later | None = None,
) -> torch.Tensor:
    """What the states answer, normed and gated, `[T, values]`; what pads, zeros.

    mixed `[T, channels]`, as convolved; gates `[T, values]`; strengths `[T, 2 num_values]`: of
    write and decay."""
    out = torch.zeros_like(gates)
    if later is not None:
        later.strengths[: int(batch.decodes)] = strengths[: int(batch.decodes)]
    firsts, counts, tables, has_begun, are_now = _runs(batch)
    states = _begun(kept.read(layer, tables), has_begun)
    for going, at in _tokens_of(firsts, counts):
        answers, states[going] = step(_tokens(mixed[at], strengths[at], heads), states[going])
        out[at] = _gated(answers, gates[at], heads)
    kept.write(layer, tables[are_now], states[are_now])
    for here, table, has_begun in _chunks(batch):
        before = kept.read(layer, table)[0] if has_begun else None
        answers, after = chunk(_tokens(mixed[here], strengths[here], heads), before)
        out[here] = _gated(answers, gates[here], heads)
        kept.write(layer, table, after[None])
    return out


def replay(
    later: Later,
    taps: torch.Tensor,
    heads: Heads,
    inputs: SequenceTensor,
    matrices: SequenceTensor,
    batch: FlatBatch,
) -> None:
    """Write the states of all layers, the first dimension of the first two and of what is a
    layer's in `heads`.  `batch`: decodes alone, with a run of the tokens that count."""
    for layer, (rows, strengths) in enumerate(zip(*later, strict=True)):
        mixed = convolve(rows[: len(batch.runs)], taps[layer], inputs, layer, batch)
        gates = torch.zeros_like(mixed[:, : heads.values])  # of answers that nobody reads
        of_layer = heads._replace(rate=heads.rate[layer], bias=heads.bias[layer])
        recall(mixed, gates, strengths, of_layer, matrices, layer, batch)


def _runs(batch: FlatBatch) -> tuple[torch.Tensor, ...]:
    """Of sequences whose tokens are decodes: the first one, how many, the blocks of their states,
    whether tokens come before, and whether states are written in this step."""
    runs = batch.runs[: int(batch.decodes)]
    firsts = runs.nonzero()[:, 0]
    runs, states = runs[firsts], batch.states[firsts].long()
    return firsts, runs.abs(), states, batch.seq_lens[firsts] > 1, runs > 0


def _tokens_of(firsts: torch.Tensor, counts: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of the first tokens, then of the second ones: who has one (bool `[n]`), and where."""
    for at in range(max(counts.tolist(), default=0)):
        going = counts > at
        yield going, firsts[going] + at


def _chunks(batch: FlatBatch) -> Iterator[tuple[slice, torch.Tensor, bool]]:
    """Of sequences with several tokens: their places, state blocks, whether tokens come before."""
    if not batch.shape.num_tiles:
        return  # `replay`, in whose room there may be some
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


def _tokens(mixed: torch.Tensor, strengths: torch.Tensor, heads: Heads) -> DeltaTokens:
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
    return DeltaTokens(query, key, value, heads.rate * steps, writing.sigmoid())


def _gated(answers: torch.Tensor, gates: torch.Tensor, heads: Heads) -> torch.Tensor:
    wide = answers.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + heads.eps)
    normed = (heads.gain * wide.to(answers.dtype)).float()
    gates = gates.unflatten(-1, (heads.num_values, -1)).float()
    return (normed * functional.silu(gates)).to(answers.dtype).flatten(1)


def step(tokens: DeltaTokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token of each of n sequences: what it answers, `[n, heads, value_dim]`, and the states
    behind it, `[n, heads, key_dim, value_dim]`."""
    query, key, value, g, beta = tokens
    query, key = _unit(query) * query.shape[-1] ** -0.5, _unit(key)
    state = state * g.exp()[..., None, None]
    recalled = (state * key[..., None]).sum(-2)
    correction = (value.float() - recalled) * beta.float()[..., None]
    state = state + key[..., None] * correction[..., None, :]
    return (state * query[..., None]).sum(-2).to(value.dtype), state


def chunk(tokens: DeltaTokens, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
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
