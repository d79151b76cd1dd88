"""Attention of prompts over the pool's own blocks, by the library.

Theory of operation
-------------------
The library finds a sequence's keys through a table of its blocks, one row for each prompt.  A step
has its blocks row behind row, so one kernel spreads them, once in a step and not in each layer.  It
reads the step's integers on the device, since a captured step has no lengths on the host; what was
spread within a capture is spread anew by every replay.  Only the rows of a sequence are read, so
what lies behind its last key may be anything.

Prompts of any length go this way, drafts too: there is no second launch for short ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels import triton_attention
from epd.engine.kernels.fast import ANY_LENGTH

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import KvLayer

HEAD_DIMS = range(64, 129, 16)  # those that are tested
PARTS, BLOCK = 8, 256  # programs that spread one table, and entries at once


class Tables(NamedTuple):
    """Of a step's prompts, int32."""

    starts: torch.Tensor  # [prompts + 1]: first query of each
    lengths: torch.Tensor  # [prompts]: keys
    blocks: torch.Tensor  # [prompts, blocks]; behind a sequence's last: anything


@triton.jit(do_not_specialize=["room", "prompts"])
def _spread(
    decodes, cu_q, seq_lens, indptr, indices, starts, lengths, blocks, room, prompts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    prompt = tl.program_id(0)
    sequence = tl.load(decodes) + prompt
    if tl.program_id(1) == 0:
        tl.store(starts + prompt, tl.load(cu_q + sequence))
        if prompt < prompts:
            tl.store(lengths + prompt, tl.load(seq_lens + sequence))
    if prompt == prompts:
        return
    first = tl.load(indptr + sequence)
    count = tl.load(indptr + sequence + 1) - first
    for at in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        place = at + tl.arange(0, BLOCK)
        block = tl.load(indices + first + place, mask=place < count)
        tl.store(blocks + prompt.to(tl.int64) * room + place, block, mask=place < count)


def tables_of(batch: FlatBatch, block_size: int) -> Tables:
    """Made once for a step; within a capture, once for it."""
    key = "tables", torch.cuda.is_current_stream_capturing()
    if key not in batch.derived:
        batch.derived[key] = _tables(batch, block_size)
    return Tables(*batch.derived[key])


def _tables(batch: FlatBatch, block_size: int) -> Tables:
    prompts = batch.shape.num_sequences - batch.shape.num_decodes
    room = max(1, len(batch.indices))
    if batch.chunks:
        room = max(-(-(chunk.start + chunk.count) // block_size) for chunk in batch.chunks)
    ints = batch.indices.new_empty
    tables = Tables(ints(prompts + 1), ints(prompts), ints(prompts, room))
    _spread[(prompts + 1, PARTS)](
        batch.decodes, batch.cu_q, batch.seq_lens, batch.indptr, batch.indices, *tables, room,
        prompts, BLOCK=BLOCK,
    )  # fmt: skip
    return tables


def attend(query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float) -> torch.Tensor:
    prompts = _attend_prompts if fits(query, layer) else triton_attention.attend_prompts
    return triton_attention.attend_with(prompts, query, layer, batch, scaling)


def fits(query: torch.Tensor, layer: KvLayer) -> bool:
    """Whether the library has a kernel for these."""
    numbers, scales = layer.keys
    return scales is None and query.dtype == numbers.dtype and (
        query.itemsize == 2 and query.shape[-1] in HEAD_DIMS
    )  # fmt: skip


def _attend_prompts(
    query: torch.Tensor, layer: KvLayer, batch: FlatBatch, scaling: float
) -> torch.Tensor:
    from flash_attn.cute import flash_attn_varlen_func

    tables = tables_of(batch, layer.keys.numbers.shape[1])
    out, *_ = flash_attn_varlen_func(
        query,
        layer.keys.numbers,
        layer.values.numbers,
        cu_seqlens_q=tables.starts,
        seqused_k=tables.lengths,
        page_table=tables.blocks,
        max_seqlen_q=ANY_LENGTH,
        max_seqlen_k=ANY_LENGTH,
        softmax_scale=scaling,
        causal=True,
    )
    return out  # type: ignore[no-any-return]
