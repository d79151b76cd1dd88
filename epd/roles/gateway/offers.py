"""Images on their way to encoders: OFFER machines, one for each attempt that has images.

The message that cancels an image may be lost: an encoder reports now and then which rooms it still
has, and those that are over (`wants`) are cancelled again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from epd.config import Timing
from epd.fsm.generation import Generation
from epd.fsm.kernel import Event
from epd.fsm.offer import (
    Answered,
    Do,
    GivenUp,
    Offered,
    RetryDue,
    RivalAdded,
    RoomReplaced,
    RowsKept,
    Taken,
)
from epd.fsm.offer import Offer as OfferMachine
from epd.keys import RoomKey, attempt_key, request_of
from epd.messages import AbortEncode, Address, EncodeRequest
from epd.roles.base import Actor, Component, performs


@dataclass(frozen=True, slots=True)
class Image:
    index: int  # in its prompt
    encoder: Address
    request: EncodeRequest
    image: bytes
    num_before: int = 0  # encoders that were asked for it in this attempt


Offer = OfferMachine[Image]


class Offers(Component[Offer]):
    """Of the present attempts of one gateway's generations."""

    fires = Offer

    def __init__(self, actor: Actor, timing: Timing) -> None:
        super().__init__(actor)
        self._timing = timing
        self._offers: dict[str, Offer] = {}  # by generation
        self.on_answer: Callable[[str], None] = lambda request_id: None

    def live(self) -> dict[str, int]:
        return {"offers": len(self._offers)}

    def begin(self, machine: Generation, images: dict[str, Image]) -> None:
        if images:
            key = attempt_key(machine.key, machine.attempt)
            offer = self._offers[machine.key] = Offer(key, images, self.actor.journal)
            self.post(offer, Offered())

    def taken(self, machine: Generation, room: str) -> None:
        """If rows go to no prefill instance, the image is offered until they are kept."""
        if machine.prompt.stage != "encode":
            self._tell(machine, Taken(room))

    def kept(self, machine: Generation, room: str) -> None:
        if self.wants(machine, room):
            self._tell(machine, RowsKept(room))

    def given_up(self, machine: Generation) -> None:
        self._tell(machine, GivenUp())

    def answered(self, machine: Generation) -> None:
        self._tell(machine, Answered())

    def _tell(self, machine: Generation, event: Event) -> None:
        if (offer := self._offers.get(machine.key)) is not None:
            self.post(offer, event)

    def wants(self, machine: Generation, room: str) -> bool:
        """Whether the present attempt may still need this room's rows."""
        offer = self._offers.get(machine.key)
        return offer is not None and room in offer.images and not machine.token_ids_of_attempt

    def latest(self, machine: Generation, index: int) -> Image | None:
        """Where an image of the present attempt was sent last; None: its rows are not needed."""
        offer = self._offers.get(machine.key)
        if offer is None or machine.token_ids_of_attempt:
            return None
        return next((i for i in reversed(offer.images.values()) if i.index == index), None)

    def move(self, machine: Generation, index: int, encoder: Address, *, is_suspect: bool) -> Image:
        """Send an image to another encoder instead; returns what was sent."""
        image, further = self._further(machine, index, encoder, is_suspect=is_suspect)
        self._tell(machine, RoomReplaced(image.request.room, further.request.room, further))
        return further

    def hedge(self, machine: Generation, index: int, encoder: Address) -> Image:
        """The same, beside the former encoder, which may be late because it died of the image."""
        further = self._further(machine, index, encoder, is_suspect=True)[1]
        self._tell(machine, RivalAdded(further.request.room, further))
        return further

    def _further(
        self, machine: Generation, index: int, encoder: Address, *, is_suspect: bool
    ) -> tuple[Image, Image]:
        """What was sent last, and what is sent now."""
        image = self.latest(machine, index)
        assert image is not None  # or nobody would want it elsewhere
        count = image.num_before + 1
        room = str(RoomKey(machine.key, machine.attempt, index, count))
        request = image.request.elsewhere(room, is_suspect=is_suspect)
        return image, replace(image, encoder=encoder, request=request, num_before=count)

    def not_taken_by(self, peer: Address) -> list[tuple[str, Image]]:
        """Images that this encoder alone was sent, and has not taken yet, with their
        generations."""
        return [
            (request_id, image)
            for request_id, offer in self._offers.items()
            for image in map(offer.images.__getitem__, offer.untaken)
            if image.encoder == peer
            and sum(one.index == image.index for one in offer.images.values()) == 1
        ]

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.SEND_IMAGES)
    def send_images(self, offer: Offer, event: Event) -> None:
        for room in offer.untaken:
            self._send(offer.images[room])

    @performs(Do.SEND_ONE)
    def send_one(self, offer: Offer, event: RoomReplaced[Image] | RivalAdded[Image]) -> None:
        self._send(event.image)

    def _send(self, image: Image) -> None:
        self.actor.send(image.encoder, image.request, (image.image,))

    @performs(Do.DOUBT)
    def doubt(self, offer: Offer, event: Event) -> None:
        for room in offer.untaken:
            self.actor.doubt(offer.images[room].encoder)

    @performs(Do.ARM_RETRY)
    def arm_retry(self, offer: Offer, event: Event) -> None:
        delay_s = self._timing.accept_timeout_s / 2
        self.arm(offer, delay_s, RetryDue())

    @performs(Do.SEND_ABORTS)
    def send_aborts(self, offer: Offer, event: Event) -> None:
        for room, image in offer.images.items():
            self.actor.send(image.encoder, AbortEncode(room=room))

    @performs(Do.ANSWER)
    def answer(self, offer: Offer, event: Event) -> None:
        self.on_answer(request_of(offer.key))

    def ended(self, machine: Offer) -> None:
        request_id = request_of(machine.key)
        if self._offers.get(request_id) is machine:
            del self._offers[request_id]
