"""The shortest plan that still fails: fewer requests, fewer faults, simpler asks.

Draws are keyed by what they are for (`epd.sim.rand`) and times are absolute, so taking one part of
a plan away leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from epd.sim.run import Plan

MAX_RUNS = 100


class Shrinker:
    """Delta debugging over asks, then faults, then the asks' own parts, within a budget of runs."""

    def __init__(self, fails: Callable[[Plan], bool], max_runs: int = MAX_RUNS) -> None:
        self._fails = fails
        self.runs_left = max_runs

    def shrink(self, plan: Plan) -> Plan:
        plan = self._fewer_asks(plan)
        plan = self._fewer_faults(plan)
        plan = self._fewer_asks(plan)
        return self._simpler_asks(plan)

    def _try(self, plan: Plan) -> bool:
        if self.runs_left <= 0:
            return False
        self.runs_left -= 1
        return self._fails(plan)

    def _fewer_asks(self, plan: Plan) -> Plan:
        size = max(1, len(plan.asks) // 2)
        while size >= 1 and self.runs_left:
            start, shrunk = 0, False
            while start < len(plan.asks) and len(plan.asks) > 1:
                fewer = replace(plan, asks=plan.asks[:start] + plan.asks[start + size :])
                if fewer.asks and self._try(fewer):
                    plan, shrunk = fewer, True
                else:
                    start += size
            if not shrunk:
                size //= 2
        return plan

    def _fewer_faults(self, plan: Plan) -> Plan:
        for fault in plan.faults:
            fewer = replace(plan, faults=tuple(f for f in plan.faults if f is not fault))
            if self._try(fewer):
                plan = fewer
        return plan

    def _simpler_asks(self, plan: Plan) -> Plan:
        for index, ask in enumerate(plan.asks):
            for simpler in (
                replace(ask, pictures=()),
                replace(ask, pictures=ask.pictures[:1]),
                replace(ask, max_tokens=1),
            ):
                if simpler == plan.asks[index]:
                    continue
                asks = (*plan.asks[:index], simpler, *plan.asks[index + 1 :])
                if self._try(replace(plan, asks=asks)):
                    plan = replace(plan, asks=asks)
        return plan
