"""Triton kernels of mixtures of experts.

Theory of operation
-------------------
A pair is a token and one of its experts.  The router's kernel chooses, counts each expert's pairs
and gives each pair its rank among them (whichever comes first: no row depends on its neighbours).
The counts give where each expert's pairs begin, with whole tiles of rows for each; pairs are put
there, and each tile gets its expert.  Only the device has the number of tiles, so a program starts
for each that there can be, and those without rows end at once.

A product is a tile of pairs by a tile of an expert's output channels; rows are gathered as they are
read.  Gate and up are computed side by side, so that their product is all that is written.  A row
for each pair is what down gives; a last kernel weighs and adds the rows of each token.

Of few tokens the time goes into reading weights, so tiles have few rows and there are many of
them.  Of many, tiles are as high as an expert has rows on average.  Those of one expert run one
behind the other, so its weights come out of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from epd.engine.kernels.routing import Routed, Routing
from epd.engine.kernels.triton_ops import activate

LEAST_ROWS, MOST_ROWS, MOST_WIDE_ROWS = 16, 128, 64  # of a tile; the last: in fp32
COMPARED = 4096  # numbers that a program of `_place` has in hand


@triton.jit
def _route(
    logits, bias, factors, slots, experts, weights, ranks, counts, scaling,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, NUM_GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
    BIASED: tl.constexpr, FACTORED: tl.constexpr, PADDED: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    pair = token.to(tl.int64) * TOP_K + k
    if PADDED:  # noqa: SIM102 - only this is known when it is compiled
        if tl.load(slots + token) < 0:
            tl.store(experts + pair, tl.full([BLOCK_K], -1, tl.int32), mask=k < TOP_K)
            tl.store(weights + pair, tl.zeros([BLOCK_K], tl.float32), mask=k < TOP_K)
            return
    each: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    low, group = float("-inf"), tl.arange(0, BLOCK_GROUPS)
    place = tl.arange(0, BLOCK_EXPERTS)[None, :]
    expert = group[:, None] * each + place
    inside = (group < NUM_GROUPS)[:, None] & (place < each)
    score = tl.load(logits + token.to(tl.int64) * NUM_EXPERTS + expert, mask=inside, other=low)
    score = score.to(tl.float32)
    if SIGMOID:
        score = tl.sigmoid(score)
    else:
        score = tl.exp(score - tl.max(tl.max(score, axis=1), axis=0))
        score = score / tl.sum(tl.sum(score, axis=1), axis=0)
    choice = score
    if BIASED:
        choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside & (choice >= low), choice, low)  # what is no number comes last
    if KEPT_GROUPS < NUM_GROUPS:
        highest = tl.max(choice, axis=1)
        first = tl.min(tl.where(choice == highest[:, None], place, BLOCK_EXPERTS), axis=1)
        total = highest + tl.max(tl.where(place == first[:, None], low, choice), axis=1)
        kept = group < 0
        for _ in range(KEPT_GROUPS):
            taken = tl.min(tl.where(total == tl.max(total, axis=0), group, BLOCK_GROUPS), axis=0)
            kept = kept | (group == taken)
            total = tl.where(group == taken, low, total)
        choice = tl.where(kept[:, None], choice, low)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    weight = tl.zeros([BLOCK_K], tl.float32)
    for at in range(TOP_K):
        best = tl.max(tl.max(choice, axis=1), axis=0)
        here = tl.where((choice == best) & inside, expert, NUM_EXPERTS - 1)
        taken = tl.min(tl.min(here, axis=1), axis=0)
        is_taken = inside & (expert == taken)
        own = tl.sum(tl.sum(tl.where(is_taken, score, 0.0), axis=1), axis=0)
        chosen = tl.where(k == at, taken, chosen)
        weight = tl.where(k == at, own, weight)
        choice = tl.where(is_taken, low, choice)
    if NORMALISED:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    if FACTORED:
        weight *= tl.load(factors + chosen).to(tl.float32)
    rank = tl.atomic_add(counts + chosen, 1, mask=k < TOP_K, sem="relaxed")
    tl.store(ranks + pair, rank, mask=k < TOP_K)
    tl.store(experts + pair, chosen, mask=k < TOP_K)
    tl.store(weights + pair, weight * scaling, mask=k < TOP_K)


def route(logits: torch.Tensor, routing: Routing, slots: torch.Tensor | None = None) -> Routed:
    (num_tokens, num_experts), top_k = logits.shape, routing.top_k
    experts, ranks = logits.new_empty(2, num_tokens, top_k, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    counts = logits.new_zeros(num_experts, dtype=torch.int32)
    groups = routing.num_groups if routing.kept_groups < routing.num_groups else 1
    bias = counts if routing.bias is None else routing.bias
    factors = counts if routing.factors is None else routing.factors
    _route[(num_tokens,)](
        logits, bias, factors, counts if slots is None else slots, experts, weights, ranks, counts,
        routing.scaling, NUM_EXPERTS=num_experts, TOP_K=top_k,
        NUM_GROUPS=groups, KEPT_GROUPS=min(routing.kept_groups, groups),
        SIGMOID=routing.is_sigmoid, NORMALISED=routing.normalised, BIASED=routing.bias is not None,
        FACTORED=routing.factors is not None, PADDED=slots is not None,
        BLOCK_GROUPS=triton.next_power_of_2(groups),
        BLOCK_EXPERTS=triton.next_power_of_2(num_experts // groups),
        BLOCK_K=triton.next_power_of_2(top_k), num_warps=1,
    )  # fmt: skip
    return Routed(experts, weights, ranks, counts)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _place(
    experts, ranks, counts, pairs, tiles, num_pairs, num_tiles, NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    one = tl.arange(0, BLOCK_EXPERTS)[None, :]
    count = tl.load(counts + one, mask=one < NUM_EXPERTS, other=0)
    num = (count + ROWS - 1) // ROWS  # tiles of each expert
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # a pair, and a tile
    expert = tl.load(experts + at, mask=at < num_pairs, other=-1)
    rank = tl.load(ranks + at, mask=expert >= 0, other=0)
    before = tl.sum(tl.where(one < expert[:, None], num, 0), axis=1)
    tl.store(pairs + before * ROWS + rank, at, mask=expert >= 0)
    has_ended = tl.cumsum(num, axis=1) <= at[:, None]
    expert = tl.sum(has_ended.to(tl.int32), axis=1)
    before = tl.sum(tl.where(has_ended, num, 0), axis=1)
    rows = tl.sum(tl.where(one == expert[:, None], count, 0), axis=1) - (at - before) * ROWS
    tl.store(tiles + 2 * at, expert, mask=at < num_tiles)
    tl.store(tiles + 2 * at + 1, tl.where(expert < NUM_EXPERTS, rows, 0), mask=at < num_tiles)


@triton.jit
def _product(
    x, weight, out, pairs, tiles, SIZE: tl.constexpr, DEPTH: tl.constexpr, SHARED: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    num_columns: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // num_columns
    num_rows = tl.load(tiles + 2 * tile + 1)
    if num_rows <= 0:
        return
    m = tl.arange(0, ROWS)
    n = (tl.program_id(0) % num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    pair = tl.load(pairs + tile * ROWS + m, mask=m < num_rows, other=0).to(tl.int64)
    rows = x + (pair // SHARED)[:, None] * DEPTH + k[None, :]
    half: tl.constexpr = SIZE * DEPTH
    whole: tl.constexpr = DEPTH % BLOCK_K == 0
    expert = tl.load(tiles + 2 * tile).to(tl.int64)
    channels = weight + expert * half * (2 if GATED else 1) + n[None, :] * DEPTH + k[:, None]
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    other = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        inside = whole | (start + k < DEPTH)
        v = tl.load(rows + start, mask=(m < num_rows)[:, None] & inside[None, :], other=0.0)
        here = inside[:, None] & (n < SIZE)[None, :]
        w = tl.load(channels + start, mask=here, other=0.0)
        total = tl.dot(v, w, total, input_precision="ieee")
        if GATED:
            w = tl.load(channels + half + start, mask=here, other=0.0)
            other = tl.dot(v, w, other, input_precision="ieee")
    kind = out.dtype.element_ty
    if GATED:
        gate = total.to(kind).to(tl.float32)
        active = activate(gate, GELU).to(kind).to(tl.float32)
        total = active * other.to(kind).to(tl.float32)
    at = out + pair[:, None] * SIZE + n[None, :]
    tl.store(at, total.to(kind), mask=(m < num_rows)[:, None] & (n < SIZE)[None, :])


@triton.jit
def _weigh(
    rows, experts, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(TOP_K):
        pair = token * TOP_K + place
        is_there = tl.load(experts + pair) >= 0  # of a token that pads nothing was written
        row = tl.load(rows + pair * size + at, mask=(at < size) & is_there, other=0.0)
        total += tl.load(weights + pair) * row.to(tl.float32)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=at < size)


class _Shape(NamedTuple):
    """Of the tiles of a product."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def _shape(rows: int, item_nbytes: int, *, gated: bool) -> _Shape:
    """A gated one has as many channels of gate and of up."""
    if item_nbytes > 2:
        return _Shape(32 if gated else 64, 32, 4, 2)
    if rows < 64:
        return _Shape(32 if gated else 64, 128, 4, 4)
    return _Shape(64 if gated else 128, 64, 4 if rows == 64 else 8, 3)


def rows_of_tile(num_pairs: int, num_experts: int, item_nbytes: int) -> int:
    mean = triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))
    return max(LEAST_ROWS, min(mean, MOST_ROWS if item_nbytes <= 2 else MOST_WIDE_ROWS))


class Placed(NamedTuple):
    """The tiles of a step's pairs."""

    pairs: torch.Tensor  # int32 [tiles * rows]: of each tile, in its order
    tiles: torch.Tensor  # int32 [tiles, 2]: expert and rows
    rows: int  # of a tile, at most


def placed(routed: Routed, rows: int) -> Placed:
    num_experts, num_pairs = len(routed.counts), routed.experts.numel()
    hit = min(num_pairs, num_experts)
    num_tiles = hit + (num_pairs - hit) // rows  # at most: each expert may begin one
    pairs = routed.experts.new_empty(num_tiles * rows)
    tiles = routed.experts.new_empty(num_tiles, 2)
    block_experts = triton.next_power_of_2(num_experts)
    block = max(1, COMPARED // block_experts)
    _place[(triton.cdiv(num_pairs, block),)](
        routed.experts, routed.ranks, routed.counts, pairs, tiles, num_pairs, num_tiles,
        NUM_EXPERTS=num_experts, ROWS=rows, BLOCK_EXPERTS=block_experts, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return Placed(pairs, tiles, rows)


def weighed(given: torch.Tensor, routed: Routed) -> torch.Tensor:
    """`[T, H]`: of each token the sum of its pairs' rows, times their weights."""
    num_tokens, top_k = routed.experts.shape
    hidden = given.shape[1]
    out = torch.empty_like(given[:num_tokens])
    width = min(1024, triton.next_power_of_2(hidden))
    _weigh[(num_tokens, triton.cdiv(hidden, width))](
        given, routed.experts, routed.weights, out, hidden, TOP_K=top_k, BLOCK=width, num_warps=4
    )
    return out


def multiply_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routed: Routed,
    *,
    gelu: bool = False,
) -> torch.Tensor:
    num_experts, hidden, inner = down.shape
    num_pairs, top_k = routed.experts.numel(), routed.experts.shape[1]
    rows = rows_of_tile(num_pairs, num_experts, x.element_size())
    pairs, tiles, _ = placed(routed, rows)

    def product(x: torch.Tensor, weight: torch.Tensor, size: int, shared: int) -> torch.Tensor:
        gated = weight.shape[1] > size
        shape = _shape(rows, x.element_size(), gated=gated)
        out = x.new_empty(num_pairs, size)
        _product[(len(tiles) * triton.cdiv(size, shape.block_n),)](
            x, weight, out, pairs, tiles, SIZE=size, DEPTH=x.shape[1], SHARED=shared, GATED=gated,
            GELU=gelu, ROWS=rows, BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        return out

    return weighed(product(product(x.contiguous(), gate_up, inner, top_k), down, hidden, 1), routed)


@triton.jit
def _add_gated(out, rows, gate, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + token * size + at, mask=at < size, other=0.0)
    share = tl.sigmoid(tl.load(gate + token).to(tl.float32)).to(row.dtype).to(tl.float32)
    row = (share * row.to(tl.float32)).to(row.dtype).to(tl.float32)
    before = tl.load(out + token * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + token * size + at, (before + row).to(out.dtype.element_ty), mask=at < size)


def add_gated(out: torch.Tensor, rows: torch.Tensor, gate: torch.Tensor) -> None:
    num_tokens, size = out.shape
    block = min(1024, triton.next_power_of_2(size))
    _add_gated[(num_tokens, triton.cdiv(size, block))](
        out, rows, gate, size, BLOCK=block, num_warps=4
    )
