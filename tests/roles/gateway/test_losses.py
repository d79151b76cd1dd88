"""What the end of an instance means for requests: who is blamed, and who is not."""

from __future__ import annotations

import msgspec
import pytest

from epd.fsm.instance import HeartbeatsEnded
from epd.messages import AtHand, Heartbeat
from epd.records import Address, HandsList, Load
from epd.roles.gateway.losses import Losses
from epd.transport.base import Received
from tests.roles.desk import Desk, Open, gateway

LATER = 1 << 20  # than what its own beats brought


def falls_silent(at: Desk, gone: Address, host_id: str = "") -> None:
    registry = at.whole.registry
    (instance,) = (one for one in registry.instances if one.info.address == gone)
    instance.info = msgspec.structs.replace(instance.info, host_id=host_id or gone.instance_id)
    at.do(registry.fire, instance, HeartbeatsEnded())


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
        falls_silent(at, gone)
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
        falls_silent(at, gone)
        assert deaths.lives("y") and not deaths.lives("x")


@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_cut_cable_of_a_host_is_one_death_of_equal_requests(is_one_host: bool) -> None:
    """One choice is at prefill and another, of the same prompt, at decode: both hosts' or one's."""
    with gateway() as at:
        first, second = Open(at), Open(at)
        first.tokens(0, 21)
        losses, deaths = at.part(Losses), at.whole.dispatcher.suspects.deaths
        cut = first.machine.placement.decode, second.machine.placement.prefill
        for gone, one in zip(cut, (first, second), strict=True):
            hands = AtHand(hands=HandsList(serial=LATER, requests=(one.key,)))
            at.do(losses.on_at_hand, Received(gone.instance_id, gone.epoch, hands, ()))
        for gone in cut:
            falls_silent(at, gone, "a" if is_one_host else "")
        content = at.whole.dispatcher.suspects.content(second.machine)
        assert deaths.is_poison(content) is not is_one_host
        assert len(deaths.lives(content)) == (1 if is_one_host else 2)
