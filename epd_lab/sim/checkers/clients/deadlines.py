"""Invariant 1, in time: clients' waits are bounded, and deadlines of stages agree with the bounds.

A request has one absolute deadline, the same in all its attempts.  A stage with a later one holds
memory for a client that has its answer already, which only the gateway's own messages would end,
and these may be lost.

A client waits for the first token, for each further one and for the whole no longer than its three
limits.  An answer is cut, or fails by a deadline, only when one of them has passed.

No instance becomes a member with a wall clock beyond the bound.
"""

from __future__ import annotations

from epd.fsm import membership, request
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.client import Record
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.core.process import SimProcess

SKEW_S = 1.0  # a gateway's clock may be set meanwhile
GRACE_S = 1.0


class Deadlines(Checker):
    name = "deadlines"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._told_s: dict[str, float] = {}
        opened = (request.TextOnly, request.EmbeddingsRequired, request.KvOffered)
        context.world.watch(self._watch, *opened)
        context.world.watch(self._watch_welcome, membership.Welcomed)

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

    def _watch_welcome(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        most_s = self.context.cluster.settings.timing.max_clock_skew_s
        if source is not membership.S.JOINING or not most_s:
            return
        skew_s = process.wall_skew_s - self.world.processes[GATEWAY].wall_skew_s
        if abs(skew_s) > most_s + SKEW_S:
            self.violate(f"{process.name} is welcome with a clock {skew_s:.0f} s off")

    def at_end(self) -> None:
        for record in self.context.clients.records:
            if record.ended and not (record.hung_up or record.refused or record.gateway_died):
                self._check(record)

    def _check(self, record: Record) -> None:
        who = f"request {record.ask.index} ({record.request_id})"
        limits = self.context.limits_of(record)
        took_s = record.ended_s - record.asked_s
        first_s = (record.first_s or record.ended_s) - record.asked_s
        gap_s = max(record.gap_s, record.ended_s - record.last_s) if record.tokens else 0.0
        if first_s > limits.first_token_s + GRACE_S:
            self.violate(f"{who} waited {first_s:.2f} s for its first token")
        if gap_s > limits.token_s + GRACE_S:
            self.violate(f"{who} waited {gap_s:.2f} s for a further token")
        is_over = took_s > limits.total_s - SKEW_S
        is_whole = len(record.tokens) == len(record.ask.answer())
        if record.finish_reason == "length" and not (is_over or is_whole):
            self.violate(f"{who} was cut after {took_s:.2f} s")
        waited = first_s > limits.first_token_s - SKEW_S or gap_s > limits.token_s - SKEW_S
        if record.error is not None and record.error.kind == "deadline":
            if not (is_over or waited):
                self.violate(f"{who} failed by a deadline after {took_s:.2f} s")
            if is_over and not waited and record.tokens:
                self.violate(f"{who} was paid for and failed at the end of its time")
