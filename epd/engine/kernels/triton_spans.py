"""Triton kernels of gated delta-net layers: sequences with several tokens in a step.

Theory of operation
-------------------
The algorithm is that of `torch_delta.chunk`.  What the tokens of a span do to each other is a unit
triangular system, whose inverse (`_solve`) depends on no state: all spans at once.  `_scan` goes
from span to span with the state of a head in registers, some columns a program.  `_gate` norms and
gates its answers and those of decodes, once all columns of a head are there.

The system is D + F: blocks of `PIECE` tokens on the diagonal, and what is left of them.  D is
inverted to D' token by token, all blocks at once, as only that is sound where keys are alike.  The
inverse is `(I - M)(I + M M) D'` with M = D' F, since the fourth power of M is zero.

Keys and queries are multiplied as they are; the factors that make their length one, and decay, go
into the products.  Inverses, corrections and a state as it is read are rounded to 16 bits before a
product of these; sums and states are float32.

All data of sequences are on the device, so steps with prompts can be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from epd.engine.kernels.torch_delta import SPAN
from epd.engine.kernels.triton_state import EPS, places, strengths_of, where_piece

if TYPE_CHECKING:
    from epd.engine.kernels.torch_delta import Heads
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

__all__ = ["convolve_chunks", "gate", "recall_chunks"]
ROWS = 32  # tokens of a program that convolves
PIECE = tl.constexpr(16)  # a quarter of a span


@triton.jit
def _part_of_tile(tiles, cu_q, index, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Sequence, its first token in the row, how many it has, and the first of this part; a part
    that has none begins behind them."""
    named = tl.load(tiles + 2 * (index // PARTS))
    sequence = tl.maximum(named, 0)
    begin = tl.load(cu_q + sequence)
    count = tl.where(named < 0, 0, tl.load(cu_q + sequence + 1) - begin)
    first = tl.load(tiles + 2 * (index // PARTS) + 1) + index % PARTS * SIZE
    return sequence, begin, count, tl.maximum(first, 0)


@triton.jit
def _convolve(
    rows, taps, pieces, states, tiles, cu_q, seq_lens, out, first, row_stride, stride,
    NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    sequence, begin, count, m0 = _part_of_tile(tiles, cu_q, tl.program_id(1), PARTS, SIZE)
    if m0 >= count:
        return
    has_begun = tl.load(seq_lens + sequence) > count
    table = states + sequence * NUM_BLOCKS
    m = m0 + tl.arange(0, SIZE)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (m < count)[:, None] & (at < CHANNELS)[None, :]
    total = tl.zeros([SIZE, BLOCK], tl.float32)
    for i in tl.static_range(KEPT + 1):
        source = m - KEPT + i
        row = (begin + source).to(tl.int64) * row_stride
        known = inside & (source >= 0)[:, None]
        value = tl.load(rows + row[:, None] + at[None, :], mask=known, other=0.0).to(tl.float32)
        if m0 == 0:
            piece = first + tl.minimum(m + i, KEPT - 1)
            block = tl.load(table + FIRST_BLOCK + piece // PER_BLOCK).to(tl.int64)
            before = block * stride + (piece % PER_BLOCK) * CHANNELS
            known = inside & (source < 0)[:, None] & has_begun
            value += tl.load(pieces + before[:, None] + at[None, :], mask=known, other=0.0).to(
                tl.float32
            )
        tap = tl.load(taps + i * CHANNELS + at, mask=at < CHANNELS, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    kind = out.dtype.element_ty
    total = total.to(kind).to(tl.float32)
    place = (begin + m).to(tl.int64)[:, None] * CHANNELS + at[None, :]
    tl.store(out + place, (total * tl.sigmoid(total)).to(kind), mask=inside)


@triton.jit
def _keep(
    rows, pieces, states, decodes, cu_q, seq_lens, first, row_stride, stride,
    NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last inputs of a sequence; those of a short chunk lie among those before."""
    sequence = tl.load(decodes) + tl.program_id(1)
    begin = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - begin
    if count == 0:
        return
    has_begun = tl.load(seq_lens + sequence) > count
    table = states + sequence * NUM_BLOCKS
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < CHANNELS
    for i in tl.static_range(KEPT):
        source = count - KEPT + i
        row = rows + (begin + source).to(tl.int64) * row_stride + at
        value = tl.load(row, mask=inside & (source >= 0), other=0.0)
        older = first + tl.minimum(count + i, KEPT - 1)
        place = pieces + where_piece(table, older, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS) + at
        value += tl.load(place, mask=inside & (source < 0) & has_begun, other=0.0)
        place = pieces + where_piece(table, first + i, stride, FIRST_BLOCK, PER_BLOCK, CHANNELS)
        tl.store(place + at, value, mask=inside)


def convolve_chunks(
    rows: torch.Tensor,
    taps: torch.Tensor,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
    out: torch.Tensor,
) -> None:
    channels, parts = taps.shape[1], batch.tile_size // ROWS
    sizes = {"CHANNELS": channels, "KEPT": kept.num_pieces, **places(kept, batch)}
    strides = layer * kept.num_pieces, rows.stride(0), kept.pieces.stride(0)
    block = min(128, triton.next_power_of_2(channels))
    _convolve[(triton.cdiv(channels, block), batch.shape.num_tiles * parts)](
        rows, taps, kept.pieces, batch.states, batch.tiles, batch.cu_q, batch.seq_lens, out,
        *strides, **sizes, PARTS=parts, SIZE=ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(channels))
    _keep[(triton.cdiv(channels, block), batch.shape.num_sequences - batch.shape.num_decodes)](
        rows, kept.pieces, batch.states, batch.decodes, batch.cu_q, batch.seq_lens, *strides,
        **sizes, BLOCK=block, num_warps=4,
    )  # fmt: skip


@triton.jit
def _rows(
    mixed, row, known, column, CHANNELS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A head's keys or queries, and what makes each of length one."""
    at = tl.arange(0, BLOCK)
    inside = known[:, None] & (at < DIM)[None, :]
    rows = tl.load(mixed + row[:, None] * CHANNELS + column + at[None, :], mask=inside, other=0.0)
    wide = rows.to(tl.float32)
    return rows, tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)


@triton.jit
def _solve(
    mixed, strengths, rate, bias, tiles, cu_q, inverses, strength_stride, NUM_KEYS: tl.constexpr,
    NUM_VALUES: tl.constexpr, CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _, begin, count, m0 = _part_of_tile(tiles, cu_q, tl.program_id(1), PARTS, SIZE)
    if m0 >= count:
        return
    head = tl.program_id(0)
    i = tl.arange(0, SIZE)
    known = m0 + i < count
    row = (begin + m0 + i).to(tl.int64)
    beta, steps = strengths_of(
        strengths + row * strength_stride + head, rate + head, bias + head, known, NUM_VALUES,
        mixed.dtype.element_ty,
    )  # fmt: skip
    decay = tl.cumsum(steps, axis=0)
    column = (NUM_KEYS + head // (NUM_VALUES // NUM_KEYS)) * KEY_DIM
    key, length = _rows(mixed, row, known, column, CHANNELS, KEY_DIM, BLOCK_K)
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION)  # its rows are equations
    system *= (length * beta)[:, None] * length[None, :]
    system *= tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0))
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    tl.static_assert(SIZE == 4 * PIECE)
    block, at = tl.arange(0, 4), tl.arange(0, PIECE)
    is_near = (block[:, None] == block[None, :])[:, None, :, None]
    near = tl.sum(tl.where(is_near, tl.reshape(system, [4, PIECE, 4, PIECE]), 0.0), axis=2)
    solved = tl.where(at[:, None] == at[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(near)
    for n in range(1, PIECE):
        is_next = (at == n)[None, :, None]
        equation = tl.sum(tl.where(is_next, near, 0.0), axis=1)
        known_part = tl.sum(equation[:, :, None] * solved, axis=1)
        solved = tl.where(is_next, solved - known_part[:, None, :], solved)
    solved = tl.reshape(tl.where(is_near, solved[:, :, None, :], 0.0), [SIZE, SIZE])
    far = tl.where((i // PIECE)[:, None] > (i // PIECE)[None, :], system, 0.0)
    far = tl.dot(solved, far, input_precision=PRECISION)
    square = tl.dot(far, far, input_precision=PRECISION)
    solved += tl.dot(square, solved, input_precision=PRECISION)
    inverse = solved - tl.dot(far, solved, input_precision=PRECISION)
    place = inverses + ((row * NUM_VALUES + head) * SIZE)[:, None] + i[None, :]
    tl.store(place, inverse.to(inverses.dtype.element_ty), mask=known[:, None])


@triton.jit
def _scan(
    mixed, strengths, rate, bias, inverses, pieces, states, decodes, cu_q, seq_lens, out, first,
    strength_stride, stride, scale, NUM_BLOCKS: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr, NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr,
    CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sequence = tl.load(decodes) + tl.program_id(2)
    begin = tl.load(cu_q + sequence)
    count = tl.load(cu_q + sequence + 1) - begin
    if count == 0:
        return
    head = tl.program_id(0)
    kind = mixed.dtype.element_ty
    at, value_at = tl.arange(0, BLOCK_K), tl.program_id(1) * PART + tl.arange(0, PART)
    here = where_piece(
        states + sequence * NUM_BLOCKS, first + head, stride, FIRST_BLOCK, PER_BLOCK,
        KEY_DIM * VALUE_DIM,
    )  # fmt: skip
    here = pieces + here + at[:, None] * VALUE_DIM + value_at[None, :]
    inside = (at < KEY_DIM)[:, None] & (value_at < VALUE_DIM)[None, :]
    has_begun = tl.load(seq_lens + sequence) > count
    state = tl.load(here, mask=inside & has_begun, other=0.0)
    i = tl.arange(0, SIZE)
    column = head // (NUM_VALUES // NUM_KEYS) * KEY_DIM
    for m0 in range(0, count, SIZE):
        row, known = (begin + m0 + i).to(tl.int64), m0 + i < count
        beta, steps = strengths_of(
            strengths + row * strength_stride + head, rate + head, bias + head, known, NUM_VALUES,
            kind,
        )  # fmt: skip
        decay, whole = tl.cumsum(steps, axis=0), tl.sum(steps, axis=0)
        query, asked = _rows(mixed, row, known, column, CHANNELS, KEY_DIM, BLOCK_K)
        column_of_key = NUM_KEYS * KEY_DIM + column
        key, length = _rows(mixed, row, known, column_of_key, CHANNELS, KEY_DIM, BLOCK_K)
        inside_rows = known[:, None] & (value_at < VALUE_DIM)[None, :]
        place = row[:, None] * CHANNELS + 2 * NUM_KEYS * KEY_DIM + head * VALUE_DIM
        value = tl.load(mixed + place + value_at[None, :], mask=inside_rows, other=0.0)
        place = ((row * NUM_VALUES + head) * SIZE)[:, None] + i[None, :]
        inverse = tl.load(inverses + place, mask=known[:, None], other=0.0)
        read = state.to(kind)
        recalled = tl.dot(key, read, input_precision=PRECISION)
        recalled *= (length * beta * tl.exp(decay))[:, None]
        correction = (value.to(tl.float32) * beta[:, None] - recalled).to(kind)
        correction = tl.dot(inverse, correction, input_precision=PRECISION)
        attended = tl.dot(query, tl.trans(key), input_precision=PRECISION) * length[None, :]
        attended *= tl.exp(tl.minimum(decay[:, None] - decay[None, :], 0.0))
        attended = tl.where(i[:, None] >= i[None, :], attended, 0.0).to(kind)
        told = tl.dot(query, read, input_precision=PRECISION) * tl.exp(decay)[:, None]
        told += tl.dot(attended, correction.to(kind), input_precision=PRECISION)
        told *= (asked * scale)[:, None]
        place = out + ((row * NUM_VALUES + head) * VALUE_DIM)[:, None] + value_at[None, :]
        tl.store(place, told.to(kind), mask=inside_rows)
        correction *= (length * tl.exp(whole - decay))[:, None]
        state *= tl.exp(whole)
        state += tl.dot(tl.trans(key), correction.to(kind), input_precision=PRECISION)
    tl.store(here, state, mask=inside)


@triton.jit
def _gate(
    out, gates, gain, end, gate_stride, eps, NUM_VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """`end`: where there is how many tokens there are; what pads is zeros, finite for layers
    behind."""
    token = tl.program_id(0).to(tl.int64)
    known = token < tl.load(end)
    head, at = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_V)[None, :]
    inside = (head < NUM_VALUES) & (at < VALUE_DIM)
    here = head * VALUE_DIM + at
    place = out + token * NUM_VALUES * VALUE_DIM + here
    told = tl.load(place, mask=inside & known, other=0.0)
    kind = told.dtype
    told = told.to(tl.float32)
    told *= tl.rsqrt(tl.sum(told * told, axis=1) / VALUE_DIM + eps)[:, None]
    weight = tl.load(gain + at, mask=at < VALUE_DIM, other=0.0).to(tl.float32)
    told = (told.to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
    gate = tl.load(gates + token * gate_stride + here, mask=inside & known, other=0.0)
    gate = gate.to(tl.float32)
    tl.store(place, (told * gate * tl.sigmoid(gate)).to(kind), mask=inside)


def recall_chunks(
    mixed: torch.Tensor,
    strengths: torch.Tensor,
    heads: Heads,
    kept: SequenceTensor,
    layer: int,
    batch: FlatBatch,
    out: torch.Tensor,
) -> None:
    shape, parts = batch.shape, batch.tile_size // SPAN
    block_k, block_v = (
        max(16, triton.next_power_of_2(n)) for n in (heads.key_dim, heads.value_dim)
    )
    part = min(32, block_v)
    inverses = mixed.new_empty(len(mixed), heads.num_values, SPAN)
    sizes = {
        "NUM_KEYS": heads.num_keys, "NUM_VALUES": heads.num_values, "CHANNELS": mixed.shape[1],
        "KEY_DIM": heads.key_dim, "BLOCK_K": block_k, "SIZE": SPAN,
        "PRECISION": "ieee" if mixed.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    said = mixed, strengths, heads.rate, heads.bias
    _solve[(heads.num_values, shape.num_tiles * parts)](
        *said, batch.tiles, batch.cu_q, inverses, strengths.stride(0), **sizes, PARTS=parts,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    slices, prompts = triton.cdiv(heads.value_dim, part), shape.num_sequences - shape.num_decodes
    _scan[(heads.num_values, slices, prompts)](
        *said, inverses, kept.pieces, batch.states, batch.decodes, batch.cu_q, batch.seq_lens,
        out, layer * kept.num_pieces, strengths.stride(0), kept.pieces.stride(0),
        heads.key_dim**-0.5, **places(kept, batch), **sizes, VALUE_DIM=heads.value_dim, PART=part,
        num_warps=4, num_stages=2 if mixed.itemsize == 2 else 1,
    )  # fmt: skip


def gate(out: torch.Tensor, gates: torch.Tensor, heads: Heads, batch: FlatBatch) -> None:
    """Norm and gate the answers of all tokens, `[T, values]`, in place."""
    block_h, block_v = (triton.next_power_of_2(n) for n in (heads.num_values, heads.value_dim))
    _gate[(len(out),)](
        out, gates, heads.gain, batch.cu_q[batch.shape.num_sequences :], gates.stride(0), heads.eps,
        NUM_VALUES=heads.num_values, VALUE_DIM=heads.value_dim, BLOCK_H=block_h, BLOCK_V=block_v,
        num_warps=4,
    )  # fmt: skip
