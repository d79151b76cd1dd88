"""Bugs of images on their way to encoders put back (OFFER)."""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import offer as o
from tests.sim.planting import mutant, row


@mutant
def an_image_is_offered_once() -> Iterator[None]:
    """F16: an image whose message was lost is waited for until the deadline."""
    with row(o.TABLE, o.S.OFFERED, o.Offered, None, (o.Do.SEND_IMAGES,)):
        yield
