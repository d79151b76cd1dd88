"""Triton kernels of gated delta-net layers: a token of each sequence, states changed in place.

Functions and arguments are those of `torch_delta`; sequences with several tokens have kernels of
their own (`triton_spans`).  A program of `_convolve` has some channels of a sequence, one of
`_recall` a head of it.  Its fp32 matrix is read and written once, some columns at a time: the next
ones are on their way, and several programs share a processor.  What a sequence keeps is found piece
by piece in the blocks of its row of `states`.  Who pads is behind the decodes that there are
(`FlatBatch.decodes`), and its answers are zeros.

Where a sequence may have several decodes (`FlatBatch.runs`), the program of the first has all of
them, and `_recall_runs` all of the matrix, in registers.  `replay` is the same two kernels once
more, for all layers at once: it reads what they have left (`Later`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_spans import convolve_chunks, recall_chunks
from epd.engine.kernels.triton_state import EPS, places, run_of, strengths_of, where_piece

if TYPE_CHECKING:
    from epd.engine.kernels.torch_delta import Heads, Later
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

__all__ = ["convolve", "recall", "replay"]


@triton.jit
def _convolve(
    rows, taps, pieces, states, decodes, runs, seq_lens, out, later, first, row_stride, stride,
    layer_stride, out_layer_stride, NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr, CHANNELS: tl.constexpr, KEPT: tl.constexpr, HAS_RUNS: tl.constexpr,
    LEAVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    if sequence >= tl.load(decodes):
        return
    count, is_now = run_of(runs, sequence, HAS_RUNS)
    if HAS_RUNS:  # noqa: SIM102 - what a constant leaves out is not compiled
        if count == 0:
            return
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
        tl.store(pieces + after + at, value, mask=inside & is_now)


def convolve(
    rows: torch.Tensor,
    taps: torch.Tensor,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
    later: Later | None = None,
) -> torch.Tensor:
    out = rows.new_empty(len(rows), taps.shape[1])
    _convolve_decodes(rows[None], taps[None], kept, layer, batch, out[None], later)
    if batch.shape.num_tiles:
        convolve_chunks(rows, taps, kept, layer, batch, out)
    return out


def _convolve_decodes(
    rows: torch.Tensor,
    taps: torch.Tensor,
    kept: SequenceTensor,
    first_layer: int,
    batch: FlatBatch,
    out: torch.Tensor,
    later: Later | None = None,
) -> None:
    """Of each of these layers, the first dimension."""
    channels, block = taps.shape[-1], min(1024, triton.next_power_of_2(taps.shape[-1]))
    if batch.shape.num_decodes:
        left = out if later is None else later.rows
        _convolve[(batch.shape.num_decodes, triton.cdiv(channels, block), len(rows))](
            rows, taps, kept.pieces, batch.states, batch.decodes, batch.runs, batch.seq_lens, out,
            left, first_layer * kept.num_pieces, rows.stride(1), kept.pieces.stride(0),
            rows.stride(0), out.stride(0), **places(kept, batch), CHANNELS=channels,
            KEPT=kept.num_pieces, HAS_RUNS=bool(batch.shape.has_runs), LEAVES=later is not None,
            BLOCK=block, num_warps=4,
        )  # fmt: skip


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
    row = mixed + sequence * CHANNELS
    query, key = _pair(row, head, at, in_key, scale, NUM_KEYS, NUM_VALUES, KEY_DIM)
    kind = mixed.dtype.element_ty
    strength = strengths + sequence * strength_stride + head
    beta, decay = strengths_of(strength, rate + head, bias + head, True, NUM_VALUES, kind)
    decay = tl.exp(decay)
    row += 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
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
    told *= tl.rsqrt(square / VALUE_DIM + eps)
    gate = gates + sequence * gate_stride + head * VALUE_DIM + value_at
    tl.store(answer + value_at, _gated(told, gain, gate, value_at, in_value, kind), mask=in_value)


@triton.jit
def _pair(
    row, head, at, in_key, scale, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
):  # fmt: skip
    """A token's query and key for a head, as long as they are multiplied."""
    row += (head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM + at
    query = tl.load(row, mask=in_key, other=0.0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * scale
    key = tl.load(row + NUM_KEYS * KEY_DIM, mask=in_key, other=0.0).to(tl.float32)
    return query, key * tl.rsqrt(tl.sum(key * key, axis=0) + EPS)


@triton.jit
def _gated(told, gain, gate, at, inside, kind: tl.constexpr):
    told = told.to(kind).to(tl.float32)
    told *= tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    return (told.to(kind).to(tl.float32) * gate * tl.sigmoid(gate)).to(kind)


@triton.jit
def _recall_runs(
    mixed, gates, strengths, rate, bias, gain, pieces, states, decodes, runs, seq_lens, out, later,
    first, gate_stride, strength_stride, stride, eps, scale, mixed_layer, strengths_layer,
    NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ANSWERS: tl.constexpr,
):  # fmt: skip
    """`ANSWERS`: and leaves the strengths of what is written later; else of many layers."""
    sequence, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = tl.program_id(0)
    at, value_at = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_key, in_value = at < KEY_DIM, value_at < VALUE_DIM
    if sequence >= tl.load(decodes):
        if ANSWERS:
            place = out + (sequence * NUM_VALUES + head) * VALUE_DIM + value_at
            tl.store(place, tl.zeros([BLOCK_V], out.dtype.element_ty), mask=in_value)
        return
    count, is_now = run_of(runs, sequence, True)
    if count == 0:
        return
    place = where_piece(
        states + sequence * NUM_BLOCKS, first + layer * NUM_VALUES + head, stride, FIRST_BLOCK,
        PER_BLOCK, KEY_DIM * VALUE_DIM,
    )  # fmt: skip
    place = pieces + place + at[:, None] * VALUE_DIM + value_at[None, :]
    inside = in_key[:, None] & in_value[None, :]
    has_begun = tl.load(seq_lens + sequence) > 1
    state = tl.load(place, mask=inside & has_begun, other=0.0)
    kind = mixed.dtype.element_ty
    own = layer * NUM_VALUES + head
    for i in range(count):
        token = sequence + i
        row = mixed + layer * mixed_layer + token * CHANNELS
        query, key = _pair(row, head, at, in_key, scale, NUM_KEYS, NUM_VALUES, KEY_DIM)
        strength = strengths + layer * strengths_layer + token * strength_stride + head
        beta, decay = strengths_of(strength, rate + own, bias + own, True, NUM_VALUES, kind)
        row += 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM + value_at
        value = tl.load(row, mask=in_value, other=0.0).to(tl.float32)
        state *= tl.exp(decay)
        value -= tl.sum(state * key[:, None], axis=0)
        state += key[:, None] * (value * beta)[None, :]
        if ANSWERS:
            told = tl.sum(state * query[:, None], axis=0).to(kind).to(tl.float32)
            told *= tl.rsqrt(tl.sum(told * told, axis=0) / VALUE_DIM + eps)
            gate = gates + token * gate_stride + head * VALUE_DIM + value_at
            told = _gated(told, gain, gate, value_at, in_value, kind)
            tl.store(out + (token * NUM_VALUES + head) * VALUE_DIM + value_at, told, mask=in_value)
            left = later + token * 2 * NUM_VALUES + head
            tl.store(left, tl.load(strength))
            tl.store(left + NUM_VALUES, tl.load(strength + NUM_VALUES))
    tl.store(place, state, mask=inside & is_now)


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
    # Of steps with prompts nobody writes what pads, which must be finite for the layers behind.
    make = mixed.new_zeros if batch.shape.num_tiles else mixed.new_empty
    out = make(len(mixed), heads.values)
    if later is not None:
        each = mixed[None], gates, strengths[None]
        _recall_each(*each, heads, kept, layer, batch, out, later.strengths)
    elif batch.shape.num_decodes:
        _recall[(heads.num_values, batch.shape.num_decodes)](
            mixed, gates, strengths, heads.rate, heads.bias, heads.gain, kept.pieces, batch.states,
            batch.decodes, batch.seq_lens, out, layer * kept.num_pieces, gates.stride(0),
            strengths.stride(0), kept.pieces.stride(0), heads.eps, heads.key_dim**-0.5,
            **_sizes(mixed, heads, kept, batch), PART=min(32, _block(heads.value_dim)), STAGES=3,
            num_warps=4,
        )  # fmt: skip
    if batch.shape.num_tiles:
        recall_chunks(mixed, gates, strengths, heads, kept, layer, batch, out)
    return out


def replay(
    later: Later,
    taps: torch.Tensor,
    heads: Heads,
    inputs: SequenceTensor,
    matrices: SequenceTensor,
    batch: FlatBatch,
) -> None:
    mixed = torch.empty_like(later.rows[:, : len(batch.runs)])
    _convolve_decodes(later.rows, taps, inputs, 0, batch, mixed)
    _recall_each(mixed, mixed, later.strengths, heads, matrices, 0, batch, None, None)


def _recall_each(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    first_layer: int,
    batch: FlatBatch,
    out: torch.Tensor | None,
    left: torch.Tensor | None,
) -> None:
    """Of each of these layers, the first dimension; answers of one alone."""
    if not batch.shape.num_decodes:
        return
    _recall_runs[(heads.num_values, batch.shape.num_decodes, len(mixed))](
        mixed, gates, strengths, heads.rate, heads.bias, heads.gain, kept.pieces, batch.states,
        batch.decodes, batch.runs, batch.seq_lens, out, left, first_layer * kept.num_pieces,
        gates.stride(0), strengths.stride(1), kept.pieces.stride(0), heads.eps,
        heads.key_dim**-0.5, mixed.stride(0), strengths.stride(0),
        **_sizes(mixed, heads, kept, batch), ANSWERS=out is not None, num_warps=8,
    )  # fmt: skip


def _block(size: int) -> int:
    return triton.next_power_of_2(size)


def _sizes(
    mixed: torch.Tensor, heads: Heads, kept: SequenceTensor, batch: FlatBatch
) -> dict[str, int]:
    return places(kept, batch) | {
        "NUM_KEYS": heads.num_keys, "NUM_VALUES": heads.num_values, "CHANNELS": mixed.shape[-1],
        "KEY_DIM": heads.key_dim, "VALUE_DIM": heads.value_dim, "BLOCK_K": _block(heads.key_dim),
        "BLOCK_V": _block(heads.value_dim),
    }  # fmt: skip
