"""Links to peers: who is doubted, what an echo is worth, and who is given up."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from epd.messages import Address, LinkEcho, LinkProbe
from epd_lab.sim.cluster import GATEWAY
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing
PEER = Address("d0", 1, "")


def links() -> Any:
    """Of p0; nobody answers it."""
    return desk("1e1p1d", "p0", "links")


def doubt(at: Desk, peer: Address = PEER) -> list[Any]:
    at.goes_out = ()
    at.said.clear()
    at.do(at.role.doubt, peer)
    return [(to, message) for to, message in at.said if isinstance(message, LinkProbe)]


def echo(at: Desk, epoch: int = 1) -> None:
    at.tell("on_echo", LinkEcho(), "d0", epoch=epoch)


def probes(at: Desk) -> list[bool]:
    return [message.is_mute for message in at.messages() if isinstance(message, LinkProbe)]


def test_a_doubt_asks_once_and_an_echo_is_trusted_for_a_while() -> None:
    with links() as at:
        assert doubt(at) == [("d0", LinkProbe(is_mute=False))]
        assert doubt(at) == [], "it is asked already"
        assert at.role.live() == {"links_doubted": 1} and at.role.silent() == ()
        echo(at, epoch=2)
        assert at.role.live() == {"links_doubted": 1}
        echo(at)
        assert at.role.live() == {"links_doubted": 0}
        assert not [name for name in at.actor.timers if name.startswith("LINK ")]
        at.cluster.pass_time(TIMING.link_timeout_s / 2 - 0.01)
        assert doubt(at) == []
        at.cluster.pass_time(0.02)
        assert len(doubt(at)) == 1


def test_neither_itself_nor_the_lost_are_doubted() -> None:
    with links() as at:
        assert doubt(at, at.actor.address) == []
        at.actor.lost.add(("d0", 1))
        assert doubt(at) == []


def test_who_is_silent_is_asked_again_and_its_link_opened_anew_and_then_given_up() -> None:
    with links() as at:
        roles = [mock.Mock(live=dict), mock.Mock(live=dict)]
        at.actor.components += roles
        with mock.patch.object(at.actor.bus, "reopen") as reopen:
            doubt(at)
            at.cluster.pass_time(TIMING.link_timeout_s - 0.01)
            assert probes(at) == [False] * 5, "every retry_interval_s"
            assert at.role.silent() == () and not reopen.called
            at.cluster.pass_time(0.02)
            assert at.role.silent() == ("d0",)
            reopen.assert_called_once_with("d0")
            assert probes(at)[-1] and at.actor.counters["links_opened_anew"] == 1
            assert any("opened anew" in line for line in at.cluster.node("p0").warnings)
            assert not roles[0].peer_silent.called
            at.cluster.pass_time(TIMING.link_timeout_s)
            for role in roles:
                role.peer_silent.assert_called_with(PEER)
            with mock.patch.object(at.actor.log, "info") as info:
                echo(at)
            info.assert_called_once_with("the link carries messages again", peer="d0")
            assert "d0" not in at.role.silent()
            assert not [name for name in at.actor.timers if name.startswith("LINK d0")]


def test_who_waits_for_its_gateway_is_told_once_and_not_warned() -> None:
    young = {GATEWAY: mock.Mock(was_welcomed=False)}
    with links() as at, mock.patch.object(at.actor, "memberships", young):
        with mock.patch.object(at.actor.log, "info") as info:
            doubt(at, Address(GATEWAY, 0, ""))
            at.cluster.pass_time(5.1 * TIMING.link_timeout_s)
        info.assert_called_once_with("no answer; the link is opened anew", peer=GATEWAY)
        assert at.cluster.node("p0").warnings == []
        assert at.actor.counters["links_opened_anew"] == 5


@pytest.mark.parametrize("is_mute", [True, False])
def test_a_probe_is_answered_and_one_of_who_heard_nothing_opens_the_link_anew(
    *, is_mute: bool
) -> None:
    with links() as at, mock.patch.object(at.actor.bus, "reopen") as reopen:
        at.goes_out = ()
        assert at.tell("on_probe", LinkProbe(is_mute=is_mute), "d0") == [LinkEcho()]
        assert at.said[0][0] == "d0"
        assert reopen.call_args_list == ([mock.call("d0")] if is_mute else [])


def test_the_loss_of_this_very_life_ends_its_doubt_and_its_trust() -> None:
    with links() as at:
        doubt(at)
        at.do(at.role.peer_lost, Address("d0", 2, ""))
        assert at.role.live() == {"links_doubted": 1}
        at.do(at.role.peer_lost, Address("e0", 1, ""))
        assert at.role.live() == {"links_doubted": 1}
        echo(at)
        at.do(at.role.peer_lost, PEER)
        assert len(doubt(at)) == 1, "what it was trusted for is over"
        at.do(at.role.peer_lost, PEER)
        assert at.role.live() == {"links_doubted": 0}


def test_a_gateway_is_doubted_whatever_its_life() -> None:
    with links() as at:
        doubt(at, Address("d0", 0, ""))
        echo(at, epoch=7)
        assert at.role.live() == {"links_doubted": 0}
        at.cluster.pass_time(TIMING.link_timeout_s)
        doubt(at, Address("d0", 0, ""))
        at.do(at.role.peer_lost, Address("d0", 7, ""))
        assert at.role.live() == {"links_doubted": 0}


def test_who_is_known_and_not_listed_is_absent() -> None:
    with links() as at:
        for name in ("d0", "e0", "nobody"):
            doubt(at, Address(name, 1, ""))
        at.actor.listed.discard(("d0", 1))
        at.cluster.pass_time(2 * TIMING.link_timeout_s + 0.01)
        assert at.role.silent() == ("e0", "nobody"), "it was never met"


def test_a_doubt_ends_with_a_life_that_was_never_listed() -> None:
    """A request named it; its registry was gone before its list came."""
    with links() as at:
        unlisted = Address("e9", 1, "")
        doubt(at, unlisted)
        at.cluster.pass_time(2.1 * TIMING.link_timeout_s)
        assert at.role.silent() == ("e9",)
        at.do(at.actor.connect, Address("e9", 2, ""))
        at.cluster.pass_time(TIMING.link_timeout_s)
        assert "e9" not in at.role.silent()
        assert not [name for name in at.actor.timers if name.startswith("LINK e9")]
