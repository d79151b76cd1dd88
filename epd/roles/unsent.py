"""A message that no peer would take: the attempt or room that it belongs to fails, with the reason.

It cannot be encoded, or is larger than any may be.  No peer is to blame and another attempt would
do no better, so it is an internal error, and nobody waits for what was never sent.
"""

from __future__ import annotations

from epd.failure import Failure
from epd.messages import (
    EncodeRequest,
    KvOffer,
    Message,
    PrefillRequest,
    RequestFailed,
    TokenChunk,
    Tokens,
)
from epd.roles.base import Actor
from epd.roles.gateway.elsewhere import Generations
from epd.roles.outgoing import OutgoingRooms


def fail_at_gateway(actor: Actor, owner: Generations) -> None:
    """Attempts whose messages cannot be sent."""

    def unsent(to: str, message: Message, failure: Failure) -> None:
        if isinstance(message, EncodeRequest | PrefillRequest):
            machine = owner.current(message.request_id, message.attempt)
            if machine is not None:
                owner.attempt_failed(machine, set(), failure)

    actor.on_unsent = unsent


def fail_at_instance(actor: Actor, rooms: OutgoingRooms) -> None:
    """Offers, and tokens of which some cannot be sent: those of others go alone."""

    def unsent(to: str, message: Message, failure: Failure) -> None:
        if isinstance(message, KvOffer):
            rooms.call_off(message.room, failure)
        elif isinstance(message, Tokens) and len(message.chunks) > 1:
            for chunk in message.chunks:
                actor.send(to, Tokens(chunks=(chunk,)))
        elif isinstance(message, Tokens):
            actor.send(to, _failed(message.chunks[0], failure))

    actor.on_unsent = unsent


def _failed(chunk: TokenChunk, failure: Failure) -> RequestFailed:
    return RequestFailed(request_id=chunk.request_id, attempt=chunk.attempt, failure=failure)
