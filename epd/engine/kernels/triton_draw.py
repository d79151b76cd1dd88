"""What follows the ranking of logits, in three kernels instead of some forty small ones.

Functions and arguments are those of `epd.engine.token_draw`, which specifies them; sums are fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from epd.engine.kernels.triton_nucleus import lowest_of_nucleus

__all__ = ["drawn", "lowest_kept", "lowest_of_nucleus"]

MAX_WIDTH = 1024  # of the rows that one program holds
LOG2E = tl.constexpr(1.4426950408889634)
TOGETHER = 4096  # logits that one program sums


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
