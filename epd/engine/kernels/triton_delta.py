"""Triton kernels of gated delta-net layers: a token of each sequence, states changed in place.

Functions and arguments are those of `torch_delta`.  A program of `_convolve` has some channels of a
sequence, one of `_recall` a head of it: its matrix is read once and written once, in fp32, some
columns at a time, so that the next ones are on their way and several programs share a processor.
What a sequence keeps is found piece by piece in the blocks of its row of `states`; -1 there is
nobody, whose answers are zeros.  Sequences with several rows are torch's (`torch_delta`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.torch_delta import convolve_chunks, recall_chunks

if TYPE_CHECKING:
    from epd.engine.delta_rule import Heads
    from epd.engine.flat_batch import FlatBatch
    from epd.engine.kv_pool import SequenceTensor

__all__ = ["convolve", "recall"]
EPS = tl.constexpr(1e-6)  # of the length of keys and queries


@triton.jit
def _piece(
    table, piece, stride, FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Offset of a piece in its tensor's memory."""
    block = tl.load(table + FIRST_BLOCK + piece // PER_BLOCK).to(tl.int64)
    return block * stride + (piece % PER_BLOCK) * SIZE


@triton.jit
def _convolve(
    rows, taps, pieces, states, seq_lens, first, row_stride, stride, NUM_BLOCKS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, CHANNELS: tl.constexpr,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    table = states + sequence * NUM_BLOCKS
    if tl.load(table) < 0:
        return
    has_begun = tl.load(seq_lens + sequence) > 1
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    row = rows + sequence.to(tl.int64) * row_stride + at
    newest = tl.load(row, mask=inside, other=0.0)
    tap = tl.load(taps + KEPT * CHANNELS + at, mask=inside, other=0.0)
    total = newest.to(tl.float32) * tap.to(tl.float32)
    here = pieces + _piece(table, first, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS) + at
    before = tl.load(here, mask=inside & has_begun, other=0.0)
    for i in tl.static_range(KEPT):
        tap = tl.load(taps + i * CHANNELS + at, mask=inside, other=0.0)
        total += before.to(tl.float32) * tap.to(tl.float32)
        if i + 1 < KEPT:
            piece = first + i + 1
            there = pieces + _piece(table, piece, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS) + at
            before = tl.load(there, mask=inside & has_begun, other=0.0)
            tl.store(here, before, mask=inside)
            here = there
    tl.store(here, newest, mask=inside)
    total = total.to(newest.dtype).to(tl.float32)
    tl.store(row, (total * tl.sigmoid(total)).to(newest.dtype), mask=inside)


def convolve(
    rows: torch.Tensor, taps: torch.Tensor, kept: SequenceTensor, layer: int, batch: FlatBatch
) -> None:
    channels, block = taps.shape[1], min(1024, triton.next_power_of_2(taps.shape[1]))
    if batch.shape.num_decodes:
        _convolve[(batch.shape.num_decodes, triton.cdiv(channels, block))](
            rows, taps, kept.pieces, batch.states, batch.seq_lens, layer * kept.num_pieces,
            rows.stride(0), kept.pieces.stride(0), **_places(kept, batch), CHANNELS=channels,
            KEPT=kept.num_pieces, BLOCK=block, num_warps=4,
        )  # fmt: skip
    convolve_chunks(rows, taps, kept, layer, batch)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)


@triton.jit
def _recall(
    rows, strengths, rate, bias, gain, pieces, states, seq_lens, out, first, row_stride,
    strength_stride, stride, eps, scale, NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    at, value_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_key, in_value = at < KEY_DIM, value_at < VALUE_DIM
    answer = out + (sequence * NUM_VALUES + head) * VALUE_DIM
    table = states + sequence * NUM_BLOCKS
    if tl.load(table) < 0:
        tl.store(answer + value_at, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_value)
        return
    here = pieces + _piece(
        table, first + head, stride, FIRST_BLOCK, PER_BLOCK, KEY_DIM * VALUE_DIM
    )  # fmt: skip
    has_begun = tl.load(seq_lens + sequence) > 1
    row = rows + sequence * row_stride + (head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM + at
    query = _unit(tl.load(row, mask=in_key, other=0.0).to(tl.float32)) * scale
    key = _unit(tl.load(row + NUM_KEYS * KEY_DIM, mask=in_key, other=0.0).to(tl.float32))
    kind = rows.dtype.element_ty
    strength = strengths + sequence * strength_stride + head
    beta = tl.sigmoid(tl.load(strength).to(tl.float32)).to(kind).to(tl.float32)
    step = tl.load(strength + NUM_VALUES).to(tl.float32) + tl.load(bias + head)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
    decay = tl.exp(tl.load(rate + head) * step)
    row = rows + sequence * row_stride + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
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
    gate = tl.load(row + NUM_VALUES * VALUE_DIM + value_at, mask=in_value, other=0.0)
    gate = gate.to(tl.float32)
    tl.store(answer + value_at, (told * gate * tl.sigmoid(gate)).to(kind), mask=in_value)


def recall(
    rows: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
) -> torch.Tensor:
    out = rows.new_empty(len(rows), heads.values)
    block_k, block_v = (triton.next_power_of_2(n) for n in (heads.key_dim, heads.value_dim))
    if batch.shape.num_decodes:
        _recall[(heads.num_values, batch.shape.num_decodes)](
            rows, strengths, heads.rate, heads.bias, heads.gain, kept.pieces, batch.states,
            batch.seq_lens, out, layer * kept.num_pieces, rows.stride(0), strengths.stride(0),
            kept.pieces.stride(0), heads.eps, heads.key_dim**-0.5, **_places(kept, batch),
            NUM_KEYS=heads.num_keys, NUM_VALUES=heads.num_values, KEY_DIM=heads.key_dim,
            VALUE_DIM=heads.value_dim, BLOCK_K=block_k, BLOCK_V=block_v, PART=min(32, block_v),
            STAGES=3, num_warps=4,
        )  # fmt: skip
    recall_chunks(rows, strengths, heads, kept, layer, batch, out)
    return out


def _places(kept: SequenceTensor, batch: FlatBatch) -> dict[str, int]:
    return {
        "NUM_BLOCKS": batch.states.shape[1],
        "FIRST_BLOCK": kept.first_block,
        "PER_BLOCK": kept.pieces.shape[1],
    }
