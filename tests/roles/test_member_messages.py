"""A member: what it tells its gateway, and what it makes of the gateway's messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.config import Timing
from epd.failure import Failure, FailureKind
from epd.fsm.membership import S
from epd.messages import (
    PROTOCOL_VERSION,
    Address,
    Heartbeat,
    HeartbeatAck,
    InstanceInfo,
    Join,
    JoinRefused,
    Leave,
    Membership,
    Welcome,
)
from epd.roles.member import absent_after_s
from epd_lab.sim.cluster import FINGERPRINT, GATEWAY
from tests.fsm.tables import at as in_state
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing


@contextmanager
def member(topology: str = "1e1p1d", name: str = "e0", timing: Timing = TIMING) -> Iterator[Desk]:
    """Of e0, that hears nobody but the test."""
    settings = dataclasses.replace(DEFAULTS, timing=timing)
    with desk(topology, name, "member", settings) as at:
        at.goes_out = ()
        for other in at.cluster.cluster.instances:
            at.cluster.world.network.block(GATEWAY, other)
            at.cluster.world.network.block(other, GATEWAY)
        yield at


def present(at: Desk, *but: str) -> tuple[InstanceInfo, ...]:
    found = (i.info for i in at.cluster.gateway.registry.instances)
    return tuple(info for info in found if info.address.instance_id not in but)


def news(at: Desk, *but: str, lost: tuple[Address, ...] = (), epoch: int = 1, more: int = 1) -> Any:
    """The next version of the registry, without some."""
    message = Membership(
        version=at.role.places[0].version + more, instances=present(at, *but), lost=lost
    )
    return at.tell("on_membership", message, GATEWAY, epoch=epoch)


def welcome(
    at: Desk, epoch: int = 1, of: int = 1, cluster_s: float = 5.0, ahead_s: float = 0.0
) -> list[Any]:
    """`ahead_s`: the wall clock of the instance, of the gateway's."""
    wall_s = at.actor.clock.wall_s() - ahead_s
    return at.tell(
        "on_welcomed",
        Welcome(epoch=of, heartbeat_interval_s=0.25, cluster_s=cluster_s, wall_s=wall_s),
        GATEWAY,
        epoch=epoch,
    )


def ack(at: Desk, version: int, *, known: bool = True, cluster_s: float = 5.0) -> list[Any]:
    return at.tell(
        "on_heartbeat_ack", HeartbeatAck(known=known, version=version, cluster_s=cluster_s), GATEWAY
    )


def joins(said: list[Any]) -> list[Join]:
    return [message for message in said if isinstance(message, Join)]


def test_of_two_lost_lives_of_one_name_a_join_tells_the_last() -> None:
    """A life that is over bars those before it: the first would let the second in again."""
    lives = [("p0", 10), ("p0", 2), ("d0", 1), ("p0", 1), ("p0", 11), ("p0", 9)]
    for told in (lives, lives[::-1]):
        with member() as at:
            at.actor.lost.clear()
            at.actor.lost.update(told)
            at.do(at.role.send_join, at.role.places[0].machine, None)
            (join,) = joins(at.messages())
            assert join.lost == (("d0", 1), ("p0", 11))


@pytest.mark.parametrize(
    ("ahead_s", "how"),
    [(61.0, "61 s ahead of"), (-3600.0, "3600 s behind"), (59.0, ""), (-59.0, "")],
)
def test_a_new_life_needs_a_clock_near_the_gateways(ahead_s: float, how: str) -> None:
    with member(timing=msgspec.structs.replace(TIMING, max_clock_skew_s=60.0)) as at:
        at.role.on_rejected = rejected = mock.Mock()
        in_state(at.role.places[0].machine, S.OUTSIDE)
        at.do(at.role.start)
        welcome(at, ahead_s=ahead_s)
        if not how:
            welcome(at, ahead_s=1e6)  # no member is given up for its clock
            assert at.role.places[0].machine.state is S.MEMBER
            return
        assert at.role.places[0].machine.state is S.REJECTED
        (reason,) = rejected.call_args.args
        assert how in reason and "NTP" in reason and not at.actor.knows_time_of(GATEWAY)


def test_it_joins_until_it_is_welcomed_and_then_beats_its_heart() -> None:
    with member() as at:
        role = at.role
        in_state(role.places[0].machine, S.OUTSIDE)
        at.said.clear()
        at.actor.doubt = doubt = mock.Mock()
        at.do(role.start)
        doubt.assert_not_called()
        at.cluster.pass_time(1.1 * TIMING.retry_interval_s)
        join = Join(
            protocol_version=PROTOCOL_VERSION,
            model_fingerprint=FINGERPRINT,
            info=at.cluster.registered("e0").info,
            was_member=False,
        )
        assert [said for said in at.said if isinstance(said[1], Join)] == [(GATEWAY, join)] * 2
        assert [call.args[0].instance_id for call in doubt.call_args_list] == [GATEWAY]
        role.on_welcome = mock.Mock()
        (beat,) = welcome(at, cluster_s=77.0)
        assert isinstance(beat, Heartbeat) and beat.version == role.places[0].version
        assert at.actor.cluster_s() == pytest.approx(77.0) and at.actor.knows_time_of(GATEWAY)
        at.cluster.pass_time(0.24)
        assert len(at.said) == 1
        at.cluster.pass_time(0.02)
        assert [type(message) for message in at.messages()] == [Heartbeat] * 2
        welcome(at)
        role.on_welcome.assert_called_once_with()
        assert joins(ack(at, 0, known=False))[0].was_member


def test_only_a_welcome_of_this_very_life_counts() -> None:
    with member() as at:
        in_state(at.role.places[0].machine, S.JOINING)
        assert welcome(at, of=2) == [] and not at.actor.knows_time_of(GATEWAY)


def test_a_gateway_that_was_followed_is_lost_and_its_messages_are_over() -> None:
    with member() as at:
        role = mock.Mock(live=dict)
        at.actor.components.append(role)
        welcome(at, epoch=3)
        role.peer_lost.assert_called_once_with(Address(GATEWAY, 1, ""))
        welcome(at, epoch=3)
        role.peer_lost.assert_called_once()
        before = at.actor.counters["message_of_other_epoch"]
        assert welcome(at, epoch=2) == []
        expelled = at.role.on_expelled = mock.Mock()
        at.tell("on_refused", JoinRefused(epoch=1, reason="late"), GATEWAY, epoch=2)
        assert ack(at, 9) == []
        news(at, "p0", epoch=2)
        assert at.actor.counters["message_of_other_epoch"] == before + 4
        expelled.assert_not_called()
        assert at.role.places[0].machine.gateway_epoch == 3 and ("p0", 1) not in at.actor.lost
        in_state(at.role.places[0].machine, S.CUT_OFF)  # it does not speak any more
        assert len(welcome(at, epoch=2)) == 1


@pytest.mark.parametrize("says", ["list", "ack"])
def test_whoever_speaks_is_followed_and_its_former_lives_are_over(says: str) -> None:
    """The welcome of a new gateway was lost: what the former one said still comes."""
    with member() as at:
        in_state(at.role.places[0].machine, S.CUT_OFF)
        if says == "list":
            news(at, epoch=3)
        else:
            at.tell(
                "on_heartbeat_ack",
                HeartbeatAck(known=False, version=1, cluster_s=5.0),
                GATEWAY,
                epoch=3,
            )
        assert at.role.places[0].machine.gateway_epoch == 3
        news(at, "p0", lost=(Address("p0", 1, ""),), epoch=2, more=9)
        assert ("p0", 1) not in at.actor.lost and at.role.places[0].machine.gateway_epoch == 3


def test_before_its_welcome_it_follows_nobody() -> None:
    """No clock would end that, if the one that spoke fell silent."""
    with member() as at:
        in_state(at.role.places[0].machine, S.JOINING)
        at.role.places[0].machine.gateway_epoch = 0
        news(at, epoch=3)
        assert at.role.places[0].machine.gateway_epoch == 0


def test_who_is_refused_says_so_and_is_silent() -> None:
    with member() as at:
        expelled = at.role.on_expelled = mock.Mock()
        rejected = at.role.on_rejected = mock.Mock()
        ack(at, 0, known=False)
        at.tell("on_refused", JoinRefused(epoch=2, reason="another life"), GATEWAY)
        expelled.assert_not_called()
        at.tell("on_refused", JoinRefused(epoch=1, reason="it was lost"), GATEWAY)
        expelled.assert_called_once_with("it was lost")
        rejected.assert_not_called()
        assert not [name for name in at.actor.timers if name.startswith(("MEMBERSHIP", "Member."))]


def test_who_never_was_a_member_is_rejected() -> None:
    with member() as at:
        expelled = at.role.on_expelled = mock.Mock()
        rejected = at.role.on_rejected = mock.Mock()
        in_state(at.role.places[0].machine, S.JOINING)
        at.tell("on_refused", JoinRefused(epoch=1, reason="it does not fit"), GATEWAY)
        rejected.assert_called_once_with("it does not fit")
        expelled.assert_not_called()


def test_who_is_not_known_or_has_missed_news_joins_again() -> None:
    with member() as at:
        version = at.role.places[0].version
        assert version > 0
        assert ack(at, version, cluster_s=9.0) == []
        assert at.actor.cluster_s() == pytest.approx(9.0)
        assert len(joins(ack(at, version + 1))) == 1
        assert joins(ack(at, version + 1)) == [], "it has asked"
        at.cluster.pass_time(1.1 * TIMING.retry_interval_s)
        assert len(joins(at.messages())) == 1, "which may be lost"
        welcome(at)
        assert len(joins(ack(at, 0, known=False))) == 1
        welcome(at)
        news(at, more=5)
        assert joins(ack(at, at.role.places[0].version - 2)) == []


def test_a_gateway_that_is_silent_is_doubted_and_joined_again() -> None:
    with member() as at:
        doubt = at.actor.doubt = mock.Mock()
        ack(at, at.role.places[0].version)
        at.cluster.pass_time(TIMING.lost_after_s - 0.01)
        assert not joins(at.messages()) and not doubt.called
        at.cluster.pass_time(0.02)
        assert len(joins(at.messages())) == 1
        assert [call.args[0].instance_id for call in doubt.call_args_list] == [GATEWAY]


def test_news_count_once_and_only_newer_ones() -> None:
    with member() as at:
        version = at.role.places[0].version
        news(at, "p0", more=0)
        assert at.role.places[0].version == version and ("p0", 1) not in at.actor.lost
        news(at)
        assert at.role.places[0].version == version + 1
        news(at, "p0")
        assert ("p0", 1) in at.actor.lost, "it has left"
        assert ("d0", 1) not in at.actor.lost
        assert ("e0", 1) not in at.actor.lost


def test_a_list_without_news_of_one_that_is_lost_elsewhere_is_answered() -> None:
    """It may answer a join from before that was learned: nothing else would report it."""
    with member() as at:
        at.actor.lost.add(("p0", 1))
        (join,) = joins(news(at, more=0))
        assert join.lost == (("p0", 1),)
        assert not joins(news(at, "p0", more=0))


def test_who_is_missing_with_a_new_registry_has_not_left_it() -> None:
    with member() as at:
        news(at, more=50)
        news(at, "p0", epoch=2, more=1 - at.role.places[0].version)
        assert (at.role.places[0].version, at.role.places[0].machine.gateway_epoch) == (1, 2)
        assert ("p0", 1) not in at.actor.lost and ("p0", 1) in at.actor.listed
        at.cluster.pass_time(absent_after_s(TIMING) - 0.1)
        assert ("p0", 1) in at.actor.listed
        news(at, "p0", epoch=2)
        at.cluster.pass_time(0.2)
        assert at.actor.listed == {("e0", 1), ("d0", 1)}


def test_a_later_life_of_a_peer_ends_its_earlier_ones() -> None:
    with member() as at:
        later = msgspec.structs.replace(present(at, "e0", "d0")[0], address=Address("p0", 3, "new"))
        with mock.patch.object(at.actor, "connect") as connect:
            at.tell(
                "on_membership",
                Membership(version=99, instances=(*present(at, "p0"), later), lost=()),
                GATEWAY,
            )
        connect.assert_called_once_with(later.address)
        assert at.actor.lost == {("p0", 1)} and at.actor.peers["p0", 3] == later


def test_how_bytes_move_is_logged_once_for_each_peer_that_gets_some() -> None:
    with member() as at:
        at.actor.peers.clear()
        with mock.patch.object(at.actor.log, "info") as info:
            news(at)
            news(at)
        assert info.call_args_list == [
            mock.call("rows and KV move over", transport=mock.ANY, peer="p0")
        ]


def test_a_pair_that_falls_back_is_a_warning() -> None:
    with member() as at:
        at.actor.peers.clear()
        reason = "not cuda: p0 lacks it"
        with (
            mock.patch("epd.scheduling.pairing.fallback", return_value=reason),
            mock.patch.object(at.actor.log, "warning") as warning,
        ):
            news(at)
        assert warning.call_args_list == [
            mock.call("rows and KV move over", transport=mock.ANY, peer="p0", reason=reason)
        ]


def test_how_bytes_move_within_an_instance_is_no_news() -> None:
    with member("1e1pd", "pd0") as at:
        at.actor.peers.clear()
        with mock.patch.object(at.actor.log, "info") as info:
            news(at)
        assert [call.kwargs["peer"] for call in info.call_args_list] == ["e0"]


def test_who_drains_says_so_at_once_and_ever_after_and_who_leaves_is_silent() -> None:
    with member() as at:
        at.said.clear()
        at.do(at.role.drain)
        assert [getattr(m, "is_draining", None) for m in at.messages()] == [True]
        at.cluster.pass_time(1.1 * TIMING.heartbeat_interval_s)
        assert [getattr(m, "is_draining", None) for m in at.messages()] == [True] * 2
        ack(at, 0, known=False)
        at.said.clear()
        at.do(at.role.leave)
        assert at.said == [(GATEWAY, Leave())]
        assert not [name for name in at.actor.timers if name.startswith(("MEMBERSHIP", "Member."))]
        at.cluster.pass_time(2 * TIMING.lost_after_s)
        assert len(at.said) == 1


def test_who_was_never_welcomed_has_nothing_to_drain_and_leaves() -> None:
    with member() as at:
        in_state(at.role.places[0].machine, S.JOINING)
        at.said.clear()
        at.do(at.role.drain)
        assert at.messages() == [Leave()] and at.role.places[0].machine.state is S.LEFT


def test_who_drains_and_is_forgotten_asks_again_and_leaves_in_time() -> None:
    with member() as at:
        at.do(at.role.drain)
        assert len(joins(ack(at, 0, known=False))) == 1
        at.cluster.pass_time(TIMING.drain_timeout_s + TIMING.move_timeout_s - 0.01)
        assert Leave() not in at.messages()
        refusal = at.actor.refusal(GATEWAY, "encode", 0, 1)
        assert refusal == Failure(FailureKind.AWAY, "the encode instance is draining")
        at.cluster.pass_time(0.02)
        assert Leave() in at.messages()
