"""ADAPTER: one adapter from its load to the end of its unload, edge by edge."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.frontend import Refused
from epd.fsm import adapter as a
from epd.fsm.adapter import Do, S
from epd_lab.formal.machines import PEER
from tests.fsm.paths import follow
from tests.fsm.tables import at, make_adapter

LOADS = (a.LoadAsked(a.nobody), S.LOADING, (Do.SEND_LIST, Do.ARM_LOADING))
ANSWERS = (Do.ANSWER, Do.FREE_NAME)


def test_it_is_a_model_when_all_hold_it() -> None:
    """NAMED -> LOADING -> SERVING: who asked has the answer then, and not before."""
    asker = mock.Mock()
    follow(
        made := make_adapter(),
        (a.LoadAsked(asker), S.LOADING, (Do.SEND_LIST, Do.ARM_LOADING)),
        (a.InstanceBehind(PEER), S.LOADING, (Do.SEND_AGAIN,)),
        (a.ListApplied(0), S.LOADING, ()),
        (a.ListApplied(2), S.SERVING, (Do.ANSWER, Do.OFFER)),
        (a.InstanceBehind(PEER), S.SERVING, (Do.SEND_AGAIN,)),
        (a.ListApplied(2), S.SERVING, ()),
    )
    assert made.asker is asker and made.refusal is None
    assert made.is_listed and made.may_run and not made.is_at_work


@pytest.mark.parametrize(
    ("event", "status"), [(a.LoadRefused("rank 64"), 400), (a.TimedOut(), 503)]
)
def test_what_one_cannot_hold_is_taken_back(event: a.Event, status: int) -> None:
    """LOADING -> REMOVING -> GONE: the answer comes when the others have dropped it."""
    follow(
        made := make_adapter(),
        LOADS,
        (event, S.REMOVING, (Do.SEND_LIST, Do.ARM_REMOVING)),
        (a.InstanceBehind(PEER), S.REMOVING, (Do.SEND_AGAIN,)),
        (a.ListApplied(1), S.GONE, ANSWERS),
        (a.LoadRefused("late"), S.GONE, ()),
    )
    assert isinstance(made.refusal, Refused) and made.refusal.status == status
    assert not made.is_listed


def test_an_unload_waits_for_open_requests() -> None:
    """SERVING -> RETIRING -> REMOVING -> GONE."""
    follow(
        made := make_adapter(),
        (a.HeldFromStart(), S.SERVING, (Do.OFFER,)),
        (a.RequestEnded(), S.SERVING, ()),
        (
            a.UnloadAsked(a.nobody),
            S.RETIRING,
            (Do.WITHDRAW, Do.ARM_RETIRING, Do.COUNT_REQUESTS),
        ),
    )
    assert made.is_listed and made.may_run
    follow(
        made,
        (a.RequestEnded(), S.RETIRING, (Do.COUNT_REQUESTS,)),
        (a.ListApplied(1), S.RETIRING, ()),
        (a.LastRequestEnded(), S.REMOVING, (Do.SEND_LIST, Do.ARM_REMOVING)),
        (a.LastRequestEnded(), S.REMOVING, ()),
    )
    assert not made.is_listed and not made.may_run and made.is_at_work
    follow(made, (a.ListApplied(0), S.GONE, ANSWERS), (a.RequestEnded(), S.GONE, ()))


def test_time_ends_both_waits() -> None:
    """RETIRING -> REMOVING -> GONE: who is silent keeps no name for ever."""
    follow(
        at(make_adapter(), S.RETIRING),
        (a.TimedOut(), S.REMOVING, (Do.SEND_LIST, Do.ARM_REMOVING)),
        (a.TimedOut(), S.GONE, ANSWERS),
    )
