"""The registry: who may join, what it is told, and who counts as there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.fsm.instance import HeartbeatsEnded, Instance, S
from epd.messages import (
    PROTOCOL_VERSION,
    Address,
    Heartbeat,
    HeartbeatAck,
    InstanceInfo,
    Join,
    JoinDeferred,
    JoinRefused,
    Leave,
    Load,
    Membership,
    TransportOffer,
    Welcome,
)
from epd.roles.gateway.registry import ACKS_BEFORE_LOST, MAX_GONE, MAX_LOST, MAX_OUTSIDE, Registry
from epd.roles.member import absent_after_s
from epd_lab.sim.cluster import FINGERPRINT, GATEWAY
from epd_lab.sim.engine import golden
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

TIMING = DEFAULTS.timing


def info_of(at: Desk, name: str = "e0", epoch: int = 1, **other: Any) -> InstanceInfo:
    """Of a life of this instance, as it would say it; a name that is new is like e0."""
    known = (lives(at, name) or lives(at, "e0"))[0].info
    return msgspec.structs.replace(known, address=Address(name, epoch, "there"), **other)


def join(at: Desk, info: InstanceInfo, **other: Any) -> list[Any]:
    """It asks; what it is told."""
    asked = msgspec.structs.replace(
        Join(protocol_version=PROTOCOL_VERSION, model_fingerprint=FINGERPRINT, info=info), **other
    )
    at.said.clear()
    name, epoch = info.address.instance_id, info.address.epoch
    at.do(at.role.on_join, SimpleNamespace(source=name, epoch=epoch, message=asked))
    return [message for to, message in at.said if to == name]


def states(at: Desk) -> dict[str, S]:
    return {instance.key: instance.state for instance in at.role.instances}


def test_who_joins_is_welcomed_and_told_of_all_and_all_of_it() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        at.cluster.pass_time(0.7)
        version = at.role.version
        info = info_of(at, "e7", 3)
        welcome, membership, news = join(at, info)
        cluster_s = at.actor.cluster_s()
        assert welcome == Welcome(
            epoch=3,
            heartbeat_interval_s=TIMING.heartbeat_interval_s,
            cluster_s=cluster_s,
            wall_s=at.actor.clock.wall_s(),
            dialled=info.dialled,
        )
        assert isinstance(membership, Membership) and isinstance(news, Membership)
        assert (membership.version, news.version) == (version, version + 1)
        assert info in news.instances and len(news.instances) == 4
        for name in ("e0", "p0", "d0"):
            assert (name, news) in at.said
        assert at.actor.is_lost(Address("e7", 2, "")), "an earlier life would be over"
        at.cluster.pass_time(0.9 * TIMING.suspect_after_s)
        assert states(at)["e7:3"] is S.HEALTHY
        at.cluster.pass_time(0.2 * TIMING.suspect_after_s)
        assert states(at)["e7:3"] is S.SUSPECT
        at.cluster.pass_time(TIMING.lost_after_s - TIMING.suspect_after_s)
        assert states(at)["e7:3"] is S.LOST, "it has never beaten its heart"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 1}, (str(PROTOCOL_VERSION), "protocol")),
        ({"model_fingerprint": "another"}, (FINGERPRINT, "another")),
    ],
)
def test_another_version_or_model_is_refused(said: Any, told: Any) -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        (refused,) = join(at, info_of(at, "e7", 3), **said)
        assert isinstance(refused, JoinRefused) and refused.epoch == 3
        assert all(text in refused.reason for text in told)
        assert "e7:3" not in states(at)


OTHER_ROWS = msgspec.structs.replace(golden.ROW_CONTRACT, num_deepstack=2)
OTHER_KV = msgspec.structs.replace(golden.KV_LAYOUT, dtype="float16")
MISFITS = [
    ("e7", "e0", {"row_contract": OTHER_ROWS}, "row_contract"),
    ("d7", "d0", {"kv_layout": OTHER_KV}, "kv_layout"),
    ("d7", "d0", {"transports": (TransportOffer(name="tcp", domain="elsewhere"),)}, "p0 offers"),
]


@pytest.mark.parametrize(("name", "like", "other", "told"), MISFITS)
def test_who_does_not_fit_one_of_the_others_is_refused(
    name: str, like: str, other: dict[str, Any], told: str
) -> None:
    """One of those that are there: who is lost does not count, nor who has nothing to compare."""
    with desk("1e1p1d", GATEWAY, "registry") as at:
        info = msgspec.structs.replace(info_of(at, like), address=Address(name, 1, ""), **other)
        (refused,) = join(at, info)
        assert isinstance(refused, JoinRefused) and told in refused.reason
        for gone in ("d0", "e0", "p0"):
            leave = SimpleNamespace(source=gone, epoch=1, message=Leave())
            at.do(at.role.on_leave, leave)
        assert isinstance(join(at, info)[0], Welcome)


def test_a_message_for_another_is_not_heard() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        message = Join(
            protocol_version=PROTOCOL_VERSION, model_fingerprint=FINGERPRINT, info=info_of(at, "e7")
        )
        for source, epoch in (("e8", 1), ("e7", 2)):
            at.said.clear()
            received = SimpleNamespace(source=source, epoch=epoch, message=message)
            at.do(at.role.on_join, received)
            assert not at.said and "e7:1" not in states(at)
        assert at.actor.counters["join_of_another"] == 2


def test_a_later_life_ends_the_earlier_which_is_answered_on_a_line_of_its_own() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        lost = mock.Mock()
        at.role.on_lost = lost
        assert isinstance(join(at, info_of(at, "e0", 2))[0], Welcome)
        assert states(at) == {"e0:2": S.HEALTHY, "d0:1": S.HEALTHY, "p0:1": S.HEALTHY}
        assert [call.args[0].info.address.epoch for call in lost.call_args_list] == [1]
        assert [call.args[1] for call in lost.call_args_list] == [False], "its next life came"
        with mock.patch.object(at.actor.bus, "connect") as connect:
            assert join(at, info_of(at, "e0", 1)) == []
        assert [call.args[0].instance_id for call in connect.call_args_list] == ["e0:1"]
        ((name, refused),) = at.said
        assert name == "e0:1" and refused.epoch == 1 and "given this epoch up" in refused.reason
        assert states(at)["e0:2"] is S.HEALTHY and not at.actor.is_lost(Address("e0", 2, ""))


def test_a_stranger_under_a_living_name_is_refused_and_the_living_goes_on() -> None:
    """F78: at both ends, with what to do; a heartbeat that may be late decides nothing."""
    with desk("1e1p1d", GATEWAY, "registry") as at:
        stranger, (member,) = info_of(at, "e0", 2, lineage="b"), lives(at, "e0")
        before = at.role.version
        assert join(at, stranger) == [at.said[0][1]] and at.role.version == before + 1
        assert (
            "e0:2",
            JoinDeferred(epoch=2, holder=member.info, dialled=stranger.dialled),
        ) in at.said
        (waits,) = at.role.outside
        assert (waits.info, waits.state) == (stranger, "AWAITING_NAME")
        assert waits.reason.startswith("waits for e0 (pid ")
        beat(at, version=before)
        assert not any(isinstance(message, JoinRefused) for _, message in at.said)
        beat(at)
        ((_, refused),) = [said for said in at.said if said[0] == "e0:2"]
        assert isinstance(refused, JoinRefused) and "--id-prefix" in refused.reason
        (told,) = at.role.outside
        assert (told.info, told.state, told.reason) == (stranger, "REFUSED", refused.reason)
        assert sum("join refused" in one for one in at.cluster.node(GATEWAY).warnings) == 1
        assert lives(at, "e0") == [member] and member.takes_work


def test_a_stranger_has_the_name_when_the_other_is_lost_has_left_or_is_known_to_be_gone() -> None:
    for way in ("lost", "left", "gone"):
        with desk("1e1p1d", GATEWAY, "registry") as at:
            stranger, (member,) = info_of(at, "e0", 2, lineage="b"), lives(at, "e0")
            join(at, stranger)
            if way == "left":
                at.do(at.role.on_leave, SimpleNamespace(source="e0", epoch=1, message=Leave()))
            elif way == "lost":
                at.do(at.role.fire, member, HeartbeatsEnded())
            answers = join(at, stranger, lost=(("e0", 1),) * (way == "gone"))
            assert isinstance(answers[0], Welcome), way
            assert states(at)["e0:2"] is S.HEALTHY and not at.role.outside
            assert member.terminal and member.reason, way


def test_who_asks_for_a_name_and_dies_is_forgotten_and_so_many_may_ask() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        for epoch in range(2, MAX_OUTSIDE + 3):
            join(at, info_of(at, "e0", epoch, lineage="b"))
        assert len(at.role.outside) == MAX_OUTSIDE
        assert at.actor.counters["join_not_heard"] == 1
        for epoch in range(2, MAX_OUTSIDE + 2):
            at.do(at.role.fire, at.machine(Instance, f"e0:{epoch}"), HeartbeatsEnded())
        assert not at.role.outside and states(at)["e0:1"] is S.HEALTHY


def lives(at: Desk, name: str) -> list[Instance]:
    return [one for one in at.role.instances if one.info.address.instance_id == name]


def test_who_joins_twice_is_welcomed_twice_and_is_no_news() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        version = at.role.version
        welcome, membership = join(at, info_of(at))
        assert isinstance(welcome, Welcome) and membership.version == version
        assert [to for to, _ in at.said] == ["e0", "e0"]


@pytest.mark.parametrize(("was_member", "late"), [(True, True), (True, False), (False, True)])
def test_who_was_given_up_by_its_peers_is_refused(*, was_member: bool, late: bool) -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        at.cluster.pass_time(absent_after_s(TIMING) - (0.0 if late else 1.1))
        answer = join(at, info_of(at, "e7"), was_member=was_member)[0]
        assert isinstance(answer, JoinRefused if was_member and late else Welcome)
        assert ("e7:1" in states(at)) == isinstance(answer, Welcome)


def beat(at: Desk, name: str = "e0", epoch: int = 1, **said: Any) -> list[Any]:
    message = msgspec.structs.replace(
        Heartbeat(load=Load(open_requests=5), version=at.role.version), **said
    )
    at.said.clear()
    at.do(at.role.on_heartbeat, SimpleNamespace(source=name, epoch=epoch, message=message))
    return [message for to, message in at.said if to == name]


def test_who_is_not_a_member_is_told_so_by_its_heartbeat() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        for name, epoch in (("e7", 1), ("e0", 2)):
            (answer,) = beat(at, name, epoch)
            assert answer == HeartbeatAck(
                known=False, version=at.role.version, cluster_s=at.actor.cluster_s()
            )
        at.do(at.role.on_leave, SimpleNamespace(source="e0", epoch=1, message=Leave()))
        (answer,) = beat(at)
        assert not answer.known


def test_a_heartbeat_is_acknowledged_a_few_times_and_when_news_were_missed() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        beats = []
        at.role.heartbeat_listeners += (beats.append,)
        join(at, info_of(at, "e7"))
        (instance,), answers = lives(at, "e7"), beat(at, "e7")
        assert answers == [] and instance.load == Load(open_requests=5) and beats == [instance]
        version = at.role.version
        assert beat(at, "e7", version=version - 1) == [
            HeartbeatAck(known=True, version=version, cluster_s=at.actor.cluster_s())
        ]
        at.cluster.pass_time(TIMING.lost_after_s / ACKS_BEFORE_LOST)
        assert [len(beat(at, "e7")) for _ in range(2)] == [1, 0]
        assert instance.takes_work
        beat(at, "e7", is_draining=True)
        assert instance.state is S.DRAINING and not instance.takes_work


def test_who_leaves_is_forgotten_and_only_its_own_life_can() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        roles = [mock.Mock(), mock.Mock()]
        at.actor.components += roles
        at.do(at.role.on_leave, SimpleNamespace(source="e0", epoch=2, message=Leave()))
        assert states(at)["e0:1"] is S.HEALTHY
        with mock.patch.object(at.actor.bus, "disconnect") as disconnect:
            at.do(at.role.on_leave, SimpleNamespace(source="e0", epoch=1, message=Leave()))
        disconnect.assert_called_once_with("e0")
        address = at.cluster.registered("e0").info.address
        for role in roles:
            role.peer_lost.assert_called_once_with(address)
        news = [message for to, message in at.said if to == "p0"]
        assert address in news[-1].lost and "e0" not in {
            i.address.instance_id for i in news[-1].instances
        }
        assert not any("instance is gone" in line for line in at.cluster.node(GATEWAY).warnings)


def test_that_an_instance_is_lost_is_a_warning_and_its_successor_stays_connected() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        bus = mock.Mock()
        with (
            mock.patch.object(at.actor.bus, "connect", bus.connect),
            mock.patch.object(at.actor.bus, "disconnect", bus.disconnect),
        ):
            join(at, info_of(at, "e0", 2))
        assert [name for name, *_ in bus.mock_calls] == ["disconnect", "connect"]
        assert not at.actor.is_lost(Address("e0", 2, ""))
        assert any("instance is gone" in line for line in at.cluster.node(GATEWAY).warnings)


def test_what_is_asked_of_the_members() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        registry = at.role
        e0, p0 = (at.cluster.registered(name).info.address for name in ("e0", "p0"))
        stranger = Address("x", 1, "")
        assert registry.transport_between(e0, e0) == "local"
        assert registry.transport_between(stranger, stranger) == "local"
        assert registry.transport_between(e0, p0) not in ("", "local")
        assert registry.transport_between(e0, stranger) == ""
        assert registry.transport_between(stranger, p0) == ""
        assert registry.is_present("e0", 1)
        assert not registry.is_present("e0", 2) and not registry.is_present("x", 1)
        assert registry.has_known("a role of tomorrow"), "members of another registry may join"
        at.cluster.pass_time(absent_after_s(TIMING) + 0.1)
        assert registry.has_known("encode") and not registry.has_known("a role of tomorrow")
        at.do(registry.on_leave, SimpleNamespace(source="e0", epoch=1, message=Leave()))
        assert not registry.is_present("e0", 1) and registry.has_known("encode")
        assert [i.key for i in registry.takers()] == ["d0:1", "p0:1"]


def test_a_registry_that_nobody_listens_to_works() -> None:
    alone: Any = Registry(mock.MagicMock(), FINGERPRINT, TIMING)
    assert alone.on_heard(mock.Mock()) is None
    assert alone.on_change() is None and alone.on_lost(mock.Mock(), False) is None


def test_what_an_earlier_registry_gave_up_is_over_here_too() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        told = (("p0", 1), ("d0", 9), ("e7", 2))
        assert Welcome in map(type, join(at, info_of(at, "e0"), lost=told))
        assert states(at)["p0:1"] is S.LOST and states(at)["d0:1"] is S.HEALTHY
        assert {("p0", 1), ("d0", 9), ("e7", 2)} <= at.actor.lost
        (refused,) = join(at, info_of(at, "e7", 2))
        assert isinstance(refused, JoinRefused)
        assert isinstance(join(at, info_of(at, "e7", 3))[0], Welcome)


def test_two_lives_of_one_name_in_a_join_are_both_over() -> None:
    """The one that is a member here, and its next, which comes later."""
    with desk("1e1p1d", GATEWAY, "registry") as at:
        assert Welcome in map(type, join(at, info_of(at, "e0"), lost=(("p0", 1), ("p0", 2))))
        assert states(at)["p0:1"] is S.LOST and {("p0", 1), ("p0", 2)} <= at.actor.lost
        (refused,) = join(at, info_of(at, "p0", 2))
        assert isinstance(refused, JoinRefused)
        assert isinstance(join(at, info_of(at, "p0", 3))[0], Welcome)


def test_so_many_who_are_gone_lost_or_refused_are_remembered() -> None:
    with desk("1e1p1d", GATEWAY, "registry") as at:
        for epoch in range(2, MAX_OUTSIDE + 4):
            with mock.patch.object(at.actor.bus, "disconnect") as disconnect:
                join(at, info_of(at, "e8", epoch), model_fingerprint="another")
        assert at.role.outside[0].info.address.epoch == 4
        assert mock.call("e8:3") in disconnect.call_args_list
        for number in range(MAX_LOST + 1):
            name = f"e{9 + number}"
            join(at, info_of(at, name))
            at.do(at.role.on_leave, SimpleNamespace(source=name, epoch=1, message=Leave()))
        assert len(at.messages()[-1].lost) == MAX_LOST
        gone = [key for key, state in states(at).items() if state is S.LEFT]
        assert len(gone) == MAX_GONE + 1 and "e9:1" not in gone
