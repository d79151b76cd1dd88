"""The shortest plan that still fails: fewer requests, fewer faults, simpler asks, plainer times.

Draws are keyed by what they are for (`epd.sim.rand`) and times are absolute, so taking one part of
a plan away leaves the others as they were.  One thing does not: a fault at the nth occurrence of a
protocol point needs n occurrences.  So each way to leave something out is also tried with such
faults moved to the first occurrence.

Halves first (delta debugging), within a budget of runs; every step keeps the failure, so stopping
early gives a longer plan, never a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from epd.sim.faults import Fault
from epd.sim.run import Plan, run
from epd.sim.workload import Ask

MAX_RUNS = 100


def checker_of(violation: str) -> str:
    """`integrity` of `1.2 s: [integrity] ...`: what a shorter plan has to break as well."""
    return violation.partition("[")[2].partition("]")[0]


class Shrinker:
    """Delta debugging over asks and faults, then over their own parts, within a budget of runs."""

    def __init__(self, fails: Callable[[Plan], bool], max_runs: int = MAX_RUNS) -> None:
        self._fails = fails
        self._max_runs = max_runs
        self.runs = 0

    @classmethod
    def of(cls, plan: Plan, max_runs: int = MAX_RUNS) -> Shrinker | None:
        """For a plan that fails: what fails like it is what its first violation's checker finds.

        None if it passes.  Its own run is not counted.
        """
        violations = run(plan).violations
        if not violations:
            return None
        wanted = checker_of(violations[0])
        return cls(lambda p: any(checker_of(v) == wanted for v in run(p).violations), max_runs)

    def shrink(self, plan: Plan) -> Plan:
        plan = self._fewer_asks(self._fewer_faults(plan))
        plan = self._fewer_asks(self._fewer_faults(plan))
        return self._plainer_times(self._simpler_asks(plan))

    def _try(self, plan: Plan) -> bool:
        if self.runs >= self._max_runs:
            return False
        self.runs += 1
        return self._fails(plan)

    def _first_that_fails(self, plans: Iterator[Plan]) -> Plan | None:
        return next(filter(self._try, plans), None)

    def _fewer_asks(self, plan: Plan) -> Plan:
        size = max(1, len(plan.asks) // 2)
        while size >= 1 and self.runs < self._max_runs:
            start, shrunk = 0, False
            while start < len(plan.asks) and len(plan.asks) > size:
                left = plan.asks[:start] + plan.asks[start + size :]
                fewer = self._first_that_fails(_with_earlier_points(replace(plan, asks=left)))
                if fewer is None:
                    start += size
                else:
                    plan, shrunk = fewer, True
            if not shrunk or size > len(plan.asks) // 2:
                size //= 2
        return plan

    def _fewer_faults(self, plan: Plan) -> Plan:
        for fault in plan.faults:
            others = tuple(f for f in plan.faults if f is not fault)
            plan = self._first_that_fails(iter((replace(plan, faults=others),))) or plan
        return plan

    def _simpler_asks(self, plan: Plan) -> Plan:
        for index, ask in enumerate(plan.asks):
            for simpler in _simpler(ask):
                asks = (*plan.asks[:index], simpler, *plan.asks[index + 1 :])
                plan = self._first_that_fails(iter((replace(plan, asks=asks),))) or plan
                if plan.asks[index] is simpler:
                    break
        return plan

    def _plainer_times(self, plan: Plan) -> Plan:
        """Requests at once, faults at round times and not longer than they must be."""
        if plan.asks:
            first_s = min(ask.at_s for ask in plan.asks)
            at_once = tuple(replace(ask, at_s=first_s) for ask in plan.asks)
            if at_once != plan.asks:
                plan = self._first_that_fails(iter((replace(plan, asks=at_once),))) or plan
        for index, fault in enumerate(plan.faults):
            for plainer in _plainer(fault):
                faults = (*plan.faults[:index], plainer, *plan.faults[index + 1 :])
                plan = self._first_that_fails(iter((replace(plan, faults=faults),))) or plan
                if plan.faults[index] is plainer:
                    break
        return plan


def _with_earlier_points(plan: Plan) -> Iterator[Plan]:
    """The plan, and with its point faults at earlier occurrences, the nearest first."""
    yield plan
    for nth in range(max((f.nth for f in plan.faults if f.point), default=1) - 1, 0, -1):
        yield replace(plan, faults=tuple(replace(f, nth=min(f.nth, nth)) for f in plan.faults))


def _simpler(ask: Ask) -> Iterator[Ask]:
    if ask.pictures:
        yield replace(ask, pictures=())
    if len(ask.pictures) > 1:
        yield replace(ask, pictures=ask.pictures[:1])
    if ask.max_tokens > 1:
        yield replace(ask, max_tokens=1)


def _plainer(fault: Fault) -> Iterator[Fault]:
    if fault.at_s and not fault.point:
        yield replace(fault, at_s=round(fault.at_s, 1))
        yield replace(fault, at_s=round(fault.at_s, 2))
    if fault.duration_s > 0.1:
        yield replace(fault, duration_s=fault.duration_s / 2)
