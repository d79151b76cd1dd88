"""Which tokens may be drawn, and the draw: many rows of logits at once, where they lie.

Theory of operation
-------------------
Every filter (min_p, top_k, top_p) ends as one number per row: the lowest logit that may be drawn;
tokens that tie with it stay.  A row's number is the same whatever its neighbours ask for.  The
largest values of a row lie in its chunks with the highest maxima: top_k looks there, and top_p
behind it at those values only.  The draw adds up chunks, picks one, and adds up within it.

On a GPU nothing of the vocabulary's size is sorted: top_p alone finds its number bit by bit
(`kernels/triton_nucleus`), and three kernels follow the ranking (`kernels/triton_draw`).  The
functions here are their specification, and what runs elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from epd.engine.device.copies import to_device
from epd.messages import SamplingParams

MAX_CHUNK, MIN_CHUNK = 512, 16  # of a row of logits that is summed or ranked in two steps


@dataclass(frozen=True, slots=True)
class Filtered:
    """What may be drawn of rows of logits: float32 columns `[n, 1]`."""

    top: torch.Tensor  # the largest logit
    temperature: torch.Tensor
    lowest: torch.Tensor  # the lowest logit that may be drawn

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """float32: probabilities by that of the likeliest; 0: filtered out."""
        weights = ((logits - self.top) / self.temperature).exp()
        return weights.masked_fill(logits < self.lowest, 0.0)


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 `[n]`: the first token of those with the largest logit of each row; bool `[n]`: whether
    all logits of the row are finite.

    logits `[n, vocabulary]`, in any precision.
    """
    return _ops(logits.device).first_largest(logits)  # type: ignore[no-any-return]


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> Filtered:
    """logits float32 `[n, vocabulary]`; each row has parameters of its own."""
    device, size = logits.device, logits.shape[-1]
    ranked = [p.top_k if 0 < p.top_k < size else size for p in params]
    wishes = [(p.temperature, p.min_p, r, p.top_p) for p, r in zip(params, ranked, strict=True)]
    columns = to_device(wishes, torch.float32, device)
    temperature, min_p, kept, nucleus = columns.split(1, dim=-1)
    maxima = _in_chunks(logits).amax(dim=-1)
    top = maxima.amax(dim=-1, keepdim=True)
    lowest = top + temperature * min_p.log()  # log 0: no limit
    for rows, count in _by_count(params, ranked, size):
        index = slice(None) if len(rows) == len(params) else to_device(rows, torch.int64, device)
        few = [column[index] for column in (nucleus, top, temperature)]
        if count == size:
            found = _ops(device).lowest_of_nucleus(logits[index], lowest[index], *few)
        else:
            ordered = _largest(logits[index], maxima[index], count)
            found = _ops(device, count).lowest_kept(ordered, lowest[index], kept[index], *few)
        lowest[index] = found
    return Filtered(top, temperature, lowest)


def draw(logits: torch.Tensor, rows: Filtered, numbers: torch.Tensor) -> torch.Tensor:
    """int64 `[n]`: where the cumulative weight of each row passes its number (in [0, 1)) of the
    total; never a token that is filtered out.

    logits float32 `[n, vocabulary]`, numbers float64 `[n]`.
    """
    length = _chunk_length(logits.shape[-1])
    return _ops(logits.device, length).drawn(logits, rows, numbers, length)


def first_largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The sum of a row is finite exactly when all of it is: logits are far from overflow.
    return logits.argmax(dim=-1), torch.isfinite(logits.sum(dim=-1, dtype=torch.float32))


def lowest_kept(
    ordered: torch.Tensor,
    floor: torch.Tensor,
    kept: torch.Tensor,
    nucleus: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """`[n, 1]`: the lowest of each row's falling values `[n, count]` that stays.

    floor: nothing below it does; kept: how many may; nucleus: the likeliest of these that have so
    much of their mass; the first always stays.
    """
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    gone = (ordered < floor) | (ranks >= kept)
    shares = ((ordered - top) / temperature).exp().double().masked_fill(gone, 0.0)
    before = shares.cumsum(dim=-1) - shares  # mass of the likelier ones
    gone |= (before >= nucleus * shares.sum(dim=-1, keepdim=True)) & (nucleus < 1.0)
    gone[:, 0] = False
    return ordered.masked_fill(gone, torch.inf).amin(dim=-1, keepdim=True)


def lowest_of_nucleus(
    logits: torch.Tensor,
    floor: torch.Tensor,
    nucleus: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
) -> torch.Tensor:
    """`lowest_kept` of all values of each row, in any order; nucleus: less than 1."""
    ordered = logits.sort(dim=-1, descending=True).values
    kept = torch.full_like(floor, logits.shape[-1])
    return lowest_kept(ordered, floor, kept, nucleus, top, temperature)


def drawn(logits: torch.Tensor, rows: Filtered, numbers: torch.Tensor, length: int) -> torch.Tensor:
    """See `draw`; chunks have so many tokens."""
    weights = rows.weights(logits).unflatten(-1, (-1, length))
    sums = weights.sum(dim=-1, dtype=torch.float64)
    target = sums.sum(dim=-1, keepdim=True) * numbers[:, None]
    chunk = _passed(sums, target)
    before = sums.cumsum(dim=-1).gather(1, chunk) - sums.gather(1, chunk)
    inside = weights.gather(1, chunk[..., None].expand(-1, 1, length))[:, 0].double()
    return (chunk * length + _passed(inside, target - before))[:, 0]


def _passed(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 `[n, 1]`: the first whose cumulative weight passes the target and that weighs anything;
    the last that does, where rounding keeps the sum from passing."""
    weighs = weights > 0
    passes = weighs & (weights.cumsum(dim=-1) > target)
    last = weights.shape[-1] - 1 - weighs.flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    first = passes.to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.where(passes.any(dim=-1, keepdim=True), first, last)


def _by_count(
    params: Sequence[SamplingParams], ranked: Sequence[int], size: int
) -> Iterator[tuple[list[int], int]]:
    """Rows that are filtered by rank, and how many of their largest logits they need: those with
    few together, those that need all of a row by themselves."""
    few = [row for row, count in enumerate(ranked) if count < size]
    if few:
        yield few, max(ranked[row] for row in few)
    many = [row for row, count in enumerate(ranked) if count == size and params[row].top_p < 1.0]
    if many:
        yield many, size


def _largest(logits: torch.Tensor, maxima: torch.Tensor, count: int) -> torch.Tensor:
    """`[n, count]`: the largest values of each row, falling; maxima: those of its chunks."""
    size = logits.shape[-1]
    chunks = _in_chunks(logits)
    length = chunks.shape[-1]
    if count * length < size:
        best = maxima.topk(count, dim=-1, sorted=False).indices
        logits = chunks.gather(1, best[..., None].expand(-1, -1, length)).flatten(1)
    return logits.topk(count, dim=-1).values


def _in_chunks(rows: torch.Tensor) -> torch.Tensor:
    """`[n, size]` as `[n, chunks, length]`."""
    return rows.unflatten(-1, (-1, _chunk_length(rows.shape[-1])))


def _chunk_length(size: int) -> int:
    """A size without a good divisor is one chunk."""
    length = math.gcd(size, MAX_CHUNK)
    return length if length >= MIN_CHUNK else size


def _ops(device: torch.device, width: int = 0) -> ModuleType:
    if device.type == "cuda":
        from epd.engine.kernels import triton_draw

        if width <= triton_draw.MAX_WIDTH:
            return triton_draw
    return sys.modules[__name__]  # the functions above
