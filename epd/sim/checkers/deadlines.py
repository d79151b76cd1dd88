"""Invariant 1, at the stages: a request has one absolute deadline, the same in all its attempts.

A stage that is told a later one holds memory for a client that has its error already, which only
the gateway's own words would end, and these may be lost.
"""

from __future__ import annotations

from epd.fsm import request
from epd.fsm.kernel import Event, Machine, State
from epd.sim.checkers.base import Checker, Context
from epd.sim.process import SimProcess

SKEW_S = 1.0  # a gateway's clock may be set meanwhile


class Deadlines(Checker):
    name = "deadlines"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._told_s: dict[str, float] = {}
        opened = (request.TextOnly, request.EmbeddingsRequired, request.KvOffered)
        context.world.watch(self._watch, *opened)

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if isinstance(machine, request.Request):
            first_s = self._told_s.setdefault(machine.request_id, machine.deadline_s)
            if abs(machine.deadline_s - first_s) > SKEW_S:
                self.violate(
                    f"{process.name} is told a deadline for {machine.key} that is "
                    f"{machine.deadline_s - first_s:.3f} s from the first one"
                )
