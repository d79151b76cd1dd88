"""Bugs of an instance's own half of membership put back (MEMBERSHIP)."""

from __future__ import annotations

from collections.abc import Iterator

from epd.fsm import membership as m
from tests.sim.planting import mutant, row

MEMBERSHIP = m.Membership.table


@mutant
def a_silent_gateway_is_waited_for() -> Iterator[None]:
    """F17, F35: an instance does not ask a gateway that is silent, which may be a new one."""
    with row(MEMBERSHIP, m.S.MEMBER, m.GatewayFellSilent, None, (m.Do.DOUBT, m.Do.ARM_SILENCE)):
        yield


@mutant
def a_join_is_said_once() -> Iterator[None]:
    """F17, F18: an instance that starts before its gateway is up waits for an answer for ever."""
    with row(MEMBERSHIP, m.S.OUTSIDE, m.JoinDue, m.S.JOINING, (m.Do.SEND_JOIN,)):
        yield
