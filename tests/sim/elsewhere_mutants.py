"""Bugs of images that another encoder takes within the attempt, put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from epd.fsm import embedding
from epd.fsm.generation import Generation, ImageMoved
from epd.messages import RoomWanted
from epd.roles.dispatch import Dispatcher
from epd.roles.elsewhere import Elsewhere
from epd.transport.base import Received
from tests.sim.planting import mutant, row


@mutant
def a_lost_encoder_ends_the_attempt() -> Iterator[None]:
    """F59: all images of a prompt are encoded again, since one encoder of several was lost."""
    with mock.patch.object(Dispatcher, "another_encoder", lambda self, *of: None):
        yield


@mutant
def all_images_of_the_lost_are_encoded_again() -> Iterator[None]:
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
                self._owner.fire(machine, _moved(self, machine, index))

    with mock.patch.object(Elsewhere, "on_room_wanted", all_of_it):
        yield


def _moved(self: Elsewhere, machine: Generation, index: int) -> ImageMoved:
    encoder = self._dispatcher.another_encoder(machine, index, ())
    assert encoder is not None
    return ImageMoved(index, encoder, machine.placement.moved(index, encoder))


@mutant
def the_lost_is_asked_again() -> Iterator[None]:
    """F59: an image goes to the very life of an encoder that was lost."""

    def same(self: Dispatcher, machine: Generation, index: int, but: Any) -> object:
        return machine.placement.encoders[index]

    with mock.patch.object(Dispatcher, "another_encoder", same):
        yield


@mutant
def another_room_is_waited_for() -> Iterator[None]:
    """F15, F59: nobody says again that a room is wanted, and no clock bounds the wait for it."""
    with row(embedding.TABLE, embedding.S.AWAITING_ROOM, embedding.NoRoomCame, None):
        yield
