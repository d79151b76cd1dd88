"""Triton kernels of gated delta-net layers: a token of each sequence, states changed in place.

Functions and arguments are those of `torch_delta`; sequences with several tokens have kernels of
their own (`triton_spans`).  A program of `_convolve` has some channels of a sequence, one of
`_recall` a head of it.  Its fp32 matrix is read and written once, some columns at a time: the next
ones are on their way, and several programs share a processor.  What a sequence keeps is found piece
by piece in the blocks of its row of `states`.  Who pads is behind the decodes that there are
(`FlatBatch.decodes`), and its answers are zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_spans import convolve_chunks, recall_chunks
from epd.engine.kernels.triton_state import EPS, places, strengths_of, where_piece

if TYPE_CHECKING:
    from epd.engine.kernels.torch_delta import Heads
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

__all__ = ["convolve", "recall"]


@triton.jit
def _convolve(
    rows, taps, pieces, states, decodes, seq_lens, out, first, row_stride, stride,
    NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    if sequence >= tl.load(decodes):
        return
    table = states + sequence * NUM_BLOCKS
    has_begun = tl.load(seq_lens + sequence) > 1
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    row = rows + sequence * row_stride + at
    newest = tl.load(row, mask=inside, other=0.0)
    tap = tl.load(taps + KEPT * CHANNELS + at, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tap.to(tl.float32)
    here = pieces + where_piece(table, first, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS) + at
    before = tl.load(here, mask=inside & has_begun, other=0.0)
    for i in tl.static_range(KEPT):
        tap = tl.load(taps + i * CHANNELS + at, mask=inside, other=0.0)
        total += before.to(tl.float32) * tap.to(tl.float32)
        if i + 1 < KEPT:
            piece = first + i + 1
            there = (
                pieces + where_piece(table, piece, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS) + at
            )
            before = tl.load(there, mask=inside & has_begun, other=0.0)
            tl.store(here, before, mask=inside)
            here = there
    tl.store(here, newest, mask=inside)
    total = total.to(newest.dtype).to(tl.float32)
    out += sequence * CHANNELS + at
    tl.store(out, (total * tl.sigmoid(total)).to(newest.dtype), mask=inside)


def convolve(
    rows: torch.Tensor, taps: torch.Tensor, kept: SequenceTensor, layer: int, batch: FlatBatch
) -> torch.Tensor:
    channels, block = taps.shape[1], min(1024, triton.next_power_of_2(taps.shape[1]))
    out = rows.new_empty(len(rows), channels)
    if batch.shape.num_decodes:
        _convolve[(batch.shape.num_decodes, triton.cdiv(channels, block))](
            rows, taps, kept.pieces, batch.states, batch.decodes, batch.seq_lens, out,
            layer * kept.num_pieces, rows.stride(0), kept.pieces.stride(0), **places(kept, batch),
            CHANNELS=channels, KEPT=kept.num_pieces, BLOCK=block, num_warps=4,
        )  # fmt: skip
    if batch.shape.num_tiles:
        convolve_chunks(rows, taps, kept, layer, batch, out)
    return out


@triton.jit
def _recall(
    mixed, gates, strengths, rate, bias, gain, pieces, states, decodes, seq_lens, out, first,
    gate_stride, strength_stride, stride, eps, scale, NUM_BLOCKS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    at, value_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_key, in_value = at < KEY_DIM, value_at < VALUE_DIM
    answer = out + (sequence * NUM_VALUES + head) * VALUE_DIM
    if sequence >= tl.load(decodes):
        tl.store(answer + value_at, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_value)
        return
    here = pieces + where_piece(
        states + sequence * NUM_BLOCKS, first + head, stride, FIRST_BLOCK, PER_BLOCK,
        KEY_DIM * VALUE_DIM,
    )  # fmt: skip
    has_begun = tl.load(seq_lens + sequence) > 1
    row = mixed + sequence * CHANNELS + (head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM + at
    query = tl.load(row, mask=in_key, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * scale
    key = tl.load(row + NUM_KEYS * KEY_DIM, mask=in_key, other=0.0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
    kind = mixed.dtype.element_ty
    strength = strengths + sequence * strength_stride + head
    beta, decay = strengths_of(strength, rate + head, bias + head, True, NUM_VALUES, kind)
    decay = tl.exp(decay)
    row = mixed + sequence * CHANNELS + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
    square = 0.0
    for begin in tl.range(0, VALUE_DIM, PART, num_stages=STAGES):
        column = begin + tl.arange(0, PART)
        inside = in_key[:, None] & (column < VALUE_DIM)[None, :]
        place = here + at[:, None] * VALUE_DIM + column[None, :]
        state = tl.load(place, mask=inside & has_begun, other=0.0) * decay
        value = tl.load(row + column, mask=column < VALUE_DIM, other=0.0).to(tl.float32)
        value -= tl.sum(state * key[:, None], axis=0)
        state += key[:, None] * (value * beta)[None, :]
        tl.store(place, state, mask=inside)
        told = tl.sum(state * query[:, None], axis=0).to(kind)
        tl.store(answer + column, told, mask=column < VALUE_DIM)
        square += tl.sum(told.to(tl.float32) * told.to(tl.float32), axis=0)
    tl.debug_barrier()  # what other threads have told is read
    told = tl.load(answer + value_at, mask=in_value, other=0.0).to(tl.float32)
    told = (told * tl.rsqrt(square / VALUE_DIM + eps)).to(kind).to(tl.float32)
    weight = tl.load(gain + value_at, mask=in_value, other=0.0).to(tl.float32)
    told = (told * weight).to(kind).to(tl.float32)
    gate = gates + sequence * gate_stride + head * VALUE_DIM + value_at
    gate = tl.load(gate, mask=in_value, other=0.0).to(tl.float32)
    tl.store(answer + value_at, (told * gate * tl.sigmoid(gate)).to(kind), mask=in_value)


def recall(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
) -> torch.Tensor:
    # Of steps with prompts nobody writes what pads, which must be finite for the layers behind.
    make = mixed.new_zeros if batch.shape.num_tiles else mixed.new_empty
    out = make(len(mixed), heads.values)
    block_k, block_v = (triton.next_power_of_2(n) for n in (heads.key_dim, heads.value_dim))
    if batch.shape.num_decodes:
        _recall[(heads.num_values, batch.shape.num_decodes)](
            mixed, gates, strengths, heads.rate, heads.bias, heads.gain, kept.pieces, batch.states,
            batch.decodes, batch.seq_lens, out, layer * kept.num_pieces, gates.stride(0),
            strengths.stride(0), kept.pieces.stride(0), heads.eps, heads.key_dim**-0.5,
            **places(kept, batch), NUM_KEYS=heads.num_keys, NUM_VALUES=heads.num_values,
            CHANNELS=mixed.shape[1], KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
            BLOCK_K=block_k, BLOCK_V=block_v, PART=min(32, block_v), STAGES=3, num_warps=4,
        )  # fmt: skip
    if batch.shape.num_tiles:
        recall_chunks(mixed, gates, strengths, heads, kept, layer, batch, out)
    return out
