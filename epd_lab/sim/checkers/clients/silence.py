"""A stream's silence is noticed by its cause, not by the clock of the last resort.

`stall_timeout_s` is for devices that hang.  Where a process died, stood still, or a message was
lost, another process notices; a client that waited half a minute for the clock waited for nothing.

A bus that loses single messages may lose all that could notice: for each question to the instance
that has the request, the question or an answer.  Then the clock is what the design has.
"""

from __future__ import annotations

from collections import defaultdict

from epd.fsm import generation
from epd.fsm.kernel import Event, Machine, State
from epd.messages import Message, RequestInquiry, Tokens
from epd_lab.sim.checkers.base import Checker, Context
from epd_lab.sim.core.process import SimProcess


class Silence(Checker):
    name = "silence"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._asked_s: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        """By request and instance: when the gateway asked."""
        self._lost_s: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        """And when a message between the two was lost."""
        if not context.devices_hang:
            context.world.watch(self._watch, generation.AttemptTimedOut)
            if context.bus_loses:
                context.world.network.on_message.append(self._sent)
                context.world.network.on_loss.append(self._lost)

    def _sent(self, source: str, target: str, message: Message) -> None:
        if isinstance(message, RequestInquiry):
            self._asked_s[message.request_id, target].append(self.world.loop.now_s)

    def _lost(self, source: str, target: str, message: Message) -> None:
        told = message.chunks if isinstance(message, Tokens) else (message,)
        for request_id in {getattr(one, "request_id", "") for one in told}:
            for instance_id in (source, target):
                self._lost_s[request_id, instance_id].append(self.world.loop.now_s)

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        if not isinstance(machine, generation.Generation) or source is target:
            return
        if machine.accepted or machine.token_ids_of_attempt:
            instances = machine.placement.instances()
            if not any(self._were_all_lost(machine.key, key) for key in instances):
                self.violate(f"{machine.key} was silent until the last clock noticed")

    def _were_all_lost(self, request_id: str, instance_id: str) -> bool:
        """Whether the bus lost as many messages between the two as there were questions."""
        now_s = self.world.loop.now_s
        since_s = now_s - self.context.cluster.settings.timing.stall_timeout_s
        key = request_id, instance_id
        asked, lost = (
            sum(since_s < at_s < now_s for at_s in times_s[key])
            for times_s in (self._asked_s, self._lost_s)
        )
        return 0 < asked <= lost
