"""Triton kernels of gated delta-net layers: decodes, whose states are changed in place.

Functions and arguments are those of `torch_delta`; chunks of several tokens have kernels of their
own (`triton_spans`).  A program of `_convolve` has some channels of a sequence, one of `_recall`
some columns of a head of it.  It reads its part of the fp32 matrix once, takes the tokens of the
sequence's run (`FlatBatch.runs`) one by one, and writes it at most once.  It is one warp, so that
its sums wait for no other; what it answers is normed and gated behind it.  What a sequence keeps is
found piece by piece in the blocks of its row of `states`.  Who pads is behind the decodes that
there are (`FlatBatch.decodes`), and its answers are zeros.

`replay` is both once more, for all layers at once: it reads what they have left (`Later`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_spans import convolve_chunks, gate, recall_chunks
from epd.engine.kernels.triton_state import EPS, places, strengths_of, where_piece

if TYPE_CHECKING:
    from epd.engine.kernels.torch_delta import Heads, Later
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

__all__ = ["convolve", "recall", "replay"]
PART = 16  # columns of a matrix that a warp has in registers


@triton.jit
def _convolve(
    rows, taps, pieces, states, decodes, runs, seq_lens, out, later, first, row_stride, stride,
    layer_stride, out_layer_stride, NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr, LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    if sequence >= tl.load(decodes):
        return
    run = tl.load(runs + sequence)
    if run == 0:
        return
    count = tl.abs(run)
    layer = tl.program_id(2).to(tl.int64)
    first += layer * KEPT
    taps += layer * (KEPT + 1) * CHANNELS
    table = states + sequence * NUM_BLOCKS
    has_begun = tl.load(seq_lens + sequence) > 1
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    rows += layer * layer_stride + sequence * row_stride + at
    out += layer * out_layer_stride + sequence * CHANNELS + at
    kind = out.dtype.element_ty
    for i in range(count):
        total = tl.zeros([BLOCK], tl.float32)
        for n in tl.static_range(KEPT + 1):
            source = i - KEPT + n
            here = inside & (source >= 0)
            value = tl.load(rows + source * row_stride, mask=here, other=0.0).to(tl.float32)
            piece = first + tl.minimum(i + n, KEPT - 1)
            before = where_piece(table, piece, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS)
            here = inside & (source < 0) & has_begun
            value += tl.load(pieces + before + at, mask=here, other=0.0).to(tl.float32)
            tap = tl.load(taps + n * CHANNELS + at, mask=inside, other=0.0)
            total += value * tap.to(tl.float32)
            if LEAVES and n == KEPT:
                place = later + (sequence + i) * CHANNELS + at
                tl.store(place, value.to(kind), mask=inside)
        total = total.to(kind).to(tl.float32)
        tl.store(out + i * CHANNELS, (total * tl.sigmoid(total)).to(kind), mask=inside)
    for n in tl.static_range(KEPT):
        source = count - KEPT + n
        here = inside & (source >= 0)
        value = tl.load(rows + source * row_stride, mask=here, other=0.0)
        older = first + tl.minimum(count + n, KEPT - 1)
        before = where_piece(table, older, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS)
        value += tl.load(pieces + before + at, mask=inside & (source < 0) & has_begun, other=0.0)
        after = where_piece(table, first + n, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS)
        tl.store(pieces + after + at, value, mask=inside & (run > 0))


def convolve(
    rows: torch.Tensor,
    taps: torch.Tensor,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
    later: Later | None = None,
) -> torch.Tensor:
    channels, block = taps.shape[-1], min(1024, triton.next_power_of_2(taps.shape[-1]))
    out = rows.new_empty(*rows.shape[:-1], channels)
    if batch.shape.num_decodes:
        left, layers = out if later is None else later.rows, len(rows) if rows.dim() == 3 else 1
        _convolve[(batch.shape.num_decodes, triton.cdiv(channels, block), layers)](
            rows, taps, kept.pieces, batch.states, batch.decodes, batch.runs, batch.seq_lens, out,
            left, layer * kept.num_pieces, rows.stride(-2), kept.pieces.stride(0), rows.stride(0),
            out.stride(0), **places(kept, batch), CHANNELS=channels, KEPT=kept.num_pieces,
            LEAVES=later is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    if batch.shape.num_tiles:
        convolve_chunks(rows, taps, kept, layer, batch, out)
    return out


@triton.jit
def _recall(
    mixed, strengths, rate, bias, pieces, states, decodes, runs, seq_lens, out, later, first,
    strength_stride, stride, scale, mixed_layer, strengths_layer, NUM_BLOCKS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr, CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr, ANSWERS: tl.constexpr,
    LEAVES: tl.constexpr,
):  # fmt: skip
    sequence, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if sequence >= tl.load(decodes):
        return
    run = tl.load(runs + sequence)
    if run == 0:
        return
    head, part = tl.program_id(0) % NUM_VALUES, tl.program_id(0) // NUM_VALUES
    at, column = tl.arange(0, BLOCK_K), part * PART + tl.arange(0, PART)
    in_key, in_value = at < KEY_DIM, column < VALUE_DIM
    place = where_piece(
        states + sequence * NUM_BLOCKS, first + layer * NUM_VALUES + head, stride, FIRST_BLOCK,
        PER_BLOCK, KEY_DIM * VALUE_DIM,
    )  # fmt: skip
    place = pieces + place + at[:, None] * VALUE_DIM + column[None, :]
    inside = in_key[:, None] & in_value[None, :]
    has_begun = tl.load(seq_lens + sequence) > 1
    state = tl.load(place, mask=inside & has_begun, other=0.0)
    kind = mixed.dtype.element_ty
    own = layer * NUM_VALUES + head
    for i in range(tl.abs(run)):
        token = sequence + i
        row = mixed + layer * mixed_layer + token * CHANNELS
        column_of_key = (NUM_KEYS + head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM + at
        key = tl.load(row + column_of_key, mask=in_key, other=0.0).to(tl.float32)
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
        strength = strengths + layer * strengths_layer + token * strength_stride + head
        beta, decay = strengths_of(strength, rate + own, bias + own, True, NUM_VALUES, kind)
        of_value = row + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + column
        value = tl.load(of_value, mask=in_value, other=0.0).to(tl.float32)
        state *= tl.exp(decay)
        value -= tl.sum(state * key[:, None], axis=0)
        state += key[:, None] * (value * beta)[None, :]
        if ANSWERS:
            query = row + column_of_key - NUM_KEYS * KEY_DIM
            query = tl.load(query, mask=in_key, other=0.0).to(tl.float32)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * scale
            told = tl.sum(state * query[:, None], axis=0).to(kind)
            tl.store(out + (token * NUM_VALUES + head) * VALUE_DIM + column, told, mask=in_value)
        if LEAVES:
            left = later + token * 2 * NUM_VALUES + head
            tl.store(left, tl.load(strength), mask=part == 0)
            tl.store(left + NUM_VALUES, tl.load(strength + NUM_VALUES), mask=part == 0)
    tl.store(place, state, mask=inside & (run > 0))


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
    out = mixed.new_empty(len(mixed), heads.values)
    left = later.strengths if later is not None else None
    _recall_decodes(mixed[None], strengths[None], heads, kept, layer, batch, out, left)
    if batch.shape.num_tiles:
        recall_chunks(mixed, strengths, heads, kept, layer, batch, out)
    gate(out, gates, heads, batch)
    return out


def replay(
    later: Later,
    taps: torch.Tensor,
    heads: Heads,
    inputs: SequenceTensor,
    matrices: SequenceTensor,
    batch: FlatBatch,
) -> None:
    mixed = convolve(later.rows[:, : len(batch.runs)], taps, inputs, 0, batch)
    _recall_decodes(mixed, later.strengths, heads, matrices, 0, batch)


def _recall_decodes(
    mixed: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    first_layer: int,
    batch: FlatBatch,
    out: torch.Tensor | None = None,
    left: torch.Tensor | None = None,
) -> None:
    """Of each of these layers, the first dimension; answers of one alone."""
    if batch.shape.num_decodes:
        parts = triton.cdiv(heads.value_dim, PART)
        _recall[(heads.num_values * parts, batch.shape.num_decodes, len(mixed))](
            mixed, strengths, heads.rate, heads.bias, kept.pieces, batch.states, batch.decodes,
            batch.runs, batch.seq_lens, out, left, first_layer * kept.num_pieces,
            strengths.stride(1), kept.pieces.stride(0), heads.key_dim**-0.5, mixed.stride(0),
            strengths.stride(0), **places(kept, batch), NUM_KEYS=heads.num_keys,
            NUM_VALUES=heads.num_values, CHANNELS=mixed.shape[-1], KEY_DIM=heads.key_dim,
            VALUE_DIM=heads.value_dim, BLOCK_K=triton.next_power_of_2(heads.key_dim), PART=PART,
            ANSWERS=out is not None, LEAVES=left is not None, num_warps=1,
        )  # fmt: skip
