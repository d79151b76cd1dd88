"""Which faults hit which process, and when: a pure function of what is asked for.

Kills come every `kill_every_s`, and between two of them another fault.  A fault is held back while
it would leave a stage without an instance that the stage could have (`outages.py`).  That delays
all faults behind it, so the times of a plan are the earliest ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from epd.config import ConfigError
from epd.topology import Roles, name_instances, parse_groups

KINDS = {
    "kill": "kill -9 of a rank of an instance",
    "stop": "SIGSTOP of a rank, then SIGCONT",
    "disk": "no byte can be written to a file, nor a file grow: as on a full disk (RLIMIT_FSIZE)",
    "descriptors": "nothing more can be opened (RLIMIT_NOFILE)",
    "cut": "frames of one host, or of both, do not arrive",
    "gateway": "kill -9 of a gateway, where another serves",
}
BETWEEN = ("stop", "stop", "disk", "descriptors")
SENDERS = ("both", "a", "b")  # what of them is lost in a cut


@dataclass(frozen=True, slots=True)
class Victim:
    """An instance.  Of host b its name begins with `b/`."""

    name: str
    roles: Roles
    ranks: int


@dataclass(frozen=True, slots=True)
class Fault:
    """`who`: a member's name, of a cut whose frames are lost, of a gateway its number; seconds
    since the load began."""

    at_s: float
    kind: str
    who: str
    rank: int = 0
    lasts_s: float = 0.0

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.rank else ""
        lasts = f" for {self.lasts_s:g} s" if self.lasts_s else ""
        return f"{self.at_s:7.1f} s  {self.kind} {self.who}{rank}{lasts}"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for."""

    topology: str = "2e2p2d"
    minutes: float = 15.0
    kill_every_s: float = 10.0
    stop_s: tuple[float, float] = (3.0, 20.0)
    partition: bool = False
    seed: int = 1
    clients: int = 6
    max_pause_s: float = 6.0
    num_gateways: int = 1
    flags: tuple[str, ...] = ()  # of epd run


def parts_of(topology: str) -> tuple[str, str]:
    """The instances of two hosts: every second one of each kind is on the other.  Raises
    ConfigError if there is none."""
    halves: tuple[list[str], list[str]] = ([], [])
    groups = parse_groups(topology)
    for (name, roles), (_, ranks) in zip(
        name_instances([roles for roles, _ in groups]), groups, strict=True
    ):
        letters = "".join(role[0] for role in roles)
        text = f"1{letters}" + (f":tp{ranks}," if ranks > 1 else "")
        halves[int(name.removeprefix(letters)) % 2].append(text)
    if not halves[1]:
        raise ConfigError(f"topology {topology!r} has two of nothing: one host would be empty")
    a, b = ("".join(half).rstrip(",") for half in halves)
    return a, b


def members_of(wish: Wish) -> tuple[Victim, ...]:
    parts = parts_of(wish.topology) if wish.partition else (wish.topology, "")
    found = []
    for host, part in zip(("", "b/"), parts, strict=True):
        groups = parse_groups(part, whole=False) if part else []
        named = name_instances([roles for roles, _ in groups])
        for (name, roles), (_, ranks) in zip(named, groups, strict=True):
            found.append(Victim(host + name, roles, ranks))
    return tuple(found)


def faults_of(wish: Wish) -> tuple[Fault, ...]:
    draw = random.Random(f"chaos {wish.seed}")
    members, found = members_of(wish), []
    between = BETWEEN + ("cut",) * (2 if wish.partition else 0)
    between += ("gateway",) * (2 if wish.num_gateways > 1 else 0)
    for number in range(int(60 * wish.minutes / wish.kill_every_s)):
        at_s = number * wish.kill_every_s
        for kind in ("kill", draw.choice(between)):
            member = draw.choice(members)
            who, rank = member.name, 0
            if kind == "cut":
                who = draw.choice(SENDERS)
            elif kind == "gateway":
                who = str(draw.randrange(wish.num_gateways))
            else:
                rank = draw.randrange(member.ranks)
            is_over = kind in {"kill", "gateway"}
            lasts_s = 0.0 if is_over else round(draw.uniform(*wish.stop_s), 1)
            found.append(Fault(at_s, kind, who, rank, lasts_s))
            at_s += wish.kill_every_s / 2
    return tuple(found)
