"""Which instances are away, since when, and when a stage had none: the books of one run.

An instance is away from the moment it is hit until the gateway has it HEALTHY again.  After a kill
that is a new epoch, and else the fault must be over.  An instance that is not HEALTHY for a
reason of its own is away, too.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from epd.topology import ROLES
from epd_lab.bench.chaos.plan import Fault, Victim

Entries = Mapping[str, Mapping[str, Any]]  # of /ready, by a member's name


class Outages:
    """Seconds since the load began; nothing is lacking before the first look."""

    def __init__(self, members: tuple[Victim, ...]) -> None:
        self._members = {member.name: member for member in members}
        self._held: dict[str, int] = {}  # how many faults hold it
        self._ended: dict[str, int] = {}  # the epoch that was killed
        self._away: frozenset[str] = frozenset()
        self._entries: Entries = {}
        self.gateways_serve = True  # all of them
        self._times: list[float] = [float("-inf")]
        self._lacking: list[bool] = [False]

    @property
    def has_two_hosts(self) -> bool:
        return any(name.startswith("b/") for name in self._members)

    @property
    def away(self) -> list[str]:
        return sorted(self._away)

    def pid(self, name: str) -> int:
        """Of the life that was seen last, as its host counts."""
        return int(self._entries[name]["pid"])

    def hit(self, names: list[str], now_s: float, *, ends: bool) -> None:
        """`ends`: by a kill; else until `release`."""
        for name in names:
            if ends:
                self._ended[name] = int(self._entries[name]["epoch"])
            else:
                self._held[name] = self._held.get(name, 0) + 1
        self._settle(now_s)

    def release(self, names: list[str], now_s: float) -> None:
        for name in names:
            self._held[name] -= 1
        self._settle(now_s)

    def see(self, entries: Entries, now_s: float) -> None:
        """What the gateway shows; nothing of what it does not."""
        self._entries = entries
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        self._away = frozenset(name for name in self._members if self._is_away(name))
        lacking = any(not self._others(role) for role in self._roles())
        if lacking != self._lacking[-1]:
            self._times.append(now_s)
            self._lacking.append(lacking)

    def _is_away(self, name: str) -> bool:
        entry = self._entries.get(name, {})
        is_old = entry.get("epoch") == self._ended.get(name)
        return bool(self._held.get(name)) or is_old or entry.get("state") != "HEALTHY"

    def _roles(self) -> list[str]:
        return [r for r in ROLES if any(r in m.roles for m in self._members.values())]

    def _others(self, role: str, *but: str) -> list[str]:
        """Who has the role and is there, but for these."""
        members = self._members.values()
        return [
            m.name for m in members if role in m.roles and m.name not in {*self._away, *but}
        ]  # fmt: skip

    def hit_by(self, fault: Fault) -> list[str]:
        """Members; all of host b, if the cable is cut: the gateway is on the other one."""
        if fault.kind == "gateway":
            return []
        if fault.kind != "cut":
            return [fault.who]
        return [name for name in self._members if name.startswith("b/")]

    def may(self, fault: Fault) -> bool:
        """Whether each stage that it hits keeps an instance, of those that the topology gives more
        than it hits; and whether who is hit is there."""
        names = self.hit_by(fault)
        if fault.kind == "gateway":
            return self.gateways_serve
        if fault.kind != "cut" and names[0] in self._away:
            return False
        for role in self._roles():
            having = {m.name for m in self._members.values() if role in m.roles}
            if having & {*names} and having - {*names} and not self._others(role, *names):
                return False
        return True

    def lacked(self, from_s: float, to_s: float) -> bool:
        """Whether a stage was without an instance at any time between them."""
        first = bisect.bisect_right(self._times, from_s) - 1
        return any(self._lacking[first : bisect.bisect_right(self._times, to_s)])

    def lacking_s(self, until_s: float) -> float:
        """In all."""
        ends = [*self._times[1:], until_s]
        return sum(
            max(0.0, end - begin)
            for begin, end, lacking in zip(self._times, ends, self._lacking, strict=True)
            if lacking
        )
