"""Kill at every step: the same small run again and again, each time with a `kill -9` (and a
restart) of one process after one more step of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from epd.sim.cluster import GATEWAY, parse_topology
from epd.sim.faults import Fault
from epd.sim.network import Conditions
from epd.sim.rand import KeyedRandom
from epd.sim.run import Plan, run
from epd.sim.swarm import excuse
from epd.sim.transfer import DataConditions
from epd.sim.workload import Workload

FIRST_ASK_S = 1.0


def base_plan(topology: str, seed: int = 1, num_requests: int = 4) -> Plan:
    """A short run without faults: few requests, close together."""
    workload = Workload(num_requests=num_requests, spread_s=0.05, max_tokens=5, num_pictures=3)
    return Plan(seed, topology, workload.draw(KeyedRandom(seed, "search")))


def steps_of_interest(plan: Plan) -> tuple[int, int]:
    """The first step at which requests are asked, and the one when all are answered."""
    result = run(plan, keep=True)
    assert result.world is not None
    assert result.passed, result.violations
    bounds = result.world.loop.marks
    result.world.close()
    return bounds["first ask"], bounds["all answered"]


def kills(
    topology: str, seed: int = 1, stride: int = 1, duration_s: float = 0.3, kind: str = "kill"
) -> Iterator[Plan]:
    """One plan per process and step."""
    plan = base_plan(topology, seed)
    first, last = steps_of_interest(plan)
    names = [name for name, _ in parse_topology(topology)]
    for name in (*names, GATEWAY):
        for step in range(first, last, stride):
            faults = (Fault(kind, name, at_step=step, duration_s=duration_s),)
            may_fail = excuse(topology, faults, Conditions(), DataConditions())
            yield replace(plan, faults=faults, may_fail=may_fail)


def nth_kill(topology: str, number: int) -> Plan:
    """The plan that kills the process, at the step, that `number` stands for."""
    plan = base_plan(topology)
    first, last = steps_of_interest(plan)
    names = [*(name for name, _ in parse_topology(topology)), GATEWAY]
    name = names[number // (last - first) % len(names)]
    faults = (Fault("kill", name, at_step=first + number % (last - first), duration_s=0.3),)
    may_fail = excuse(topology, faults, Conditions(), DataConditions())
    return replace(plan, faults=faults, may_fail=may_fail)


def num_kills(topology: str) -> int:
    first, last = steps_of_interest(base_plan(topology))
    return (len(parse_topology(topology)) + 1) * (last - first)
