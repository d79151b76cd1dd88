"""Invariant 5: one encode per hash and encoder at a time."""

from __future__ import annotations

from collections import Counter

from epd.fsm import encoding
from epd.fsm.kernel import Event, Machine, State
from epd.sim.checkers.base import Checker, Context
from epd.sim.process import SimProcess


class SingleFlight(Checker):
    name = "single flight"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._at_work: Counter[tuple[str, str]] = Counter()
        context.world.watchers.append(self._watch)

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, encoding.Encoding) or source is target:
            return
        key = (process.name, machine.key)
        if source is encoding.S.ABSENT:
            self._at_work[key] += 1
            if self._at_work[key] > 1:
                self.violate(f"{process.name} encodes {machine.key[:8]} twice at a time (F37)")
        if machine.terminal:
            self._at_work[key] -= 1
