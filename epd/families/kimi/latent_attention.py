"""Latent attention (MLA, of DeepSeek-V3 and Kimi-K2.5) over paged latent rows.

Theory of operation
-------------------
Keys and values of all heads are products of one short row for each token: the latent.  The pool
keeps that row and, behind it, the turned key that all heads share: nothing of any head, so every
rank of a group keeps the same.  There are two ways to attend, equal but for rounding.

- Chunks *expand* the rows of their sequences into keys and values of the heads, once for all their
  queries, and attend over them as usual. Over long histories they do so for some chunks or heads at
  a time, in bounded memory.
- A decode is *absorbed*: the factor that would make keys of latents is multiplied into its one
  query instead, and the factor of values into what it attends to.  So it reads the rows as they
  lie, as one head that all queries share, and nothing is made for each token of its history.

The host alone has the number of rows to expand, so steps with prompts are not captured."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from epd.engine.kernels.eight_bits import Scaled
from epd.engine.kernels.torch_latent import Expanded
from epd.engine.language.flat_batch import FlatBatch, FlatChunk
from epd.engine.language.kv_pool import KvPart
from epd.engine.language.mixers import NormOf, Step
from epd.engine.language.products import Foreign, side_by_side
from epd.engine.language.state_kinds import PagedRows

HEADS = {
    f"{stack}layers.*.self_attn.{name}": how
    for stack in ("model.", "model.language_model.")
    for name, how in (
        ("q_proj", "colwise"),
        ("q_b_proj", "colwise"),
        ("kv_b_proj", "colwise"),
        ("o_proj", "rowwise"),
    )
}
ROWS_NBYTES = 128 << 20  # latent rows at once, but for a chunk that has more
EXPANDED_NBYTES = 256 << 20  # keys and values at once, but for a head that has more


def latent_rows(text: Foreign, num_more: int = 0) -> PagedRows:
    """A latent and a rotated key that all heads share: the same at every rank."""
    width = int(text.kv_lora_rank) + int(text.qk_rope_head_dim)
    return PagedRows(int(text.num_hidden_layers) + num_more, 1, width, num_parts=1)


class LatentAttention:
    """The mixer of a layer with latent attention."""

    takes_fp8 = False
    reads_chunks = True
    _KNOWN = frozenset(
        "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj".split()
    )

    def __init__(self, layer: Foreign, kernels: Foreign, norm_of: NormOf) -> None:
        attention = layer.self_attn
        self._kernels = kernels
        self._index = int(attention.layer_idx)
        self._scaling = float(attention.scaling)
        self._interleaved = bool(attention.config.rope_interleave)
        self._inputs = side_by_side(attention.q_a_proj, attention.kv_a_proj_with_mqa)
        self._queries = attention.q_b_proj
        self._norms = norm_of(attention.q_a_layernorm), norm_of(attention.kv_a_layernorm)
        self._output = attention.o_proj
        self._key_dim = int(attention.qk_nope_head_dim)  # of the part that does not turn
        self._value_dim = int(attention.v_head_dim)
        self._latent = int(attention.kv_lora_rank)
        # Of the heads that are here, [heads, key and value numbers, latent].
        self._factors = attention.kv_b_proj.weight.unflatten(
            0, (-1, self._key_dim + self._value_dim)
        )

    @staticmethod
    def fits(layer: Foreign) -> bool:
        attention = getattr(layer, "self_attn", None)
        names = {name for name, _ in attention.named_children()} if attention is not None else set()
        return names == LatentAttention._KNOWN

    def __call__(self, x: torch.Tensor | Scaled, step: Step) -> torch.Tensor:
        ops, batch, pool = self._kernels, step.batch, step.pool.latent(self._index)
        turns = {"cos": step.cos, "sin": step.sin, "interleaved": self._interleaved}
        ranks = ops.store_latent(
            self._inputs(x), self._norms, slots=batch.slots, pool=pool, **turns
        )
        query = self._queries(ranks).unflatten(-1, (len(self._factors), -1))
        query = self.scaled(query, step)
        turned = ops.turn_queries(query, **turns)
        attended = query.new_empty(*query.shape[:2], self._value_dim)
        if batch.shape.num_decodes:
            self._absorbed(query, turned, pool, batch, attended)
        for expanded in self._expansions(pool, batch):
            ops.attend_expanded(query, turned, expanded, batch, self._scaling, attended)
        out: torch.Tensor = self._output(attended.flatten(1))
        return out

    def scaled(self, query: torch.Tensor, step: Step) -> torch.Tensor:
        """`[T, heads, numbers of a query]`, both ways."""
        return query

    def _absorbed(
        self,
        query: torch.Tensor,
        turned: torch.Tensor,
        pool: KvPart,
        batch: FlatBatch,
        out: torch.Tensor,
    ) -> None:
        """Decodes, into the first rows of `out`."""
        count = batch.shape.num_decodes
        of_keys, of_values = self._factors.tensor_split([self._key_dim], 1)
        plain = query[:count, :, : self._key_dim].transpose(0, 1)
        latent = torch.bmm(plain, of_keys).transpose(0, 1)
        attended = self._kernels.attend_latent(latent, turned, pool, batch, self._scaling)
        # A product into a view: heads lie behind each other in a token.
        values = attended.transpose(0, 1), of_values.transpose(1, 2)
        torch.bmm(*values, out=out[:count].transpose(0, 1))

    def _expansions(self, pool: KvPart, batch: FlatBatch) -> Iterator[Expanded]:
        """Keys and values for all chunks, some chunks and some heads at a time."""
        num_heads, width, latent = self._factors.shape
        dtype = self._factors.dtype
        block_size, row_nbytes = pool.numbers.shape[1], pool.width * dtype.itemsize
        lengths = [_padded(chunk, block_size) for chunk in batch.chunks]
        end = len(batch.indices)
        first = end - sum(lengths) // block_size
        for group in _groups(lengths, ROWS_NBYTES // row_nbytes):
            chunks = batch.chunks[group.start : group.stop]
            count = sum(lengths[group.start : group.stop])
            blocks = batch.indices[first : first + count // block_size]
            first += count // block_size
            rows = pool.read(blocks, dtype).flatten(0, 2)
            _clear_between(rows, chunks, block_size)
            sequences = range(chunks[0].sequence, chunks[-1].sequence + 1)
            at_once = max(1, EXPANDED_NBYTES // (count * width * rows.itemsize))
            for head in range(0, num_heads, at_once):
                factors = self._factors[head : head + at_once].flatten(0, 1)
                numbers = linear(rows[:, :latent], factors).unflatten(1, (-1, width))
                yield Expanded(numbers, rows, block_size, sequences, head)


def _padded(chunk: FlatChunk, block_size: int) -> int:
    """Rows of the blocks of its tokens."""
    return -(-(chunk.start + chunk.count) // block_size) * block_size


def _groups(lengths: list[int], most: int) -> Iterator[range]:
    """Neighbours that have so many rows together, or one that has more."""
    first = total = 0
    for at, length in enumerate(lengths):
        if at > first and total + length > most:
            yield range(first, at)
            first, total = at, 0
        total += length
    if lengths:
        yield range(first, len(lengths))


def _clear_between(rows: torch.Tensor, chunks: tuple[FlatChunk, ...], block_size: int) -> None:
    """What nobody has written may be a NaN, and a masked NaN still poisons a sum."""
    at = 0
    for chunk in chunks:
        known, at = at + chunk.start + chunk.count, at + _padded(chunk, block_size)
        if known < at:
            rows[known:at].zero_()
