"""What operators and lost time add to a run of the swarm.

Drains, other roles, loops and devices that stand still, and a second gateway that is cut off,
stalls or dies.

All of it is drawn from a stream of its own, so that a plan is otherwise what it is without.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.faults import Fault

SECOND = f"{GATEWAY}1"
ALL = "encode,prefill,decode"  # each role that an instance had is among them
KINDS = ("ask_drain", "ask_drain", "wedge", "hang")  # what copies by itself has its drill
CUTS = ("kill", "stall", "partition", "block")
FROZEN_S = 16.0  # who stands still so long is stuck, and its process ends


def draw(random: KeyedRandom, names: Sequence[str], alone: Collection[str]) -> tuple[Fault, ...]:
    """None or one; `alone` are who must keep their roles, since nobody else has them."""
    return (_operation(random, names, alone),) if random.chance(0.4, "operated") else ()


def cut(random: KeyedRandom, names: Sequence[str]) -> Fault:
    """What becomes of the second gateway, or of its way to one instance."""
    kind, at_s = random.pick(CUTS, "cut"), random.between(0.5, 2.5, "cut at")
    duration_s = random.pick((0.4, 1.2, 4.0, 8.0), "cut for")
    if kind in ("kill", "stall"):
        return Fault(kind, SECOND, at_s, duration_s=duration_s)
    one = random.pick(names, "cut from")
    ends = (one, SECOND) if random.chance(0.5, "to it") else (SECOND, one)
    return Fault(kind, ends[0], at_s, duration_s=duration_s, other=ends[1])


def _operation(random: KeyedRandom, names: Sequence[str], alone: Collection[str]) -> Fault:
    kind, target = random.pick(KINDS, "operation"), random.pick(names, "at whom")
    at_s = random.between(0.8, 2.4, "when")
    if kind != "ask_drain":
        return Fault(kind, target, at_s, duration_s=FROZEN_S)
    within_s = random.pick((0.1, 1.0, 2.0), "within")  # no more than a drain has by itself
    roles = ("", ALL) if target in alone else ("", ALL, "encode", "prefill,decode")
    return Fault(kind, target, at_s, duration_s=within_s, call=random.pick(roles, "roles"))
