"""OFFER: the images of one attempt, at the gateway, on their way to its encoders.

Theory of operation
-------------------
An image is offered to its encoder again and again until the encoder takes it: the bus may lose the
offer, and a repeat does no harm. Then prefill waits for its rows (INCOMING). A request for rows
alone has no prefill. Its images are offered until their rows are kept, and the last one that is
kept is the answer.

If an image's encoder is lost, it is offered to another one, under another room. If its rows are
late, another one is asked, too; what is late may be the offer itself, so both are asked again and
again.

The clocks of the attempt bound all of it (GENERATION). If the attempt is given up, the gateway also
sends that to the encoders: prefill, which would dismiss the rooms, may be unreachable. After a
success no message is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    unless,
)

T = TypeVar("T")


class Do(Effect):
    SEND_IMAGES = "send each image that was not taken to its encoder"
    SEND_ONE = "send an image to its new encoder"
    DOUBT = "have the links to those encoders asked for an echo"
    ARM_RETRY = "fire RetryDue later"
    SEND_ABORTS = "tell the encoder of each room that was not served"
    ANSWER = "hand the generation its end: all rows are kept"


class Own(Owned):
    ROOMS = "rooms at encoders, for rows that are wanted", Do.SEND_ABORTS, Do.ANSWER


class S(State):
    OFFERED = "not every encoder has its image; those that have not are asked again", Own.ROOMS
    TAKEN = "every encoder has its image", Own.ROOMS
    SERVED = "its rows have come, or nobody is left to want them"
    CALLED_OFF = "the attempt was given up before"


@dataclass(slots=True)
class Offered(Event):
    """The attempt goes out."""


@dataclass(slots=True)
class RetryDue(Event):
    by_time = True


@dataclass(slots=True)
class Taken(Event):
    """Its encoder has the image of this room."""

    room: str


@dataclass(slots=True)
class RowsKept(Event):
    """Its encoder keeps the rows of this room, which is all that was asked."""

    room: str


@dataclass(slots=True)
class RoomReplaced(Event, Generic[T]):
    """The encoder of this room is lost: its image goes to another one, under a new room."""

    room: str
    new_room: str
    image: T


@dataclass(slots=True)
class RivalAdded(Event, Generic[T]):
    """Rows are late: their image goes to another encoder, too."""

    new_room: str
    image: T


@dataclass(slots=True)
class Answered(Event):
    """The generation has ended with its answer."""

    by_time = True  # GENERATION's clocks end it
    ends = (Own.ROOMS,)


@dataclass(slots=True)
class GivenUp(Event):
    """The attempt has failed, or the client has left."""

    by_time = True  # GENERATION's clocks end it


def is_last(offer: Offer[T], event: Taken | RowsKept) -> bool:
    return not offer.untaken.keys() - {event.room}


def note_taken(offer: Offer[T], event: Taken) -> None:
    offer.untaken.pop(event.room, None)


def note_kept(offer: Offer[T], event: RowsKept) -> None:
    offer.untaken.pop(event.room, None)
    offer.images.pop(event.room, None)


def replace_room(offer: Offer[T], event: RoomReplaced[T]) -> None:
    offer.untaken.pop(event.room, None)
    del offer.images[event.room]
    offer.images[event.new_room] = event.image
    offer.untaken[event.new_room] = None


def add_rival(offer: Offer[T], event: RivalAdded[T]) -> None:
    offer.images[event.new_room] = event.image
    offer.untaken[event.new_room] = None


_OPEN = (S.OFFERED, S.TAKEN)
_OVER = (S.SERVED, S.CALLED_OFF)
_AGAIN = (Do.SEND_IMAGES, Do.ARM_RETRY)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.OFFERED, Offered, None, _AGAIN),
    Row(S.OFFERED, RetryDue, None, (Do.DOUBT, *_AGAIN), note="the image or the answer may be lost"),
    Row(S.OFFERED, Taken, S.TAKEN, (), note_taken, is_last),
    Row(S.OFFERED, Taken, None, (), note_taken, unless(is_last)),
    Row(S.OFFERED, RowsKept, S.SERVED, (Do.ANSWER,), note_kept, is_last),
    Row(S.OFFERED, RowsKept, None, (), note_kept, unless(is_last)),
    Row(_OPEN, RoomReplaced, S.OFFERED, (Do.SEND_ONE, Do.ARM_RETRY), replace_room, note="F19"),
    Row(_OPEN, RivalAdded, S.OFFERED, (Do.SEND_ONE, Do.ARM_RETRY), add_rival, note="F62"),
    Row(_OPEN, Answered, S.SERVED),
    Row(_OPEN, GivenUp, S.CALLED_OFF),
)

IGNORES = (
    Ignore((S.TAKEN,), (Taken, RowsKept), "the last one has taken its image"),
    Ignore(_OVER, (Taken, RowsKept, Answered, GivenUp), "nobody wants them any more"),
)

TABLE = Table("OFFER", __doc__ or "", S, S.OFFERED, _OVER, ROWS, IGNORES, timers={RetryDue: (Do.ARM_RETRY,)})
# fmt: on


class Offer(Machine, Generic[T]):
    """One attempt's images; `key` is `request/attempt`, an image's a room."""

    table = TABLE
    __slots__ = ("images", "untaken")

    def __init__(self, key: str, images: Mapping[str, T], journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(key, journal)
        self.images = dict(images)  # that may still be wanted, by room
        self.untaken = dict.fromkeys(images)
