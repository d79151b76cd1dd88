"""An instance behind several gateways: a place at each, one life for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from epd.fsm.membership import S
from epd.messages import Address, HeartbeatAck, JoinRefused, Leave, Membership, Welcome
from epd.transport.base import Received
from epd_lab.sim.engine.golden import Image
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS, simulated

TWO = replace(DEFAULTS, num_gateways=2)
A, B = "gateway", "gateway1"


@pytest.fixture
def at() -> Iterator[Desk]:
    with desk("2e1p1d", "e0", "member", TWO) as found:
        yield found


def states(at: Desk) -> dict[str, S]:
    return {place.name: place.machine.state for place in at.role.places}


def test_it_is_a_member_at_each_and_has_the_time_of_each(at: Desk) -> None:
    assert states(at) == {A: S.MEMBER, B: S.MEMBER}
    assert at.actor.offsets[A] - at.actor.offsets[B] == pytest.approx(86400.0, abs=0.1)
    for name in (A, B):
        gateway = at.cluster.node(name).gateway
        assert gateway is not None
        due_s = gateway.actor.cluster_s() + 20.0
        assert at.actor.until(due_s, name) == pytest.approx(20.0, abs=0.1)
        assert gateway.registry.takers()[0].load.num_gateways == 2


def test_a_life_that_one_declares_lost_is_over_at_the_other(at: Desk) -> None:
    listed = [at.cluster.node(name).gateway.registry for name in (A, B)]  # type: ignore[union-attr]
    at.cluster.world.network.block("p0", B)
    at.cluster.pass_time(TWO.timing.lost_after_s + 0.3)
    assert [registry.is_present("p0", 1) for registry in listed] == [False, False]
    at.cluster.pass_time(2.0)
    assert [registry.is_present("p0", 2) for registry in listed] == [True, False]
    assert at.actor.is_lost(Address("p0", 1, "")) and at.actor.is_listed(Address("p0", 2, ""))
    at.cluster.world.network.heal("p0", B)
    at.cluster.pass_time(1.0)
    assert [registry.is_present("p0", 2) for registry in listed] == [True, True]


def test_a_silent_gateway_is_forsaken_beside_one_that_speaks_and_has_its_life_back(
    at: Desk,
) -> None:
    role = mock.Mock(live=dict)
    at.actor.components.append(role)
    at.cluster.world.stall(B)
    at.cluster.pass_time(1.5 * TWO.timing.lost_after_s)
    assert states(at) == {A: S.MEMBER, B: S.FORSAKEN}
    role.peer_lost.assert_called_once_with(Address(B, 1, ""))
    refusal = at.actor.refusal(B, "encode", 0, 1)
    assert refusal is not None and "does not hear" in refusal.reason
    assert at.actor.refusal(A, "encode", 0, 1) is None
    at.cluster.world.resume(at.cluster.node(B).process)
    at.cluster.pass_time(1.0)
    assert states(at) == {A: S.MEMBER, B: S.MEMBER}
    assert at.actor.refusal(B, "encode", 0, 1) is None
    assert at.cluster.node("e0").process.epoch == 1


def test_while_no_gateway_speaks_nothing_is_forsaken(at: Desk) -> None:
    for name in (A, B):
        at.cluster.world.stall(name)
    at.cluster.pass_time(2 * TWO.timing.lost_after_s)
    assert states(at) == {A: S.CUT_OFF, B: S.CUT_OFF}
    at.cluster.world.resume(at.cluster.node(A).process)
    at.cluster.pass_time(1.0)
    assert states(at) == {A: S.MEMBER, B: S.FORSAKEN}


def test_who_is_a_member_elsewhere_is_not_taken_for_gone_by_an_empty_registry(at: Desk) -> None:
    """B begins anew, and does not hear p0 until all who live must have joined."""
    timing, world = TWO.timing, at.cluster.world
    world.kill(B)
    world.network.block("p0", B)
    world.network.block(B, "p0")
    at.cluster.cluster.restart_later(B, 0.2)
    at.cluster.pass_time(4 * timing.lost_after_s)
    assert at.actor.is_listed(Address("p0", 1, "")) and states(at)[B] is S.MEMBER
    world.network.heal_all()
    at.cluster.pass_time(2.0)
    registry = at.cluster.node(B).gateway.registry  # type: ignore[union-attr]
    assert registry.is_present("p0", 1), "its life has gone on"


def test_a_gateway_has_its_name_from_its_first_answer(at: Desk) -> None:
    at.do(at.role.join, [*(place.address for place in at.role.places), dialled("tcp://c:1")])
    assert states(at)["tcp://c:1"] is S.JOINING
    welcome = Welcome(
        epoch=1, heartbeat_interval_s=0.4, cluster_s=7.0, wall_s=7.0, dialled="tcp://c:1"
    )
    at.do(at.actor.take, Received("the-third", 5, welcome, ()))
    assert states(at) == {A: S.MEMBER, B: S.MEMBER, "the-third": S.MEMBER}
    assert at.actor.until(17.0, "the-third") == pytest.approx(10.0)
    before = at.actor.counters["message_of_stranger"]
    stranger = welcome.but(dialled="tcp://d:1")
    at.do(at.actor.take, Received("the-fourth", 5, stranger, ()))
    assert at.actor.counters["message_of_stranger"] == before + 1


def dialled(endpoint: str) -> Address:
    return Address(endpoint, 0, endpoint, "")


def test_another_gateway_at_an_endpoint_follows_the_former_one(at: Desk) -> None:
    """As behind a balancer of connections: what the former one asked for has no reader."""
    role = mock.Mock(live=dict)
    at.actor.components.append(role)
    welcome = Welcome(
        epoch=1, heartbeat_interval_s=0.4, cluster_s=7.0, wall_s=7.0, dialled=f"sim://{B}"
    )
    at.do(at.actor.take, Received("another", 5, welcome, ()))
    role.peer_lost.assert_called_once_with(Address(B, 1, ""))
    assert states(at) == {A: S.MEMBER, "another": S.MEMBER}


def test_a_gateway_that_is_none_any_more_is_left_when_it_is_silent(at: Desk) -> None:
    only = [at.role.places[0].address]
    at.do(at.role.join, only)
    assert states(at)[B] is S.MEMBER, "it speaks"
    at.cluster.world.stall(B)
    at.cluster.pass_time(1.5 * TWO.timing.lost_after_s)
    at.said.clear()
    at.do(at.role.join, only)
    assert states(at) == {A: S.MEMBER} and (B, Leave()) in at.said
    assert B not in at.actor.offsets and list(at.actor.memberships) == [A]


def test_one_gateway_that_refuses_it_ends_nothing(at: Desk) -> None:
    rejected, expelled = mock.Mock(), mock.Mock()
    at.role.on_rejected, at.role.on_expelled = rejected, expelled
    at.do(at.role.join, [*(place.address for place in at.role.places), dialled("tcp://c:1")])
    no = JoinRefused(epoch=1, reason="models differ", dialled="tcp://c:1")
    at.do(at.actor.take, Received("the-third", 5, no, ()))
    assert states(at)["the-third"] is S.REJECTED
    rejected.assert_not_called()
    at.do(at.role.join, [*(place.address for place in at.role.places), dialled("tcp://d:1")])
    over = JoinRefused(epoch=1, reason="lost", dialled="tcp://d:1", is_over=True)
    at.do(at.actor.take, Received("the-fourth", 5, over, ()))
    expelled.assert_called_once_with("lost")


def test_of_two_lives_of_a_peer_the_later_one_counts_whoever_lists_them(at: Desk) -> None:
    (info,) = (i.info for i in at.cluster.gateway.registry.instances if i.key == "p0:1")
    later, earlier = (
        info.but(address=info.address.but(instance_id="p7", epoch=epoch)) for epoch in (5, 4)
    )
    for name, told in ((A, later), (B, earlier)):
        place = next(one for one in at.role.places if one.name == name)
        news = Membership(version=place.version + 1, instances=(told,), lost=())
        at.do(at.actor.take, Received(name, 1, news, ()))
    assert at.actor.is_listed(later.address) and at.actor.is_lost(earlier.address)
    assert states(at)[B] is S.REJOINING, "it is to learn that"


def test_acknowledgements_are_of_the_gateway_that_sends_them(at: Desk) -> None:
    first, second = at.role.places
    news = HeartbeatAck(known=True, version=second.version + 1, cluster_s=5.0)
    at.do(at.actor.take, Received(B, 1, news, ()))
    assert (first.machine.state, second.machine.state) == (S.MEMBER, S.REJOINING)


def test_equal_images_of_two_gateways_meet_at_one_encoder() -> None:
    with simulated("3e1p1d", TWO) as cluster:
        records = [cluster.ask(Image(f"image {n // 2}")) for n in range(16)]
        cluster.pass_time(5.0)
        assert all(record.finish_reason for record in records)
        assert {record.gateway for record in records} == {f"{A}:1", f"{B}:1"}
        encoders = [cluster.instance(f"e{n}").encode for n in range(3)]
        assert sum(encoder.num_encoded for encoder in encoders if encoder is not None) == 8
