"""Images that their encoders fail, encoded elsewhere within the same attempt.

A prefill instance reports the image whose rows do not come (`RoomWanted`). The gateway sends that
image to another encoder, and the new room to prefill (`RoomAdded`). Rows that have arrived and KV
that is computed stay. If there is no other encoder, the attempt has failed. The gateway itself
finds the images that an encoder has not taken, and those whose rows go to no prefill instance.

Late rows are asked of another encoder, too, within a budget (`scheduling/hedging.py`).
"""

from __future__ import annotations

from typing import Protocol

from epd.config import Limits, Timing
from epd.failure import Failure, FailureKind
from epd.fsm.generation import Do, Generation, ImageHedged, ImageMoved
from epd.fsm.kernel import Event
from epd.messages import Address, RoomWanted
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.offers import Image
from epd.scheduling.hedging import HedgeBudget
from epd.transport.base import Received


class Generations(Protocol):
    """The owner of the attempts."""

    def current(self, request_id: str, attempt: int) -> Generation | None:
        """The open generation, if that is its present attempt."""

    def at_work(self, request_id: str, attempt: int) -> Generation | None:
        """The same, unless that attempt was given up."""

    def over(self, source: str, request_id: str, attempt: int) -> None:
        """Abort an attempt that is over at the instance that works on it."""

    def attempt_failed(self, machine: Generation, blamed: set[str], failure: Failure) -> None:
        """The present attempt cannot go on."""

    def post(self, machine: Generation, event: Event) -> None: ...


class Elsewhere(Component[Generation]):
    """Performs the effects of GENERATION on one image."""

    def __init__(
        self,
        actor: Actor,
        owner: Generations,
        dispatcher: Dispatcher,
        timing: Timing,
        limits: Limits,
    ) -> None:
        super().__init__(actor)
        self._owner = owner
        self._dispatcher = dispatcher
        self._max_attempts = timing.max_attempts
        self._budget = HedgeBudget(limits.max_hedged_share)

    @receives(RoomWanted)
    def on_room_wanted(self, received: Received) -> None:
        message: RoomWanted = received.message
        machine = self._owner.at_work(message.request_id, message.attempt)
        if machine is None:
            self._owner.over(received.source, message.request_id, message.attempt)
            return
        image = self._dispatcher.offers.latest(machine, message.index)
        if image is None:
            return  # the attempt goes on, and its rows have been used
        if image.encoder != message.encoder:
            if message.failure is not None:  # what told of its new room may be lost
                self._dispatcher.tell_room(machine, image)
        elif message.failure is None:
            self._hedge(machine, image, message.waited_s)
        else:
            self._go(machine, image, message.failure)

    def sent(self, machine: Generation) -> None:
        """An attempt goes out: what of it may be hedged."""
        self._budget.sent(len(machine.prompt.items))

    def _hedge(self, machine: Generation, image: Image, waited_s: float) -> None:
        """If another encoder would be done soon, and within the budget."""
        counters = self.actor.counters
        counters["hedges_asked"] += 1
        encoder = None
        if image.num_before + 1 < self._max_attempts:
            encoder = self._dispatcher.rival(machine, image.index, image.encoder, waited_s)
        if encoder is None:
            counters["hedges_in_vain"] += 1
        elif not self._budget.take():
            counters["hedges_over_budget"] += 1
        else:
            placement = machine.placement.moved(image.index, encoder)
            self._owner.post(machine, ImageHedged(image.index, encoder, placement))

    def peer_silent(self, peer: Address) -> None:
        """Images that it has not taken go elsewhere: no other instance would report them."""
        failure = Failure(FailureKind.LOST, f"instance {peer.instance_id} does not answer")
        for key, image in self._dispatcher.offers.not_taken_by(peer):
            self.actor.mailbox.post(key, self._leave, key, image, failure)

    def encoder_lost(self, encoder: Address, failure: Failure) -> None:
        """The same for images whose rows go to no prefill instance that would report them."""
        for key, image in self._dispatcher.offers.not_taken_by(encoder):
            if image.request.consumer is None:
                self.actor.mailbox.post(key, self._leave, key, image, failure)

    def _leave(self, key: str, image: Image, failure: Failure) -> None:
        machine = self._owner.current(key, image.request.attempt)
        if machine is not None and self._dispatcher.offers.latest(machine, image.index) is image:
            self._go(machine, image, failure)

    def _go(self, machine: Generation, image: Image, failure: Failure) -> None:
        """To another encoder, or the attempt has failed."""
        encoder = None
        if image.num_before + 1 < self._max_attempts:
            but = self._but(image.encoder)
            encoder = self._dispatcher.another_encoder(machine, image.index, but)
        if encoder is None:
            self._owner.attempt_failed(machine, {image.encoder.instance_id}, failure)
        else:
            placement = machine.placement.moved(image.index, encoder)
            self._owner.post(machine, ImageMoved(image.index, encoder, placement))

    def _but(self, encoder: Address) -> set[str]:
        """It is not asked again; what has taken the place of the lost may be."""
        return set() if self.actor.is_lost(encoder) else {encoder.instance_id}

    @performs(Do.MOVE_IMAGE)
    def move_image(self, machine: Generation, event: ImageMoved) -> None:
        self._dispatcher.move(machine, event.index, event.encoder)
        self.actor.counters["images_moved"] += 1

    @performs(Do.HEDGE_IMAGE)
    def hedge_image(self, machine: Generation, event: ImageHedged) -> None:
        self._dispatcher.hedge(machine, event.index, event.encoder)
        self.actor.counters["hedges"] += 1
