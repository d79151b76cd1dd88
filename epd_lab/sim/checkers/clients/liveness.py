"""Invariant 7: when faults have stopped and a core has healed, new requests are served at once."""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Record

SERVED_WITHIN_S = 3.0


class Liveness(Checker):
    name = "liveness"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.probes: list[Record] = []

    def at_end(self) -> None:
        for record in self.probes:
            took_s = record.ended_s - record.asked_s
            if not record.finish_reason:
                self.violate(f"after healing, a request ended with: {record.outcome()}")
            elif took_s > SERVED_WITHIN_S:
                self.violate(f"after healing, a request took {took_s:.2f} s")
