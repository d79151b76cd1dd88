"""Bugs of images on their way to encoders put back (OFFER)."""

from __future__ import annotations

from epd.fsm import offer as o
from tests.sim.mutants.planting import Planted, mutant, row


@mutant
def an_image_is_offered_once() -> Planted:
    """F16: an image whose message was lost is waited for until the deadline."""
    return row(o.TABLE, o.S.OFFERED, o.Offered, None, (o.Do.SEND_IMAGES,))
