"""Bugs of pictures on their way to encoders put back (OFFER)."""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import offer as o
from tests.sim.planting import mutant, row


@mutant
def a_picture_is_offered_once() -> Iterator[None]:
    """F16: a picture whose message was lost is waited for until the deadline."""
    with row(o.TABLE, o.S.OFFERED, o.Offered, None, (o.Do.SEND_PICTURES,)):
        yield
