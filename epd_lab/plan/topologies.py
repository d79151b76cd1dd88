"""Which topologies of so many GPUs are worth a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from epd.topology import ROLES, parse_topology


def sensible(num_gpus: int) -> list[str]:
    """Replicas first, then each way to share the stages out: encoders apart, decode apart (with
    towers at its GPUs, or without), all three apart."""
    return [f"{num_gpus}epd", *_split(num_gpus)]


def is_replicas(topology: str) -> bool:
    """Whether each instance has all stages."""
    return all(len(roles) == len(ROLES) for roles in parse_topology(topology))


def _split(num_gpus: int) -> Iterator[str]:
    for first in range(1, num_gpus):
        rest = num_gpus - first
        yield f"{first}e{rest}pd"
        yield f"{first}ep{rest}d"
        yield f"{first}ep{rest}ed"
        for second in range(1, rest):
            yield f"{first}e{second}p{rest - second}d"


def bound_per_s(topology: str, stage_s: Mapping[str, float]) -> float:
    """Requests a second that no placement exceeds: the instances that play any of some stages have
    to do all work of these.  `stage_s`: a device's seconds of a request, by role."""
    instances = parse_topology(topology)
    return min(
        sum(not set(some).isdisjoint(one) for one in instances) / work_s
        for size in range(1, len(ROLES) + 1)
        for some in itertools.combinations(ROLES, size)
        if (work_s := sum(stage_s[role] for role in some))
    )


def promising(topologies: Sequence[str], stage_s: Mapping[str, float], most: int) -> list[str]:
    """The first, which are replicas, and those of the highest bounds, so many in all."""
    first, *others = topologies
    others.sort(key=lambda name: -bound_per_s(name, stage_s))
    return [first, *others[: most - 1]]
