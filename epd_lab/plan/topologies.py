"""Which topologies of so many GPUs are worth a plan."""

from __future__ import annotations

from collections.abc import Iterator


def sensible(num_gpus: int) -> list[str]:
    """Replicas first, then each way to share the stages out: encoders apart, decode apart (with
    towers at its GPUs, or without), all three apart."""
    return [f"{num_gpus}epd", *_split(num_gpus)]


def _split(num_gpus: int) -> Iterator[str]:
    for first in range(1, num_gpus):
        rest = num_gpus - first
        yield f"{first}e{rest}pd"
        yield f"{first}ep{rest}d"
        yield f"{first}ep{rest}ed"
        for second in range(1, rest):
            yield f"{first}e{second}p{rest - second}d"
