"""What an instance does for a gateway that is gone is given back while another gateway speaks.

Looked at once after each death of a gateway, when the bound of silence has passed.  By then another
gateway must have acknowledged a heartbeat, and work under way has had time to end.
"""

from __future__ import annotations

from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Gateways(Checker):
    name = "gateways"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if len(context.cluster.gateways) > 1:
            context.world.on_death.append(self._died)

    def _died(self, process: SimProcess) -> None:
        if process.instance_id in self.context.cluster.gateways:
            timing, loop = self.context.cluster.settings.timing, self.world.loop
            late_s = 1.5 * timing.lost_after_s + timing.abort_timeout_s
            loop.call_outside(loop.now_s + late_s, self._look, process, loop.now_s)

    def _look(self, gateway: SimProcess, died_s: float) -> None:
        gone = gateway.instance_id, gateway.epoch
        for node in self.context.cluster.living():
            if node.process.stalled or node.process.resumed_s > died_s:  # it had no such time
                continue
            instance = node.instance
            if instance is None or not any(p.machine.is_heard for p in instance.member.places):
                continue
            for request in instance.requests or ():
                its = request.gateway
                if (its.instance_id, its.epoch) == gone and not request.ended_for_client:
                    self.violate(f"{node.process.name} works on {request.key} of {gateway.name}")
            for room, asker in instance.encode._askers._askers.items() if instance.encode else ():
                if asker.keeps and (asker.gateway.instance_id, asker.gateway.epoch) == gone:
                    self.violate(f"{node.process.name} keeps {room} of {gateway.name}")
