"""Traces that are drawn: from a named workload, or by parameters that others have published.

- `burstgpt`: arrivals and lengths of BurstGPT's own generator.  Gaps are of a Gamma distribution of
  shape 0.5, lengths of a Zipf distribution of exponent 1.1 below 1,024 (the
  defaults of RunConfig in HPMLL/BurstGPT, under example; arXiv 2401.17644).  Its scale, 2 s, is
  that of one request a second.
- `prefix-N`: texts of 2,048 tokens; N in 100 begin with 1,536 tokens that were sent before.
- The workloads of `epd bench serve`: users become Poisson arrivals, bursts stay.

ServeGen publishes its multimodal clients as tables and Mooncake its requests, neither of them a
law: `published.py` reads their files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from epd_lab.bench.traces.form import BLOCK_TOKENS, Picture, TraceRequest, ordered
from epd_lab.bench.workload import NAMED, Bursts, Poisson, Stream, image_numbers, named

GAMMA_SHAPE, ZIPF_EXPONENT, MOST_TOKENS = 0.5, 1.1, 1023
PREFIX_BLOCKS = 3
DRAWN = "burstgpt, prefix-N"


def drawn(name: str, per_s: float, for_s: float, seed: int = 0) -> list[TraceRequest]:
    """`per_s` requests a second on average, of each stream of a workload.

    Raises ValueError with the names that there are.
    """
    draw = random.Random(f"{name} {seed}")
    prefix, _, percent = name.partition("-")
    if name == "burstgpt":
        return list(_burstgpt(draw, per_s, for_s))
    if prefix == "prefix" and percent.isdecimal() and int(percent) < 100:
        return list(_prefixes(draw, per_s, for_s, int(percent) / 100))
    if name not in NAMED:
        raise ValueError(f"there is no shape {name!r}; choose {DRAWN}, {', '.join(NAMED)}")
    streams = named(name).streams
    return ordered([a for s in streams for a in _of_stream(s, draw, per_s, for_s, seed)])


def until(for_s: float, gap_s: Callable[[], float]) -> Iterator[float]:
    """Arrivals with such gaps."""
    at_s = gap_s()
    while at_s < for_s:
        yield at_s
        at_s += gap_s()


def repeats(draw: random.Random, share: float) -> Iterator[int]:
    """Numbers of what is sent: a new one, or for this share one that was sent before; for ever."""
    known = 0
    while True:
        if not known or draw.random() >= share:
            known += 1
            yield known - 1
        else:
            yield draw.randrange(known)


def _burstgpt(draw: random.Random, per_s: float, for_s: float) -> Iterator[TraceRequest]:
    lengths = range(1, MOST_TOKENS + 1)
    weights = [length**-ZIPF_EXPONENT for length in lengths]
    scale_s = 1.0 / GAMMA_SHAPE / per_s
    for at_s in until(for_s, lambda: draw.gammavariate(GAMMA_SHAPE, scale_s)):
        tokens_in, tokens_out = draw.choices(lengths, weights, k=2)
        yield TraceRequest(at_s, tokens_in, tokens_out)


def _prefixes(
    draw: random.Random, per_s: float, for_s: float, share: float
) -> Iterator[TraceRequest]:
    arrivals = until(for_s, lambda: draw.expovariate(per_s))
    for at_s, number in zip(arrivals, repeats(draw, share), strict=False):
        blocks = tuple(range(number * PREFIX_BLOCKS, (number + 1) * PREFIX_BLOCKS))
        yield TraceRequest(at_s, (PREFIX_BLOCKS + 1) * BLOCK_TOKENS, 64, blocks=blocks)


def _of_stream(
    stream: Stream, draw: random.Random, per_s: float, for_s: float, seed: int
) -> Iterator[TraceRequest]:
    match stream.arrival:
        case Bursts(size, every_s):
            times = [n * every_s for n in range(int(for_s / every_s)) for _ in range(size)]
        case arrival:
            rate = arrival.per_s if isinstance(arrival, Poisson) else per_s
            times = list(until(for_s, lambda: draw.expovariate(rate)))
    shape = stream.shape
    numbers = image_numbers(replace(stream, count=len(times)), seed)
    for at_s, wanted in zip(times, numbers, strict=True):
        pictures = tuple(Picture(*shape.size, number) for number in wanted)
        yield TraceRequest(at_s, shape.text_tokens, shape.output_tokens, pictures, kind=stream.name)
