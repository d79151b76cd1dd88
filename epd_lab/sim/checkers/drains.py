"""Who drains leaves nothing open that another instance could have taken.

Looked at when the time for moves is over.  A gateway that has not had its heartbeats, or that waits
for the first tokens of other moves, is excused."""

from __future__ import annotations

from epd.fsm import membership
from epd.fsm.kernel import Event, Machine, State
from epd.roles.gateway.losses import needing
from epd.scheduling.placement import Placement
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Drains(Checker):
    name = "drains"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.world.watch(self._leaves, membership.MoveTimedOut)

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
                waits = any(generation.resumes for generation in opened)
                for generation in () if waits else left:
                    if isinstance(gateway.dispatcher.choose(generation), Placement):
                        self.violate(f"{machine.key} leaves {generation.key}, which could move")
