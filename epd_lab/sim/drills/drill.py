"""What a drill is: topology and work, faults, what may fail and why, what it covers.

A drill runs under many seeds.  `must_fire` is the share of seeds, give or take chance, in which all
that it is about must really have happened: each of its faults, and each sign of `fires`.  A sign
proves something only if the same work without the faults does not show it; `calm` names what else
has to change for that.  `mutants` names the bugs (tests/sim/mutants/) that the drill has to
catch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from epd.config import Timing
from epd_lab.sim.cluster import Settings
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import Plan, Result
from epd_lab.sim.swarm.plans import Excuse
from epd_lab.sim.workload import Workload

NOTHING = Excuse(frozenset(), refusals=False)


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill; times of faults are drawn between `from_s` and `to_s` unless they have a point."""

    name: str
    covers: tuple[str, ...]
    topology: str = "1e1p1d"
    work: Workload = Workload()
    faults: tuple[Fault, ...] = ()
    network: Conditions = Conditions()
    data: DataConditions = DataConditions()
    settings: Settings = Settings()
    may_fail: Excuse = NOTHING
    why: str = ""  # why something may fail; required when something may
    must_fire: float = 0.9
    fires: tuple[str, ...] = ()  # signs, as `World.happened` spells them: all of them must show
    calm: Mapping[str, object] = field(default_factory=dict)  # "work.cancel_share": 0.0
    mutants: tuple[str, ...] = ()
    engine_faults: bool = False
    from_s: float = 1.0
    to_s: float = 2.0

    def plan(self, seed: int) -> Plan:
        random = KeyedRandom(seed, "drill", self.name)
        faults = tuple(self._place(random.stream(n), f) for n, f in enumerate(self.faults))
        return Plan(
            seed,
            self.topology,
            self.work.draw(random.stream("work")),
            faults,
            self.network,
            self.data,
            self.settings,
            self.may_fail,
            self.engine_faults,
        )

    def fired(self, result: Result) -> bool:
        """Whether all that the drill is about happened in a run of it."""
        wanted = Counter(fault.kind for fault in self.faults)
        return wanted <= result.fired and result.happened.issuperset(self.fires)

    def shown(self, result: Result) -> list[str]:
        """The signs that a run shows: of a run of `calmed` there must be none."""
        signs = {*self.fires, *(fault.kind for fault in self.faults)}
        return sorted(signs & result.happened)

    def calmed(self) -> Drill:
        """The same without its faults and conditions: what nothing happens to.

        Raises AttributeError if `calm` names what a drill does not have.
        """
        drill = replace(self, faults=())
        for path, value in self.calm.items():
            drill = _with(drill, path.split("."), value)
        return drill

    def _place(self, random: KeyedRandom, fault: Fault) -> Fault:
        if fault.point:
            return replace(fault, nth=1 + random.below(max(1, fault.nth), "nth"))
        return replace(fault, at_s=random.between(self.from_s, self.to_s, "at"))


def _with(thing: Any, path: list[str], value: object) -> Any:
    """A copy of `thing` in which what `path` leads to is `value`."""
    name, *rest = path
    inner = getattr(thing, name)
    change = {name: _with(inner, rest, value) if rest else value}
    if isinstance(thing, msgspec.Struct):
        return msgspec.structs.replace(thing, **change)
    return replace(thing, **change)


def replace_timing(**changes: float) -> Timing:
    return msgspec.structs.replace(Settings().timing, **changes)


PATIENT = replace_timing(request_timeout_s=3.0, suspect_after_s=20.0, lost_after_s=30.0)
"""Deadlines pass long before anybody is declared lost."""
