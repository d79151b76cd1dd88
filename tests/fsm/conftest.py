"""Requests in states that several tests begin with; what searches found is let go behind them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epd.fsm.request import Do, FirstTokenSampled, KvOffered, Request, Scheduled, TextOnly
from epd.messages import TokenLogprobs
from tests.fsm.searches import searched
from tests.fsm.tables import launch, make_request


@pytest.fixture(scope="module", autouse=True)
def spaces_are_let_go() -> Iterator[None]:
    """They are so many objects that each later collection of garbage would take seconds."""
    yield
    searched.cache_clear()


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
