"""Invariant 5: one encode per hash and encoder at a time; where nothing goes wrong, per cluster.

Of an image that is late two encoders make the rows.
"""

from __future__ import annotations

from collections import Counter

from epd.fsm import encoding, generation
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess

_MAKING = (encoding.S.QUEUED, encoding.S.PREPARED, encoding.S.ENCODING)


class SingleFlight(Checker):
    name = "single flight"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._at_work: Counter[tuple[str, str]] = Counter()
        self._wanted: dict[str, dict[str, None]] = {}  # by hash: processes that make it for a room
        self._hedged: set[str] = set()  # hashes
        context.world.watch(self._hedge, generation.ImageHedged)
        context.world.watch(self._watch, *encoding.Encoding.table.events)

    def _hedge(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if isinstance(machine, generation.Generation) and isinstance(event, generation.ImageHedged):
            self._hedged.add(machine.prompt.items[event.index].mm_hash)

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
        if self.context.undisturbed:
            self._count_makers(process.name, machine, target)

    def _count_makers(self, name: str, machine: encoding.Encoding, target: State) -> None:
        """No two encoders make the same rows for somebody at the same time."""
        makers = self._wanted.setdefault(machine.key, {})
        if target not in _MAKING:
            makers.pop(name, None)
            return
        makers[name] = None
        if len(makers) > 1 and machine.key not in self._hedged:
            self.violate(f"{machine.key[:8]} is made at the same time by {', '.join(makers)} (F37)")
