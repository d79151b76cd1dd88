"""Drains of instances, also for other roles: asked for here; at the bound what is open moves.

Theory of operation
-------------------
A drain is one event of the instance (MEMBERSHIP), whether a signal or a message asks for it.  Its
heartbeats have the time that is left.  When there is none, its attempts move, a few at a time,
while it goes on with the rest.  What decodes there is handed over with its KV, as by prefill, if
the chosen instance can take it.  All else is recalled and placed anew, with the tokens so far, and
so is what could not be handed over.  So a target computes few prompts at once, and a stream stands
still for its own alone.  An attempt that no other instance can take stays where it is, until the
instance leaves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from epd.frontend import Refused
from epd.fsm.generation import AttemptMoved, AttemptRecalled, Do, Generation
from epd.fsm.instance import Instance
from epd.fsm.kernel import Event
from epd.messages import Address, DrainRequest, MoveRequest
from epd.roles.base import Actor, Component, performs
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.losses import needing
from epd.roles.gateway.registry import Registry
from epd.scheduling import pairing
from epd.scheduling.backlog import Attempt
from epd.scheduling.placement import Placement, lacking

MAX_MOVING = 16  # generations without a token yet where they are now


class Generations(Protocol):
    """Whose attempts they are."""

    def open_ones(self) -> list[Generation]: ...

    def post(self, machine: Generation, event: AttemptRecalled | AttemptMoved) -> None: ...


class Drains(Component[Generation]):
    """The gateway's side."""

    def __init__(
        self, actor: Actor, owner: Generations, registry: Registry, dispatcher: Dispatcher
    ) -> None:
        super().__init__(actor)
        self._owner = owner
        self._registry = registry
        self._dispatcher = dispatcher
        registry.on_overdue = dispatcher.on_began = self.move

    def ask(
        self,
        name: str,
        within_s: float,
        *,
        forced: bool,
        restarts: bool,
        roles: tuple[str, ...] = (),
    ) -> None:
        """Have an instance drain and leave, or return with these roles.  Raises Refused."""
        found = {one.info.address.instance_id: one for one in self._registry.instances}
        instance = found.get(name)
        if instance is None or not instance.present:
            members = ", ".join(known for known, one in found.items() if one.present)
            raise Refused(404, f"no instance {name} is a member; there are {members or 'none'}")
        if instance.is_draining:
            left = f"what is open moves in {instance.drain_left_s:.0f} s"
            raise Refused(409, f"{name} drains already; {left}")
        if set(roles) == set(instance.info.roles):
            raise Refused(409, f"{name} has these roles already")
        if roles and instance.info.other_ranks:
            raise Refused(409, f"{name} is a group of ranks; start it anew with other roles")
        if not forced and (reason := self._lacking_without(instance)):
            alone = f"without {name} {reason}, and requests would wait; start another one first"
            raise Refused(409, f"{alone}, or force it")
        message = DrainRequest(within_s=within_s, restarts=restarts, roles=roles)
        if not self.actor.send(instance.info.address, message):
            raise Refused(503, f"{name} takes no messages; try again later")
        self.actor.log.info("drain", instance=name, within_s=within_s, roles=roles)

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
                if machine.former:
                    self.hand_over(machine)  # its first message may be lost
                elif num_free > 0 and machine.has_attempt and not machine.resumes:
                    num_free -= self._moves(machine, instance)

    def _moves(self, machine: Generation, instance: Instance) -> bool:
        """Whether another instance can take it; from its KV, if that can go there."""
        chosen = self._dispatcher.choose(machine)
        if not isinstance(chosen, Placement):
            return False
        if machine.token_ids_of_attempt and self._reaches(instance, chosen.decode):
            at = replace(machine.placement, prefill=instance.info.address, decode=chosen.decode)
            self._owner.post(machine, AttemptMoved(at))
            self.actor.counters["attempts_moved"] += 1
        else:
            self._owner.post(machine, AttemptRecalled())
            self.actor.counters["attempts_recalled"] += 1
        return True

    def _reaches(self, instance: Instance, decode: Address) -> bool:
        """Whether KV of one that decodes here is of use there, and has a way."""
        own = instance.info
        other = next(i.info for i in self._registry.takers() if i.info.address == decode)
        layouts = [info.kv_layout.whole for info in (own, other) if info.kv_layout is not None]
        has_way = len(layouts) == 2 and bool(pairing.choose(own, other))
        return has_way and layouts[0] == layouts[-1]

    @performs(Do.HAND_OVER)
    def hand_over(self, machine: Generation, event: Event | None = None) -> None:
        """Have the present attempt inherit what its prefill instance decodes (idempotent)."""
        prefill, decode = machine.placement.prefill, machine.placement.decode
        names = tuple(sorted((prefill.instance_id, decode.instance_id)))
        self._dispatcher.books.sent(machine.key, Attempt("", decode.instance_id, 0, {}, (), names))
        message = MoveRequest(
            request_id=machine.key,
            attempt=machine.attempt,
            former=machine.former,
            decode=decode,
            first_token_deadline_s=self._dispatcher.due_s(machine)[1],
        )
        self.actor.send(prefill, message)
