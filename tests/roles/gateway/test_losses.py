"""What the end of an instance means for requests: who is blamed, and who is not."""

from __future__ import annotations

import pytest

from epd.messages import AtHand, Heartbeat
from epd.records import HandsList, Load
from epd.roles.gateway.losses import Losses
from epd.transport.base import Received
from tests.roles.desk import Open, gateway

LATER = 1 << 20  # than what its own beats brought


@pytest.mark.parametrize(
    ("who", "num_tokens", "is_blamed"),
    [
        ("prefill", 0, True),
        ("prefill", 1, False),
        ("decode", 0, True),
        ("decode", 1, True),
        ("decode", 2, False),
    ],
)
def test_who_has_yielded_did_not_die_of_it(who: str, num_tokens: int, is_blamed: bool) -> None:
    """F68: a token that was computed there shows that a request is no poison, though what was at
    hand there was reported before; the first one is of prefill.  Decode goes on to the end."""
    with gateway() as at:
        one = Open(at)
        losses, deaths = at.part(Losses), at.whole.dispatcher.suspects.deaths
        gone = getattr(one.machine.placement, who)
        hands = AtHand(hands=HandsList(serial=LATER, requests=(one.key,)))
        at.do(losses.on_at_hand, Received(gone.instance_id, gone.epoch, hands, ()))
        for index in range(num_tokens):
            one.tokens(index, 21)
        at.do(at.whole.registry.on_lost, gone, False)
        lives = deaths.lives(at.whole.dispatcher.suspects.content(one.machine))
        assert lives == (((gone.instance_id, gone.epoch),) if is_blamed else ())
        assert one.machine.attempt == (1 if who == "prefill" and num_tokens else 2)


def test_a_heartbeat_brings_what_left() -> None:
    """F68: what waits now is not what its instance died of."""
    with gateway() as at:
        one = Open(at)
        losses, deaths = at.part(Losses), at.whole.dispatcher.suspects.deaths
        gone = one.machine.placement.prefill
        taken = AtHand(hands=HandsList(serial=LATER, images=("x", "y")))
        at.do(losses.on_at_hand, Received(gone.instance_id, gone.epoch, taken, ()))
        beat = Heartbeat(load=Load(hands=HandsList(serial=LATER + 1, images=("y",))))
        at.do(at.whole.registry.on_heartbeat, Received(gone.instance_id, gone.epoch, beat, ()))
        at.do(at.whole.registry.on_lost, gone, False)
        assert deaths.lives("y") and not deaths.lives("x")
