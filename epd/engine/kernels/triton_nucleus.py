"""The lowest logit of a nucleus (top_p without top_k) without a sort.

Theory of operation
-------------------
Weights are integers (probabilities by that of the likeliest, times a power of two), so sums of them
are exact in any order, and the same whatever the neighbours.  A logit stays if all likelier ones
together weigh less than top_p of the sum.  So the lowest one's bits are found four at a time, the
highest first.  A pass adds up, for each chunk of a row, the weights in each of 16 ranges of the
bits.  The next adds up chunks and goes on in the lowest range above which there is less than that.
Logits that are equal have equal bits: all stay or none.

Eight passes read the logits once each; the last ones meet few that are still in question.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_BITS = 4  # that a pass finds
RANGES = tl.constexpr(1 << NUM_BITS)
LENGTH, NUM_WARPS = 2048, 4  # of a chunk; the best that was measured on an H200
LOG2E = tl.constexpr(1.4426950408889634)
WEIGHT_BITS = 62  # of the sum of all weights


@triton.jit
def _bits(value):
    """Ordered as the values are."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _found(state, sums, nucleus, row, num_chunks, BLOCK: tl.constexpr):
    """After a pass: the highest bits, what weighs above them, and what must not be reached."""
    chunk, each = tl.arange(0, BLOCK), tl.arange(0, RANGES)
    at = (row * num_chunks + chunk)[:, None] * RANGES + each[None, :]
    weight = tl.sum(tl.load(sums + at, mask=(chunk < num_chunks)[:, None], other=0), axis=0)
    total = tl.sum(weight, axis=0)
    bits, above, bound = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    if bound < 0:  # the first pass saw all weights
        exact = tl.load(nucleus + row).to(tl.float64) * total.to(tl.float64)
        bound = exact.to(tl.int64)
        bound += (bound.to(tl.float64) < exact).to(tl.int64)
    higher = above + total - tl.cumsum(weight, axis=0)
    lowest = tl.min(tl.where(higher < bound, each, RANGES - 1), axis=0)
    above = tl.sum(tl.where(each == lowest, higher, 0), axis=0)
    return bits * RANGES + lowest, above, bound


@triton.jit
def _weigh(
    logits, top, temperature, floor, nucleus, state_before, sums_before, state, sums,
    size, num_chunks, scale, shift,
    FIRST: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bits, above, bound = tl.zeros([], tl.int64), tl.zeros([], tl.int64), tl.full([], -1, tl.int64)
    if not FIRST:
        before = state_before + row * 3
        bits, above, bound = _found(before, sums_before, nucleus, row, num_chunks, BLOCK)
    if chunk == 0:
        tl.store(state + row * 3, bits)
        tl.store(state + row * 3 + 1, above)
        tl.store(state + row * 3 + 2, bound)
    at = chunk * LENGTH + tl.arange(0, LENGTH)
    value = tl.load(logits + row * size + at, mask=at < size, other=float("-inf"))
    ordered = _bits(value) >> shift
    asked = (value >= tl.load(floor + row)) & ((ordered >> 4) == bits.to(tl.uint32))
    out = sums + (row * num_chunks + chunk) * RANGES
    if tl.max(asked.to(tl.int32), axis=0) > 0:
        scaled = (value - tl.load(top + row)) / tl.load(temperature + row)
        weight = tl.where(asked, tl.exp2(scaled * LOG2E) * scale, 0.0).to(tl.int64)
        for each in tl.static_range(RANGES):
            tl.store(out + each, tl.sum(tl.where((ordered & 15) == each, weight, 0), axis=0))
    else:
        tl.store(out + tl.arange(0, RANGES), tl.zeros([RANGES], tl.int64))


@triton.jit
def _settle(state, sums, nucleus, lowest, num_chunks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found, _, _ = _found(state + row * 3, sums, nucleus, row, num_chunks, BLOCK)
    bits = found.to(tl.uint32).to(tl.int32, bitcast=True)
    bits ^= tl.where(bits < 0, -2147483648, -1)
    tl.store(lowest + row, bits.to(tl.float32, bitcast=True))


def lowest_of_nucleus(
    logits: torch.Tensor,
    floor: torch.Tensor,
    nucleus: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """See `epd.engine.language.token_draw`."""
    num_rows, size = logits.shape
    num_chunks = triton.cdiv(size, LENGTH)
    block = triton.next_power_of_2(num_chunks)
    sums = torch.empty(2, num_rows, num_chunks, 16, dtype=torch.int64, device=logits.device)
    states = torch.empty(2, num_rows, 3, dtype=torch.int64, device=logits.device)
    logits = logits.contiguous()
    columns = [column.contiguous() for column in (top, temperature, floor, nucleus)]
    scale = float(1 << (WEIGHT_BITS - size.bit_length()))
    now = 0
    for shift in range(32 - NUM_BITS, -1, -NUM_BITS):
        before, now = now, 1 - now
        _weigh[(num_rows, num_chunks)](
            logits, *columns, states[before], sums[before], states[now], sums[now],
            size, num_chunks, scale, shift,
            FIRST=shift == 32 - NUM_BITS, LENGTH=LENGTH, BLOCK=block, num_warps=NUM_WARPS,
        )  # fmt: skip
    out = torch.empty_like(columns[0])
    _settle[(num_rows,)](states[now], sums[now], columns[3], out, num_chunks, BLOCK=block)
    return out
