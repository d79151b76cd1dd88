"""Bugs of stages that clients drive themselves, put back (see `__init__.py`)."""

from __future__ import annotations

from typing import Any

from epd.fsm import request
from epd.fsm.request import TABLE as REQUEST
from epd.messages import RowsKept
from epd.roles.base import Actor
from epd.roles.encode.role import EncodeRole
from tests.sim.mutants.planting import Planted, mutant, patched, row


@mutant
def an_encode_alone_says_nothing() -> Planted:
    """F43: who wanted no more than rows is never told that they are there."""
    send = Actor.send

    def silent(self: Actor, to: Any, message: Any, payloads: Any = ()) -> bool:
        return isinstance(message, RowsKept) or send(self, to, message, payloads)

    return patched(Actor, "send", silent)


@mutant
def kept_rooms_stay_open() -> Planted:
    """F43, F21: a room that nobody takes rows from holds them for ever."""
    return patched(EncodeRole, "_close_kept", lambda self, room, asker: None)


@mutant
def a_lease_has_no_end() -> Planted:
    """F43: blocks that are held for a request stay when it never comes."""
    return row(REQUEST, request.S.HELD, request.LeaseEnded, None)
