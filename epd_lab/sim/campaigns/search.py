"""Kill at every step: the same small run again and again, each time with a `kill -9` (and a
restart) of one process after one more step of the loop."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from epd_lab.sim.cluster import GATEWAY, parse_topology
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.network import Conditions
from epd_lab.sim.planes.transfer import DataConditions
from epd_lab.sim.run import Plan, run
from epd_lab.sim.swarm.plans import excuse
from epd_lab.sim.workload import Workload

DOWN_S = 0.3


def base_plan(topology: str, seed: int = 1, num_requests: int = 4) -> Plan:
    """A short run without faults: few requests, close together."""
    workload = Workload(num_requests=num_requests, spread_s=0.05, max_tokens=5, num_images=3)
    return Plan(seed, topology, workload.draw(KeyedRandom(seed, "search")))


@cache
def steps_of_interest(topology: str, seed: int = 1) -> tuple[int, int]:
    """The first step at which requests are asked, and the one when all are answered."""
    result = run(base_plan(topology, seed), keep=True)
    assert result.world is not None
    assert result.passed, result.violations
    bounds = result.world.loop.marks
    result.world.close()
    return bounds["first ask"], bounds["all answered"]


def victims(topology: str) -> list[str]:
    return [*(name for name, _ in parse_topology(topology)), GATEWAY]


def num_kills(topology: str) -> int:
    """How many plans there are: one per process and step."""
    first, last = steps_of_interest(topology)
    return len(victims(topology)) * (last - first)


def nth_kill(topology: str, number: int) -> Plan:
    """The plan that kills the process, at the step, that `number` stands for."""
    if not 0 <= number < num_kills(topology):
        raise KeyError(f"no kill {number} of {topology}: there are {num_kills(topology)}")
    first, last = steps_of_interest(topology)
    which, step = divmod(number, last - first)
    name = victims(topology)[which]
    faults = (Fault("kill", name, at_step=first + step, duration_s=DOWN_S),)
    may_fail = excuse(topology, faults, Conditions(), DataConditions())
    return replace(base_plan(topology), faults=faults, may_fail=may_fail)
