"""Requests in states that several tests begin with."""

from __future__ import annotations

import pytest

from epd.fsm.request import Do, FirstTokenSampled, KvOffered, Request, Scheduled, TextOnly
from epd.messages import TokenLogprobs
from tests.fsm.tables import launch, make_request


@pytest.fixture
def running() -> Request:
    """Offered to another decode instance, no step in flight."""
    made = make_request()
    made.fire(TextOnly())
    assert made.fire(Scheduled((3, 4))) == (Do.OFFER_KV,)
    return made


@pytest.fixture
def decoding() -> Request:
    made = make_request(decode_here=True)
    made.fire(TextOnly())
    made.fire(Scheduled((3, 4)))
    launch(made, 3).fire(FirstTokenSampled(TokenLogprobs(9, 0.0)))
    return made


@pytest.fixture
def waiting_for_kv() -> Request:
    made = make_request(decode_here=True)
    assert made.fire(KvOffered()) == (Do.RESERVE_BLOCKS,)
    return made
