"""Invariant 1: one terminal answer per request, before its deadline plus grace; no silent drop.

A request that fails for no reason that the drill gives is a violation as well: "may fail: anything"
is not accepted, nor "it is too large" of what fits.  A client that has enough is computed for no
further: without faults, its instances confirm at once.
"""

from __future__ import annotations

from epd.fsm import generation
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Record
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.engine.golden import ROW_NBYTES
from epd_lab.sim.engine.hash_states import layout_of
from epd_lab.sim.workload import Ask

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
        if record.error is not None and record.error.kind == "capacity" and self._fits(record.ask):
            self.violate(f"{who} is refused as too large, and fits: {record.outcome()}")
        if not self.context.may_fail(record):
            self.violate(f"{who} failed, and this drill gives no reason: {record.outcome()}")

    def _fits(self, ask: Ask) -> bool:
        """Whether an instance of its own would have room for all that it may need."""
        settings, (token_ids, placed) = self.context.cluster.settings, ask.placed()
        slot_rows = settings.prefill.slot_nbytes // ROW_NBYTES
        num_slots = sum(-(-image.num_rows // slot_rows) for _, image in placed)
        layout = layout_of(0, 1, has_state=settings.has_state, window=settings.window)
        num_blocks = layout.num_state_blocks + layout.rows.count(len(token_ids) + ask.max_tokens)
        has_slots = num_slots <= settings.prefill.pool_nbytes // settings.prefill.slot_nbytes
        return num_blocks <= settings.num_blocks and has_slots
