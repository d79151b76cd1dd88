"""A stream's silence is noticed by its cause, not by the clock of the last resort.

`stall_timeout_s` is for devices that hang.  Where a process died, stood still, or a message was
lost, another process notices; a client that waited half a minute for the clock waited for nothing.
"""

from __future__ import annotations

from epd.fsm import generation
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Silence(Checker):
    name = "silence"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if not context.devices_hang:
            context.world.watch(self._watch, generation.AttemptTimedOut)

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, generation.Generation) or source is target:
            return
        if machine.accepted or machine.token_ids_of_attempt:
            self.violate(f"{machine.key} was silent until the last clock noticed")
