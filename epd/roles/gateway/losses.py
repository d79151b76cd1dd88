"""What the end of an instance means for the generations of a gateway.

Attempts that need it have failed, and go on elsewhere. An input that it had at hand (`hands.py`)
has one death more against it. Two deaths make a poison: a request with that input, now or later,
fails at once (`scheduling/deaths.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Never, Protocol

from epd.failure import Failure, FailureKind
from epd.fsm.generation import Generation, PoisonFound
from epd.fsm.instance import Instance
from epd.messages import Address, AtHand
from epd.records import HandsList
from epd.roles.base import Actor, Component, receives
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.elsewhere import Elsewhere
from epd.roles.gateway.registry import Registry
from epd.roles.gateway.suspects import named
from epd.scheduling.deaths import Silence
from epd.transport.base import Received


class Generations(Protocol):
    """Whose attempts they are."""

    def open_ones(self) -> list[Generation]: ...

    def attempt_failed(self, machine: Generation, blamed: set[str], failure: Failure) -> None: ...

    def post(self, machine: Generation, event: PoisonFound) -> None: ...


class Losses(Component[Never]):
    """Reads what instances have at hand, and counts what they died of."""

    def __init__(
        self,
        actor: Actor,
        owner: Generations,
        registry: Registry,
        dispatcher: Dispatcher,
        elsewhere: Elsewhere,
    ) -> None:
        super().__init__(actor)
        self._owner = owner
        self._registry = registry
        self._elsewhere = elsewhere
        self._suspects = dispatcher.suspects
        self._deaths = dispatcher.suspects.deaths
        registry.heartbeat_listeners += (self._heartbeat_of,)
        registry.on_lost = self._instance_gone
        registry.on_heard = self._heard_again

    @receives(AtHand)
    def on_at_hand(self, received: Received) -> None:
        message: AtHand = received.message
        life = (received.source, received.epoch)
        if self._registry.is_present(*life):
            self._deaths.hold(life, message.hands)

    def _heartbeat_of(self, instance: Instance) -> None:
        """Each brings the list: nothing else reports what left it."""
        address = instance.info.address
        self._deaths.hold((address.instance_id, address.epoch), instance.load.hands)

    def answered(self, machine: Generation) -> None:
        """To its end: nothing of it is deadly."""
        if self._deaths:
            self._deaths.acquit(self._suspects.content(machine))

    def _heard_again(self, address: Address) -> None:
        self._deaths.forgive((address.instance_id, address.epoch))

    def _instance_gone(self, instance: Instance, fell_silent: bool) -> None:
        gone = instance.info.address
        at_hand = self._deaths.end((gone.instance_id, gone.epoch))
        if instance.was_lost:
            silence = Silence(instance.info.host_id, instance.seen_s)
            self._count(gone, at_hand, silence if fell_silent else None)
        self._fail_attempts(gone)

    def _count(self, gone: Address, at_hand: HandsList, silence: Silence | None) -> None:
        life = (gone.instance_id, gone.epoch)
        asked = {one.key: one for one in self._owner.open_ones() if one.asked is not None}
        held = [asked[key] for key in at_hand.requests if key in asked]
        contents = [self._suspects.content(one) for one in held if not _has_yielded(gone, one)]
        poison = self._deaths.count(life, (*at_hand.images, *contents), silence)
        for key, lives in poison.items():
            self.actor.counters["poison_inputs"] += 1
            told = named(lives)
            self.actor.log.warning("instances died of one input", input=key, instances=told)
        for machine in asked.values() if poison else ():
            failure = self._suspects.poison_of(machine)
            if failure is not None and not machine.token_ids_of_attempt:
                self._owner.post(machine, PoisonFound(failure))

    def _fail_attempts(self, gone: Address) -> None:
        """Those that still need it; prefill reports the rows that a lost encoder owes it."""
        failure = Failure(FailureKind.LOST, f"instance {gone.instance_id} was lost")
        for machine in needing(self._owner.open_ones(), gone):
            self._owner.attempt_failed(machine, {gone.instance_id}, failure)
        self._elsewhere.encoder_lost(gone, failure)


def needing(opened: Iterable[Generation], instance: Address) -> list[Generation]:
    """Those whose latest attempt cannot go on without it."""
    return [
        one
        for one in opened
        if one.placed is not None and one.prompt.stage != "encode"
        if instance in (one.placed.prefill, one.placed.decode) and not _has_served(instance, one)
    ]


def _has_yielded(gone: Address, machine: Generation) -> bool:
    """Whether a token of the attempt was computed there."""
    placement = machine.placed
    if placement is None or gone not in (placement.prefill, placement.decode):
        return False
    num_of_prefill = int(gone == placement.decode != placement.prefill)
    return machine.token_ids_of_attempt > num_of_prefill


def _has_served(gone: Address, machine: Generation) -> bool:
    """Whether a token shows that the attempt needs it no more: it was prefill alone."""
    placement = machine.placed
    is_decode = placement is not None and gone == placement.decode
    return not is_decode and _has_yielded(gone, machine)
