"""Invariant 1: one terminal answer per request, before its deadline plus grace; no silent drop.

A request that fails, though the drill gives no reason for which it may, is a violation as well:
"may fail: anything" is not accepted.  Who has enough is computed no further: where nothing goes
wrong, its instances say so at once.
"""

from __future__ import annotations

from epd.fsm import generation
from epd.fsm.kernel import Event, Machine, State
from epd.sim.checkers.base import Checker, Context
from epd.sim.client import Record
from epd.sim.process import SimProcess

GRACE_S = 1.0


class Answers(Checker):
    name = "answers"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if context.undisturbed:
            context.world.watch(self._watch, generation.AbortTimedOut)

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if source is generation.S.STOPPING:
            self.violate(f"no instance said that it has stopped {machine.key}, which has enough")

    def at_end(self) -> None:
        for record in self.context.clients.records:
            self._check(record)

    def _check(self, record: Record) -> None:
        who = f"request {record.ask.index} ({record.request_id})"
        if not record.ended:
            self.violate(f"{who} got no answer at all")
            return
        if record.num_answers != 1:
            self.violate(f"{who} got {record.num_answers} terminal answers")
        limit_s = self.context.limits_of(record).total_s + GRACE_S
        took_s = record.ended_s - record.asked_s
        if took_s > limit_s:
            self.violate(f"{who} took {took_s:.2f} s, its deadline is {limit_s:.2f} s")
        if record.finish_reason or record.hung_up or record.has_enough:
            return
        if not self.context.may_fail(record):
            self.violate(f"{who} failed, and this drill gives no reason: {record.outcome()}")
