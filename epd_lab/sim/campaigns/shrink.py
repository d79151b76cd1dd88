"""The shortest plan that still fails: fewer requests, fewer faults, simpler asks, plainer times.

Draws are keyed by their use (`epd_lab.sim.core.rand`) and times are absolute, so a part of a plan
can go and leave the others as they were.  Two things do not.  A fault at the nth occurrence of a
protocol point needs n occurrences; so each omission is also tried with these faults moved to an
earlier one.  A bug of memory that runs out needs as many requests as fill it; so where many are
left, memory is made scarcer.  A disk with many rare faults gets one certain fault (`_scarcer`).

A shorter plan must fail with the same first violation; a request that alone needs more memory than
was left does not count.

Halves first (delta debugging), within a budget of runs; every step keeps the failure, so stopping
early gives a longer plan, never a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from epd_lab.sim.cluster import Settings
from epd_lab.sim.faults import Fault
from epd_lab.sim.planes.storage import DiskConditions
from epd_lab.sim.run import Plan, run
from epd_lab.sim.wishes import SEEDED
from epd_lab.sim.workload import Ask

MAX_RUNS = 100
FEW_ASKS = 3
"""So few say enough; with more the plan's memory is made scarcer."""


def checker_of(violation: str) -> str:
    """`integrity` of `1.2 s: [integrity] ...`: what a shorter plan has to break as well."""
    return violation.partition("[")[2].partition("]")[0]


def _too_scarce(violations: Sequence[str]) -> bool:
    """Whether a request ended because there is less memory than it alone needs."""
    return any("gives no reason: capacity" in text for text in violations)


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
        wanted, was_scarce = checker_of(violations[0]), _too_scarce(violations)

        def fails_alike(shorter: Plan) -> bool:
            found = run(shorter).violations
            alike = wanted in map(checker_of, found)
            return alike and (was_scarce or not _too_scarce(found))

        return cls(fails_alike, max_runs)

    def shrink(self, plan: Plan) -> Plan:
        plan = self._fewer_faults(plan)
        plan = self._fewer_asks(plan, finest=1 if plan.faults else FEW_ASKS)
        for _ in range(2):
            if len(plan.asks) > FEW_ASKS:
                plan = self._scarcer(self._at_once(self._worse(plan)))
            plan = self._fewer_asks(self._fewer_faults(plan))
        return self._plainer_times(self._at_once(self._simpler_asks(plan)))

    def _try(self, plan: Plan) -> bool:
        if self.runs >= self._max_runs:
            return False
        self.runs += 1
        return self._fails(plan)

    def _first_that_fails(self, plans: Iterator[Plan]) -> Plan | None:
        return next(filter(self._try, plans), None)

    def _fewer_asks(self, plan: Plan, finest: int = 1) -> Plan:
        size = max(1, len(plan.asks) // 2)
        while size >= finest and self.runs < self._max_runs:
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

    def _scarcer(self, plan: Plan) -> Plan:
        """Half of everything, then half of each thing, as often as it can be."""
        for less in (_less_of_everything, *SCARCER):
            while (settings := less(plan.settings)) is not None:
                found = self._first_that_fails(iter((replace(plan, settings=settings),)))
                if found is None:
                    break
                plan = found
        return plan

    def _worse(self, plan: Plan) -> Plan:
        return self._first_that_fails(_always_bad(plan)) or plan

    def _simpler_asks(self, plan: Plan) -> Plan:
        for index, ask in enumerate(plan.asks):
            for simpler in _simpler(ask):
                asks = (*plan.asks[:index], simpler, *plan.asks[index + 1 :])
                plan = self._first_that_fails(iter((replace(plan, asks=asks),))) or plan
                if plan.asks[index] is simpler:
                    break
        return plan

    def _at_once(self, plan: Plan) -> Plan:
        first_s = min((ask.at_s for ask in plan.asks), default=0.0)
        asks = tuple(replace(ask, at_s=first_s) for ask in plan.asks)
        if asks == plan.asks:
            return plan
        return self._first_that_fails(iter((replace(plan, asks=asks),))) or plan

    def _plainer_times(self, plan: Plan) -> Plan:
        """Faults at round times and not longer than they must be."""
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
    last = max((f.nth for f in plan.faults if f.point), default=1)
    for nth in sorted({last - 1, last // 2, 1} - {last, 0}, reverse=True):
        yield replace(plan, faults=tuple(replace(f, nth=min(f.nth, nth)) for f in plan.faults))


# --- settings with half of something; None: there is no less --------------------------------------


def _blocks(settings: Settings) -> Settings | None:
    half = settings.num_blocks // 2
    return replace(settings, num_blocks=half) if half else None


def _slots(settings: Settings) -> Settings | None:
    prefill = settings.prefill
    half = prefill.pool_nbytes // prefill.slot_nbytes // 2
    if not half:
        return None
    less = msgspec.structs.replace(prefill, pool_nbytes=half * prefill.slot_nbytes)
    return replace(settings, prefill=less)


def _of_encode(name: str, settings: Settings) -> Settings | None:
    half = getattr(settings.encode, name) // 2
    if not half:
        return None
    return replace(settings, encode=msgspec.structs.replace(settings.encode, **{name: half}))


def _less_of_everything(settings: Settings) -> Settings | None:
    for less in SCARCER:
        settings = less(settings) or settings
    return settings


SCARCER: tuple[Callable[[Settings], Settings | None], ...] = (
    _blocks,
    _slots,
    partial(_of_encode, "cache_device_nbytes"),
    partial(_of_encode, "cache_host_nbytes"),
    partial(_of_encode, "send_buffer_nbytes"),
)


def _always_bad(plan: Plan) -> Iterator[Plan]:
    """What goes wrong now and then goes wrong always, and nothing else does."""
    for flaw in ("torn", "rotten", "mixed", "lost", "full", "slow"):
        if getattr(plan.settings.disk, flaw):
            disk = DiskConditions(**{flaw: 1.0})
            yield replace(plan, settings=replace(plan.settings, disk=disk))
    if plan.network.duplication:
        yield replace(plan, network=replace(plan.network, duplication=1.0))


# --- plainer parts of a plan ----------------------------------------------------------------------


def _simpler(ask: Ask) -> Iterator[Ask]:
    if ask.images:
        yield replace(ask, images=())
    if len(ask.images) > 1:
        yield replace(ask, images=ask.images[:1])
    if ask.wishes != SEEDED or ask.stop_word:
        yield replace(ask, wishes=SEEDED, stop_word=0)
    if ask.max_tokens > 1:
        yield replace(ask, max_tokens=1)


def _plainer(fault: Fault) -> Iterator[Fault]:
    if fault.at_s and not fault.point:
        yield replace(fault, at_s=round(fault.at_s, 1))
        yield replace(fault, at_s=round(fault.at_s, 2))
    if fault.duration_s > 0.1:
        yield replace(fault, duration_s=fault.duration_s / 2)
