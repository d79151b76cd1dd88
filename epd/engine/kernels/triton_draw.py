"""The likeliest tokens of rows of logits, and what follows their ranking, in two kernels and in
three instead of some forty small ones.

Functions and arguments are those of `epd.engine.language.token_draw`, which specifies them; sums
are fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_nucleus import lowest_of_nucleus

__all__ = ["drawn", "first_largest", "lowest_kept", "lowest_of_nucleus"]

MAX_WIDTH = 1024  # of the rows that one program holds
LOG2E = tl.constexpr(1.4426950408889634)
TOGETHER = 4096  # logits that one program sums
COMPARED = 8192  # logits of which one program finds the largest


@triton.jit
def _largest_of_part(
    logits, values, places, size, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Its place is -1 if one of the part is not finite."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    low = float("-inf")
    value = tl.load(logits + row * size + at, mask=at < size, other=low).to(tl.float32)
    num_finite = tl.sum((tl.abs(value) < float("inf")).to(tl.int32), axis=0)
    best = tl.max(value, axis=0)
    place = tl.min(tl.where(value == best, at, size), axis=0)
    place = tl.where(num_finite == tl.minimum(BLOCK, size - part * BLOCK), place, -1)
    tl.store(values + row * PARTS + part, best)
    tl.store(places + row * PARTS + part, place)


@triton.jit
def _first_of_parts(
    values, places, tokens, are_finite, size, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    place = tl.load(places + row * PARTS + part, mask=part < PARTS, other=size)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, place, size - 1), axis=0)
    tl.store(tokens + row, tl.maximum(token, 0).to(tl.int64))
    tl.store(are_finite + row, (tl.min(place, axis=0) >= 0).to(tl.uint8))


def first_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (count, size), logits = logits.shape, logits.contiguous()
    parts, device = triton.cdiv(size, COMPARED), logits.device
    values = torch.empty(count, parts, dtype=torch.float32, device=device)
    places = torch.empty(count, parts, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    are_finite = torch.empty(count, dtype=torch.uint8, device=device)
    _largest_of_part[(count, parts)](
        logits, values, places, size, PARTS=parts, BLOCK=COMPARED, num_warps=8
    )
    _first_of_parts[(count,)](
        values, places, tokens, are_finite, size, PARTS=parts,
        BLOCK=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip
    return tokens, are_finite.view(torch.bool)


@triton.jit
def _lowest_kept(
    ordered, floor, kept, nucleus, top, temperature, out, count, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(ordered + row * count + at, mask=inside, other=float("-inf"))
    stays = inside & (value >= tl.load(floor + row)) & (at < tl.load(kept + row))
    scaled = (value - tl.load(top + row)) / tl.load(temperature + row)
    share = tl.where(stays, tl.exp2(scaled * LOG2E), 0.0).to(tl.float64)
    before = tl.cumsum(share, axis=0) - share
    part = tl.load(nucleus + row)
    bound = tl.where(part >= 1.0, float("inf"), part.to(tl.float64) * tl.sum(share, axis=0))
    stays = (stays & (before < bound)) | (at == 0)
    tl.store(out + row, tl.min(tl.where(stays, value, float("inf")), axis=0))


def lowest_kept(
    ordered: torch.Tensor,
    floor: torch.Tensor,
    kept: torch.Tensor,
    nucleus: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    rows, count = ordered.shape
    out = torch.empty_like(top)
    columns = (column.contiguous() for column in (floor, kept, nucleus, top, temperature))
    _lowest_kept[(rows,)](
        ordered.contiguous(), *columns, out, count, BLOCK=triton.next_power_of_2(count)
    )
    return out


@triton.jit
def _weights(logits, top, temperature, lowest):
    weight = tl.exp2((logits - top) / temperature * LOG2E)
    return tl.where(logits >= lowest, weight, 0.0).to(tl.float64)


@triton.jit
def _sum_chunks(
    logits, top, temperature, lowest, sums, num_chunks, LENGTH: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    at = (row * num_chunks + chunk)[:, None] * LENGTH + tl.arange(0, LENGTH)[None, :]
    value = tl.load(logits + at, mask=(chunk < num_chunks)[:, None], other=float("-inf"))
    weight = _weights(value, tl.load(top + row), tl.load(temperature + row), tl.load(lowest + row))
    total = tl.sum(weight, axis=1)
    tl.store(sums + row * num_chunks + chunk, total, mask=chunk < num_chunks)


@triton.jit
def _passed(weight, target, at):
    """The first that passes the target and weighs anything, or the last that does."""
    weighs = weight > 0.0
    passes = weighs & (tl.cumsum(weight, axis=0) > target)
    last = tl.max(tl.where(weighs, at, 0), axis=0)
    return tl.minimum(tl.min(tl.where(passes, at, last), axis=0), last)


@triton.jit
def _draw(
    logits, top, temperature, lowest, sums, numbers, out, num_chunks,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.load(sums + row * num_chunks + at, mask=at < num_chunks, other=0.0)
    target = tl.sum(total, axis=0) * tl.load(numbers + row)
    chunk = _passed(total, target, at)
    target -= tl.sum(tl.where(at < chunk, total, 0.0), axis=0)
    inside = tl.arange(0, LENGTH)
    value = tl.load(logits + (row * num_chunks + chunk) * LENGTH + inside)
    weight = _weights(value, tl.load(top + row), tl.load(temperature + row), tl.load(lowest + row))
    tl.store(out + row, (chunk * LENGTH + _passed(weight, target, inside)).to(tl.int64))


def drawn(logits: torch.Tensor, rows: Any, numbers: torch.Tensor, length: int) -> torch.Tensor:
    count, size = logits.shape
    num_chunks = size // length
    logits = logits.contiguous()
    columns = [column.contiguous() for column in (rows.top, rows.temperature, rows.lowest)]
    sums = torch.empty(count, num_chunks, dtype=torch.float64, device=logits.device)
    together = max(1, TOGETHER // length)
    _sum_chunks[(count, triton.cdiv(num_chunks, together))](
        logits, *columns, sums, num_chunks, LENGTH=length, CHUNKS=together
    )
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    _draw[(count,)](
        logits, *columns, sums, numbers, out, num_chunks, LENGTH=length,
        BLOCK=triton.next_power_of_2(num_chunks), num_warps=8,
    )  # fmt: skip
    return out
