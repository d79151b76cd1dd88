"""Who drains leaves nothing open that another instance could have taken.  What moves with its KV is
not computed again, unless an end of the move is lost or has no room.

The first is looked at when the time for moves is over.  A gateway that has not had its heartbeats,
or that waits for the first tokens of other moves, is excused."""

from __future__ import annotations

from typing import Any

from epd.failure import FailureKind
from epd.fsm import generation, membership
from epd.fsm.kernel import Event, Machine, State
from epd.roles.gateway.losses import needing
from epd.scheduling.placement import Placement
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess

FAILS = (generation.AttemptFailed, generation.AttemptTimedOut, generation.TokensMissed)
NO_ROOM = (FailureKind.BUSY, FailureKind.CAPACITY)


class Drains(Checker):
    name = "drains"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.world.watch(self._leaves, membership.MoveTimedOut)
        if context.all_stay and not (context.bus_loses or context.engine_faults):
            context.world.watch(self._fails, *FAILS)

    def _fails(
        self, process: SimProcess, machine: Machine, event: Any, source: State, target: State
    ) -> None:
        if isinstance(machine, generation.Generation) and machine.former and source is not target:
            gave_way = "REQUEST:DECODING>PREEMPTED" in self.world.happened()
            if event.failure.kind not in NO_ROOM and not gave_way:
                self.violate(f"{machine.key} moves, and is computed again: {event}")

    def _leaves(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        cluster = self.context.cluster
        beat_s = cluster.settings.timing.heartbeat_interval_s
        for node in cluster.living():
            gateway = node.gateway
            if gateway is None or source is target:
                continue
            for one in gateway.registry.instances:
                age_s = gateway.actor.clock.now_s() - one.seen_s
                if one.key != machine.key or not one.is_overdue or age_s > 2 * beat_s:
                    continue
                opened = gateway.role.open_ones()
                left = [g for g in needing(opened, one.info.address) if g.has_attempt]
                waits = any(other.resumes for other in opened)
                for other in () if waits else left:
                    if isinstance(gateway.dispatcher.choose(other), Placement):
                        self.violate(f"{machine.key} leaves {other.key}, which could move")
