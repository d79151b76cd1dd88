"""Groups of ranks in the swarm: which instances are groups, and what becomes of their ranks.

All of it is drawn from a stream of its own, so that a plan is otherwise what it is without groups.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from epd.topology import name_instances, parse_groups
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.faults import Fault

SIZES = (1, 2, 2, 3)
KINDS = ("kill", "stall", "slow", "lose_command")
POINTS = (
    "GROUP:FORMING>READY",
    "GROUP:CommandGiven",
    "OUTGOING:GRANTED>STREAMING",
    "MESSAGE:Grant",
    "MESSAGE:Commit",
    "ENCODING:PREPARED>ENCODING",
)
STATE_POINTS = (*POINTS, "MESSAGE:WriteState", "MESSAGE:LandKv")  # where ranks share states


def with_ranks(random: KeyedRandom, topology: str) -> str:
    """Its instances are groups, those of some roles or of all."""
    parts = re.findall(r"\d+[a-z]+", topology)
    sizes = [random.pick(SIZES, n) for n in range(len(parts))]
    if max(sizes) == 1:
        sizes[0] = 2
    told = (part + f":tp{n}," * (n > 1) for part, n in zip(parts, sizes, strict=True))
    return "".join(told).rstrip(",")


def draw_rank_fault(random: KeyedRandom, topology: str, points: Sequence[str] = POINTS) -> Fault:
    """A rank that does not lead dies, stands still, is slow, comes late or misses a command."""
    parsed = parse_groups(topology)
    names = [name for name, _ in name_instances([roles for roles, _ in parsed])]
    ranks = [
        f"{name}.{rank}"
        for name, (_, size) in zip(names, parsed, strict=True)
        for rank in range(1, size)
    ]
    kind, target = random.pick(KINDS, "kind"), random.pick(ranks, "target")
    duration_s = random.pick((0.05, 0.4, 1.2, 4.0), "duration")
    factor = 1.0 if kind == "lose_command" else random.pick((3.0, 10.0, 40.0), "factor")
    if random.chance(0.2, "late"):
        return Fault("stall", target, 0.12, duration_s=duration_s)
    point, nth = "", 1
    at_s = random.between(0.2, 2.2, "at")
    if random.chance(0.7, "at a point"):
        point, nth, at_s = random.pick(points, "point"), 1 + random.below(16, "nth"), 0.0
    return Fault(kind, target, at_s, point, nth, duration_s=duration_s, factor=factor)
