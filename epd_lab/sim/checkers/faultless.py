"""No illegal event, no exception that a guard had to swallow, no unhandled one: each is a bug, even
when the run survives it.  Planted ones test the survival."""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker

OF_ENGINES = ("'step'", "'vision batch'", "'self-test'", "DeviceLost(")


class Faultless(Checker):
    name = "faultless"

    def at_end(self) -> None:
        for node in self.context.cluster.nodes.values():
            for line in node.warnings:
                if " illegal_events " in line or self._is_fault(line):
                    self.violate(line)
            dropped = node.actor.counters["handler_error"]
            if dropped:
                self.violate(f"{node.process.name}: {dropped} handlers failed")
        for line in self.world.loop.escaped:
            self.violate(f"nobody handled: {line}")

    def _is_fault(self, line: str) -> bool:
        if " fault" not in line or "BrokenCall(" in line:  # a call that was told to raise
            return False
        return not (self.context.engine_faults and any(name in line for name in OF_ENGINES))
