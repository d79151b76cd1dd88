"""Bugs of images that another encoder takes within the attempt, put back."""

from __future__ import annotations

from typing import Any

from epd.failure import Failure
from epd.fsm import embedding
from epd.fsm.generation import Generation, ImageMoved
from epd.fsm.incoming import Incoming
from epd.fsm.kernel import Event
from epd.messages import Address, RoomWanted
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.elsewhere import Elsewhere
from epd.roles.gateway.offers import Image, Offers
from epd.roles.outgoing import OutgoingRooms
from epd.roles.prefill.embeddings import Embeddings
from epd.scheduling.hedging import HedgeBudget
from epd.transport.base import Received
from tests.sim.mutants.planting import Planted, mutant, patched, row, several


@mutant
def a_lost_encoder_ends_the_attempt() -> Planted:
    """F59: all images of a prompt are encoded again, since one encoder of several was lost."""
    return patched(Dispatcher, "another_encoder", lambda self, *of: None)


@mutant
def all_images_of_the_lost_are_encoded_again() -> Planted:
    """F59: also those whose rows prefill has."""
    on_wanted = Elsewhere.on_room_wanted

    def all_of_it(self: Elsewhere, received: Received) -> None:
        message: RoomWanted = received.message
        on_wanted(self, received)
        machine = self._owner.current(message.request_id, message.attempt)
        if machine is None:
            return
        for index, encoder in enumerate(machine.placement.encoders):
            if encoder == message.encoder and index != message.index:
                self._owner.post(machine, _moved(self, machine, index))

    return patched(Elsewhere, "on_room_wanted", all_of_it)


def _moved(self: Elsewhere, machine: Generation, index: int) -> ImageMoved:
    encoder = self._dispatcher.another_encoder(machine, index, ())
    assert encoder is not None
    return ImageMoved(index, encoder, machine.placement.moved(index, encoder))


@mutant
def the_lost_is_asked_again() -> Planted:
    """F59: an image goes to the very life of an encoder that was lost."""

    def same(self: Dispatcher, machine: Generation, index: int, but: Any) -> object:
        return machine.placement.encoders[index]

    return patched(Dispatcher, "another_encoder", same)


@mutant
def another_room_is_waited_for() -> Planted:
    """F15, F59: nobody says again that a room is wanted, and no clock bounds the wait for it."""
    return row(embedding.TABLE, embedding.S.AWAITING_ROOM, embedding.NoRoomCame, None)


@mutant
def a_room_is_asked_for_once() -> Planted:
    """F59: the answer is lost, and nobody asks again."""
    return row(embedding.TABLE, embedding.S.AWAITING_ROOM, embedding.RetryDue, None)


@mutant
def a_room_is_told_once() -> Planted:
    """F59: who asks again was answered."""
    on_wanted = Elsewhere.on_room_wanted

    def to_be_told(self: Elsewhere, received: Received) -> None:
        message: RoomWanted = received.message
        machine = self._owner.current(message.request_id, message.attempt)
        if machine is None or machine.placement.encoders[message.index] == message.encoder:
            on_wanted(self, received)

    return patched(Elsewhere, "on_room_wanted", to_be_told)


@mutant
def what_was_given_up_is_served_until_the_next() -> Planted:
    """F42, F59: who asks about an attempt that failed hears nothing until another one begins (swarm
    59000296)."""
    return patched(Generation, "has_attempt", True)


@mutant
def both_loads_are_first() -> Planted:
    """F62: the winner is taken for the loser, so that both rows are used."""
    state, event = embedding.S.HEDGED, embedding.Loaded
    effects = embedding.TABLE.dispatch[state][event][0][2]
    return row(embedding.TABLE, state, event, embedding.S.RESIDENT, effects, embedding.keep_rows)


@mutant
def a_rivals_promise_is_kept() -> Planted:
    """F62: slots that were promised for the second load are nobody's any more."""
    cancel = Embeddings._cancel

    def only_cancel(self: Embeddings, machine: embedding.Embedding, event: Event) -> None:
        cancel(self, machine.rival)

    return patched(Embeddings, "cancel_rival", only_cancel)


@mutant
def a_lost_rival_keeps_its_promise() -> Planted:
    """F62, F24: two raced, one was lost, and slots are promised for it for ever."""
    return patched(Embeddings, "end_race", lambda self, machine, event: None)


@mutant
def hedges_have_no_budget() -> Planted:
    """F62: every image of an encoder that stands still is encoded twice."""
    return patched(HedgeBudget, "take", lambda self: True)


@mutant
def a_rival_ends_the_offer() -> Planted:
    """F62: what is late is the offer itself, and it is not repeated (swarm 46000044); nor has the
    room that its grant opened a bound."""

    hedge = Offers.hedge

    def only_rival(self: Offers, machine: Generation, index: int, encoder: Address) -> Image:
        further = hedge(self, machine, index, encoder)
        self._offers[machine.key].untaken = {further.request.room: None}
        return further

    unbound = patched(OutgoingRooms, "_await_request", lambda *_: None)
    return several(patched(Offers, "hedge", only_rival), unbound)


@mutant
def a_rival_outlives_its_request() -> Planted:
    """F62, F43: who leaves takes back its own room, and not the one that was asked for besides."""
    return patched(embedding.Embedding, "rooms_for", lambda self, room: [room])


@mutant
def the_loser_keeps_its_slots() -> Planted:
    """F62: nobody stops the load that came second, and what it delivers is nobody's."""
    concluded = Embeddings.concluded

    def promise_only(self: Embeddings, machine: embedding.Embedding, event: Event) -> None:
        self.give_up(machine.key)

    def forget(self: Embeddings, incoming: Incoming, failure: Failure | None) -> None:
        machine = self._embeddings.get(incoming.owner)
        if failure is not None or (machine is not None and incoming.key in machine.loads):
            concluded(self, incoming, failure)

    return several(
        patched(Embeddings, "cancel_rival", promise_only), patched(Embeddings, "concluded", forget)
    )
