"""Latent attention in plain torch: what `triton_latent` computes.

A latent row is the normed latent of a token and, behind it, the turned key that all heads share.
Numbers that turn together lie side by side (`interleaved`) or in two halves, and in two halves
afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvPart

__all__ = ["Expanded", "attend_expanded", "attend_latent", "store_latent", "turn_queries"]
Norm = tuple[torch.Tensor, float]  # gain and eps


class Expanded(NamedTuple):
    """Keys and values of some heads, of all tokens of some sequences with several queries."""

    numbers: torch.Tensor  # [N, heads, key and value numbers]
    rows: torch.Tensor  # [N, latent + key]: of whole blocks, and zeros where no token lies
    block_size: int
    sequences: range
    first_head: int


def store_latent(
    rows: torch.Tensor,
    norms: tuple[Norm, Norm],
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool: KvPart,
    *,
    interleaved: bool,
) -> torch.Tensor:
    """Norm of the queries' ranks and of the latent, turn of the shared key, and the write of the
    latent row into the pool.

    rows `[T, query ranks + latent + key]`, contiguous; `norms`: of the ranks and of
    the latent; cos and sin `[T, key]`; slots `[T]`, below 0: written nowhere.  Gives the normed
    ranks.
    """
    num_latent, num_turned = len(norms[1][0]), cos.shape[1]
    ranks, latent, key = rows.tensor_split([-num_latent - num_turned, -num_turned], -1)
    key = _turned(key[:, None], cos, sin, interleaved)
    at = slots.long()
    written = at >= 0
    row = torch.cat((_normed(latent, norms[1])[:, None], key), -1)[written]
    block_size = pool.numbers.shape[1]
    pool.write(at[written] // block_size, at[written] % block_size, row)
    return _normed(ranks, norms[0])


def turn_queries(
    query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """The last numbers of queries `[T, num_heads, D]`, turned: as many as cos and sin have."""
    return _turned(query[..., -cos.shape[1] :], cos, sin, interleaved)


def attend_latent(
    query: torch.Tensor, turned: torch.Tensor, pool: KvPart, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    """What decodes attend to of the latents, `[num_decodes, num_heads, latent]`; zeros, of those
    that pad.  query `[num_decodes, num_heads, latent]`; turned `[at least num_decodes, num_heads,
    key]`."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    indptr = batch.indptr.tolist()
    for i, length in enumerate(batch.seq_lens[: int(batch.decodes)].tolist()):
        blocks = batch.indices[indptr[i] : indptr[i + 1]].long()
        rows = pool.read(blocks, query.dtype).flatten(0, 2)[:length]
        whole = torch.cat((query[i], turned[i]), -1)
        latents = rows[:, : query.shape[2]]
        out[i] = scaled_dot_product_attention(whole[None], rows[None], latents[None], scale=scaling)
    return out


def attend_expanded(
    query: torch.Tensor,
    turned: torch.Tensor,
    expanded: Expanded,
    batch: FlatBatch,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """Causal attention of the queries of some sequences and heads over what was expanded for them.

    query `[T, num_heads, key numbers + turned]`, whose last numbers count as `turned` has them; out
    `[T, num_heads, value numbers]`.
    """
    numbers = expanded.numbers
    key_dim = numbers.shape[2] - out.shape[2]
    heads = slice(expanded.first_head, expanded.first_head + numbers.shape[1])
    shared = expanded.rows[:, None, -turned.shape[2] :].expand(-1, numbers.shape[1], -1)
    key, value = torch.cat((numbers[..., :key_dim], shared), -1), numbers[..., key_dim:]
    indptr = (expanded.block_size * batch.indptr).tolist()
    for chunk in batch.chunks:
        if chunk.sequence not in expanded.sequences:
            continue
        length, here = chunk.start + chunk.count, slice(chunk.at, chunk.at + chunk.count)
        begin = indptr[chunk.sequence] - indptr[expanded.sequences.start]
        known = slice(begin, begin + length)
        whole = torch.cat((query[here, heads, :key_dim], turned[here, heads]), -1)
        places = torch.arange(length, device=query.device)
        attended = scaled_dot_product_attention(
            whole.transpose(0, 1)[None],
            key[known].transpose(0, 1)[None],
            value[known].transpose(0, 1)[None],
            attn_mask=places[None] <= places[chunk.start :, None],
            scale=scaling,
        )
        out[here, heads] = attended[0].transpose(0, 1)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    gain, eps = norm
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (gain * (wide * scale).to(gain.dtype)).to(x.dtype)


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    low, high = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = (part[:, None, : low.shape[-1]] for part in (cos, sin))
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
