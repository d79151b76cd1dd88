"""Bugs of membership put back: of an instance's own half (MEMBERSHIP), and of equal names."""

from __future__ import annotations

from unittest import mock

from epd.fsm import instance as i
from epd.fsm import membership as m
from epd.messages import InstanceInfo
from epd.roles.gateway.registry import Registry
from tests.sim.mutants.planting import Planted, mutant, patched, row

MEMBERSHIP = m.Membership.table


@mutant
def a_silent_gateway_is_waited_for() -> Planted:
    """F17, F35: an instance does not ask a gateway that is silent, which may be a new one."""
    return row(MEMBERSHIP, m.S.MEMBER, m.GatewayFellSilent, None, (m.Do.DOUBT, m.Do.ARM_SILENCE))


@mutant
def a_join_is_said_once() -> Planted:
    """F17, F18: an instance that starts before its gateway is up waits for an answer for ever."""
    return row(MEMBERSHIP, m.S.OUTSIDE, m.JoinDue, m.S.JOINING, (m.Do.SEND_JOIN,))


@mutant
def who_joins_trusts_the_link() -> Planted:
    """F48: joins are said again and again over a link that carries none (swarm 1796000003421)."""
    return row(MEMBERSHIP, m.S.JOINING, m.JoinDue, None, (m.Do.SEND_JOIN, m.Do.ARM_JOIN))


@mutant
def whoever_has_the_name_is_the_next_life() -> Planted:
    """F78: who joins under the name of a living one takes its place."""

    def replaced(self: i.Instance, info: InstanceInfo) -> i.EpochReplaced:
        return i.EpochReplaced()

    return patched(i.Instance, "asked_for", replaced)


@mutant
def the_living_defend_no_name() -> Planted:
    """F78: a stranger under the name of a living one waits for ever, and nobody is told."""
    cells = i.TABLE.dispatch[i.S.HEALTHY]
    rows = cells[i.HeartbeatReceived]
    mute = tuple(
        (g, do, tuple(e for e in each if e is not i.Do.SHOW_ALIVE), to) for g, do, each, to in rows
    )
    return mock.patch.dict(cells, {i.HeartbeatReceived: mute})


@mutant
def who_returns_is_not_answered() -> Planted:
    """F78: a life that was lost, and whose name another has, beats its heart for nobody."""
    refuse = Registry._refuse

    def unless_followed(self: Registry, info: InstanceInfo, reason: str) -> None:
        known = self._instances.get(info.address.instance_id)
        if known is None or not known.present or known.info.address == info.address:
            refuse(self, info, reason)

    return patched(Registry, "_refuse", unless_followed)
