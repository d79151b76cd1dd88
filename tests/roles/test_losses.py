"""What the end of an instance means for requests: who is blamed, and who is not."""

from __future__ import annotations

import pytest

from epd.messages import AtHand
from epd.transport.base import Received
from tests.roles.desk import Open, gateway


@pytest.mark.parametrize(
    ("who", "has_token", "is_blamed"),
    [
        ("prefill", False, True),
        ("prefill", True, False),
        ("decode", False, True),
        ("decode", True, True),
    ],
)
def test_who_has_served_did_not_die_of_it(who: str, has_token: bool, is_blamed: bool) -> None:
    """F68: its first token shows that a prompt is no poison for its prefill, though what that had
    at hand was reported before.  Decode goes on with it to its end."""
    with gateway() as at:
        one = Open(at)
        losses, deaths = at.role._losses, at.role._dispatcher.suspects.deaths
        gone = getattr(one.machine.placement, who)
        hands = AtHand(serial=1, images=(), requests=(one.key,))
        at.do(losses.on_at_hand, Received(gone.instance_id, gone.epoch, hands, ()))
        if has_token:
            one.tokens(0, 21)
        at.do(losses._instance_gone, gone, False)
        lives = deaths.lives(at.role._dispatcher.suspects.content(one.machine))
        assert lives == (((gone.instance_id, gone.epoch),) if is_blamed else ())
        assert one.machine.attempt == (2 if is_blamed else 1)
