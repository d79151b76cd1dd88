"""Attention of prompts over the pool's own blocks, by the library.

Theory of operation
-------------------
The library finds a sequence's keys through a table of its blocks, one row for each prompt.  A step
has its blocks row behind row, so one kernel spreads them, once in a step and not in each layer.  It
reads the step's integers on the device, since a captured step has no lengths on the host; what was
spread within a capture is spread anew by every replay.  Only the rows of a sequence are read, so
what lies behind its last key may be anything.

It has no keys and values of eight bits with a scale for each token.  So these are laid side by side
in 16 bits first, and are pages of `ALIGNED` rows there, whose last one ends with zeros
(`triton_prompts`).  Prompts that find no room there go through Triton.

Prompts of any length go this way, drafts too: there is no second launch for short ones.  Those that
see a window do not: rows of a picture may see each other there, for which it has no argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels import triton_attention
from epd.engine.kernels.fast import ANY_LENGTH
from epd.engine.kernels.triton_prompts import ALIGNED, SEVERAL, first_row, lay

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer

HEAD_DIMS = range(64, 129, 16)  # those that are tested
PARTS, BLOCK = 8, 256  # programs that spread one table, and entries at once


class Tables(NamedTuple):
    """Of a step's prompts, int32."""

    starts: torch.Tensor  # [prompts + 1]: first query of each
    counts: torch.Tensor  # [prompts]: queries; 0 if the blocks are pages and it has none
    lengths: torch.Tensor  # [prompts]: keys
    blocks: torch.Tensor  # [prompts, blocks]; behind a sequence's last: anything


@triton.jit(do_not_specialize=["room", "prompts", "max_rows"])
def _spread(
    decodes, cu_q, seq_lens, indptr, indices, starts, counts, lengths, blocks, room, prompts,
    max_rows, LAID: tl.constexpr, LEAST: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    prompt = tl.program_id(0)
    num_decodes = tl.load(decodes)
    sequence = num_decodes + prompt
    begin = tl.load(cu_q + sequence)
    if tl.program_id(1) == 0:
        tl.store(starts + prompt, begin)
    if prompt == prompts:
        return
    length = tl.load(seq_lens + sequence)
    queries = tl.load(cu_q + sequence + 1) - begin
    first = tl.load(indptr + sequence)
    count = tl.load(indptr + sequence + 1) - first
    if LAID:
        row = first_row(
            sequence, num_decodes, cu_q, indptr, seq_lens, max_rows, LEAST, BLOCK_SIZE, ALIGNED
        )
        queries = tl.where(row >= 0, queries, 0)
        first = row // ALIGNED
        count = tl.where(row >= 0, tl.cdiv(length, ALIGNED), 0)
    if tl.program_id(1) == 0:
        tl.store(counts + prompt, queries)
        tl.store(lengths + prompt, length)
    for at in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        block = first + place
        if not LAID:
            block = tl.load(indices + block, mask=place < count)
        tl.store(blocks + prompt.to(tl.int64) * room + place, block, mask=place < count)


def tables_of(batch: FlatBatch, block_size: int, laid_rows: int = 0) -> Tables:
    """Made once for a step; within a capture, once for it.  `laid_rows`: how many there are, if the
    blocks are pages of these."""
    captured = batch.indices.is_cuda and torch.cuda.is_current_stream_capturing()
    key = "tables", laid_rows, captured
    if key not in batch.derived:
        batch.derived[key] = _tables(batch, block_size, laid_rows)
    return Tables(*batch.derived[key])


def _tables(batch: FlatBatch, block_size: int, laid_rows: int) -> Tables:
    prompts = batch.shape.num_sequences - batch.shape.num_decodes
    room = laid_rows // ALIGNED or max(1, len(batch.indices))
    if batch.chunks and not laid_rows:
        room = max(-(-(chunk.start + chunk.count) // block_size) for chunk in batch.chunks)
    ints = batch.indices.new_empty
    tables = Tables(ints(prompts + 1), ints(prompts), ints(prompts), ints(prompts, room))
    _spread[(prompts + 1, PARTS)](
        batch.decodes, batch.cu_q, batch.seq_lens, batch.indptr, batch.indices, *tables, room,
        prompts, laid_rows, LAID=laid_rows > 0, LEAST=SEVERAL, BLOCK_SIZE=block_size,
        ALIGNED=ALIGNED, BLOCK=BLOCK,
    )  # fmt: skip
    return tables


def attend(query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float) -> torch.Tensor:
    prompts = triton_attention.attend_prompts
    if fits(query, layer) and not batch.window:
        prompts = _attend_blocks if layer.keys.scales is None else _attend_laid
    return triton_attention.attend_with(prompts, query, layer, batch, scaling)


def fits(query: torch.Tensor, layer: KvLayer) -> bool:
    """Whether the library has a kernel for these, as they are or laid."""
    numbers, scales = layer.keys
    return (query.dtype == numbers.dtype or scales is not None) and (
        query.itemsize == 2 and query.shape[-1] in HEAD_DIMS
    )


def _attend_blocks(
    query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    tables = tables_of(batch, layer.keys.numbers.shape[1])
    return _attend(query, layer.keys.numbers, layer.values.numbers, tables, None, scaling)


def _attend_laid(
    query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    block_size, *heads = layer.keys.numbers.shape[1:]
    rows, are_all = lay(query, layer, batch, SEVERAL)
    max_rows = rows.shape[1]
    keys, values = rows.view(2, -1, ALIGNED, *heads)
    tables = tables_of(batch, block_size, max_rows)
    out = _attend(query, keys, values, tables, tables.counts, scaling)
    if not are_all:
        triton_attention.attend_rest(query, layer, batch, scaling, out, max_rows, SEVERAL)
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Tables,
    counts: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Without counts, all queries of every prompt."""
    from flash_attn.cute import flash_attn_varlen_func

    out, *_ = flash_attn_varlen_func(
        query,
        keys,
        values,
        cu_seqlens_q=tables.starts,
        seqused_q=counts,
        seqused_k=tables.lengths,
        page_table=tables.blocks,
        max_seqlen_q=ANY_LENGTH,
        max_seqlen_k=ANY_LENGTH,
        softmax_scale=scaling,
        causal=True,
    )
    return out  # type: ignore[no-any-return]
