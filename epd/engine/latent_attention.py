"""Latent attention (MLA, of DeepSeek-V3 and Kimi-K2.5) over paged latent rows.

Theory of operation
-------------------
Keys and values of all heads are products of one short row for each token: the latent.  The pool
keeps that row and, behind it, the rotated key that all heads share: nothing of any head, so every
rank of a group keeps the same.  There are two ways to attend, equal but for rounding.

- A chunk *expands* the rows of its sequence into keys and values of its heads, once for all its
  queries, and attends over them as usual; over a long history some heads at a time, so that these
  take bounded memory.
- A decode is *absorbed*: the factor that would make keys of latents is multiplied into its one
  query instead, and the factor of values into what it attends to.  So it reads the rows as they
  lie, as one head that all queries share, and nothing is made for each token of its history.

Chunks, groups of decodes and masks are those of `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.attention import Chunk, DecodeGroup, PagedBatch
from epd.engine.kv_pool import KvPart

EXPANDED_NBYTES = 256 << 20  # keys and values at once


class LatentAttention(nn.Module):
    """In place of a layer's attention of transformers, with its weights."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.query = nn.ModuleList(
            [attention.q_proj]
            if attention.q_lora_rank is None
            else [attention.q_a_proj, attention.q_a_layernorm, attention.q_b_proj]
        )
        self.compress = attention.kv_a_proj_with_mqa
        self.norm = attention.kv_a_layernorm
        self.o_proj = attention.o_proj
        self.layer_idx = int(attention.layer_idx)
        self.scaling = float(attention.scaling)
        self._interleaved = bool(attention.config.rope_interleave)
        self._rank = int(attention.kv_lora_rank)
        self._key_dim = int(attention.qk_nope_head_dim)  # of the part that is not rotated
        rows = self._key_dim + int(attention.v_head_dim)
        factors = attention.kv_b_proj.weight.unflatten(0, (-1, rows))  # of the heads that are here
        self.of_keys, self.of_values = (  # views
            nn.Parameter(part, requires_grad=False)
            for part in factors.split([self._key_dim, rows - self._key_dim], 1)
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: PagedBatch,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        hidden = hidden_states[0]
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        query = hidden
        for module in self.query:
            query = module(query)
        query = query.unflatten(-1, (len(self.of_keys), -1))
        plain, rotated = query.tensor_split([self._key_dim], -1)
        latent, key = self.compress(hidden).tensor_split([self._rank], -1)
        pool = paged.pool.latent(self.layer_idx)
        rows = torch.cat((self.norm(latent), self._rotated(key[:, None], cos, sin)[:, 0]), -1)
        rows = pool.write(paged.slot_blocks, paged.slot_offsets, rows[:, None])[:, 0]
        query = torch.cat((plain, self._rotated(rotated, cos, sin)), -1)
        output = query.new_empty(*query.shape[:2], self.of_values.shape[1])
        for chunk in paged.chunks:
            output[chunk.at : chunk.at + chunk.count] = self._expanded(chunk, query, rows, pool)
        for group in paged.decodes:
            output.index_copy_(0, group.at, self._absorbed(group, query, pool))
        return self.o_proj(output.flatten(1))[None], None

    def _expanded(
        self, chunk: Chunk, query: torch.Tensor, rows: torch.Tensor, pool: KvPart
    ) -> torch.Tensor:
        """`[count, num_heads, v_head_dim]`."""
        here = slice(chunk.at, chunk.at + chunk.count)
        if chunk.blocks is None:
            rows = rows[here]
        else:
            rows = pool.read(chunk.blocks, query.dtype).flatten(0, 2)
        heads = query[here].transpose(0, 1)
        row_nbytes = rows.itemsize * (heads.shape[2] + self.of_values.shape[1])
        at_once = max(1, EXPANDED_NBYTES // (len(rows) * row_nbytes))
        factors = zip(
            *(part.split(at_once) for part in (self.of_keys, self.of_values)), strict=True
        )
        parts = [
            self._attended(part, rows, of_keys, of_values, chunk)
            for part, (of_keys, of_values) in zip(heads.split(at_once), factors, strict=True)
        ]
        return torch.cat(parts).transpose(0, 1)

    def _attended(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        of_keys: torch.Tensor,
        of_values: torch.Tensor,
        chunk: Chunk,
    ) -> torch.Tensor:
        """Of some heads, `[heads, count, v_head_dim]`."""
        latent, shared = rows.tensor_split([self._rank], -1)
        shared = shared.expand(len(of_keys), -1, -1)
        return scaled_dot_product_attention(
            query[None],
            torch.cat((latent @ of_keys.transpose(1, 2), shared), -1)[None],
            (latent @ of_values.transpose(1, 2))[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None and chunk.count > 1,
            scale=self.scaling,
        )[0]

    def _absorbed(self, group: DecodeGroup, query: torch.Tensor, pool: KvPart) -> torch.Tensor:
        """`[n, num_heads, v_head_dim]`."""
        count = len(group.at)
        plain, rotated = query.index_select(0, group.at).tensor_split([self._key_dim], -1)
        plain = torch.einsum("nhd,hdr->nhr", plain, self.of_keys)
        rows = pool.read(group.blocks.view(-1), query.dtype).view(count, 1, -1, pool.width)
        attended = scaled_dot_product_attention(
            torch.cat((plain, rotated), -1)[:, None],
            rows,
            rows[..., : self._rank],
            attn_mask=group.mask,
            scale=self.scaling,
        )
        return torch.einsum("nhr,hdr->nhd", attended[:, 0], self.of_values)

    def _rotated(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[T, heads, D]`; pairs lie side by side or in two halves, and in halves afterwards."""
        low, high = (x[..., 0::2], x[..., 1::2]) if self._interleaved else x.chunk(2, -1)
        cos, sin = (part[:, None, : low.shape[-1]] for part in (cos, sin))
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
