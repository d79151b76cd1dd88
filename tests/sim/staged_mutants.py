"""Bugs of stages that clients drive themselves, put back (see mutants.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

from epd.fsm import request
from epd.fsm.request import TABLE as REQUEST
from epd.messages import RowsKept
from epd.roles.base import Actor
from epd.roles.encode.role import EncodeRole
from tests.sim.planting import mutant, row


@mutant
def an_encode_alone_says_nothing() -> Iterator[None]:
    """F43: who wanted no more than rows is never told that they are there."""
    send = Actor.send

    def silent(self: Actor, to: Any, message: Any, payloads: Any = ()) -> bool:
        return isinstance(message, RowsKept) or send(self, to, message, payloads)

    with mock.patch.object(Actor, "send", silent):
        yield


@mutant
def kept_rooms_stay_open() -> Iterator[None]:
    """F43, F21: a room that nobody takes rows from holds them for ever."""
    with mock.patch.object(EncodeRole, "_close_kept", lambda self, room, asker: None):
        yield


@mutant
def a_lease_has_no_end() -> Iterator[None]:
    """F43: blocks that are held for a request stay when it never comes."""
    with row(REQUEST, request.S.HELD, request.LeaseEnded, None):
        yield
