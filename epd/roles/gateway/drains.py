"""Drains of instances: an operator asks for one here, and at its bound what is open moves.

Theory of operation
-------------------
A drain is one event of the instance (MEMBERSHIP), whether a signal or a message asks for it.  Its
heartbeats have the time that is left.  When there is none, its attempts are recalled, a few at a
time, while it goes on with the rest.  Each generation is placed anew, with the tokens so far.  So a
target computes few prompts at once, and a stream stands still for its own alone.  An attempt that
no other instance can take stays where it is, until the instance leaves.
"""

from __future__ import annotations

from typing import Protocol

from epd.frontend import Refused
from epd.fsm.generation import AttemptRecalled, Generation
from epd.fsm.instance import Instance
from epd.messages import DrainRequest
from epd.roles.base import Actor
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.losses import needing
from epd.roles.gateway.registry import Registry
from epd.scheduling.placement import Placement, lacking

MAX_MOVING = 16  # generations without a token yet where they are now


class Generations(Protocol):
    """Whose attempts they are."""

    def open_ones(self) -> list[Generation]: ...

    def post(self, machine: Generation, event: AttemptRecalled) -> None: ...


class Drains:
    """The gateway's side."""

    def __init__(
        self, actor: Actor, owner: Generations, registry: Registry, dispatcher: Dispatcher
    ) -> None:
        self._actor = actor
        self._owner = owner
        self._registry = registry
        self._dispatcher = dispatcher
        registry.on_overdue = dispatcher.on_began = self.move

    def ask(self, name: str, within_s: float, *, forced: bool, restarts: bool) -> None:
        """Have an instance drain and leave.  Raises Refused."""
        found = {one.info.address.instance_id: one for one in self._registry.instances}
        instance = found.get(name)
        if instance is None or not instance.present:
            members = ", ".join(known for known, one in found.items() if one.present)
            raise Refused(404, f"no instance {name} is a member; there are {members or 'none'}")
        if instance.is_draining:
            left = f"what is open moves in {instance.drain_left_s:.0f} s"
            raise Refused(409, f"{name} drains already; {left}")
        if not forced and (reason := self._lacking_without(instance)):
            alone = f"without {name} {reason}, and requests would wait; start another one first"
            raise Refused(409, f"{alone}, or force it")
        message = DrainRequest(within_s=within_s, restarts=restarts)
        if not self._actor.send(instance.info.address, message):
            raise Refused(503, f"{name} takes no messages; try again later")
        self._actor.log.info("drain", instance=name, within_s=within_s)

    def _lacking_without(self, instance: Instance) -> str:
        """What only this one of those that take work can do."""
        infos = [one.info for one in self._registry.takers()]
        rest = [info for info in infos if info is not instance.info]
        sees = any(info.row_contract is not None for info in infos)
        missing = lacking(rest, with_images=sees, finds=True)
        return "" if lacking(infos, with_images=sees, finds=True) else missing

    def move(self) -> None:
        """Recall attempts of instances that drain too long, as many as may move at once."""
        overdue = [one for one in self._registry.instances if one.is_overdue]
        if not overdue:
            return
        opened = self._owner.open_ones()
        num_free = MAX_MOVING - sum(machine.resumes for machine in opened)
        for instance in overdue:
            for machine in needing(opened, instance.info.address):
                if num_free <= 0:
                    return
                has_attempt = machine.has_attempt and not machine.resumes
                if has_attempt and isinstance(self._dispatcher.choose(machine), Placement):
                    self._owner.post(machine, AttemptRecalled())
                    self._actor.counters["attempts_recalled"] += 1
                    num_free -= 1
