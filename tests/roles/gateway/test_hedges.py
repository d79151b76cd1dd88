"""An image that is late: prefill says so, the gateway asks a second encoder, the first one wins."""

from __future__ import annotations

from unittest import mock

import pytest

from epd.fsm.embedding import S
from epd.fsm.incoming import CancelAcked
from epd.fsm.incoming import S as Room
from epd.fsm.room import PeerLost
from epd.messages import (
    AbortEncode,
    AbortRequest,
    EncodeAccepted,
    EncodeRequest,
    RoomAdded,
    RoomWanted,
)
from epd.roles.gateway.elsewhere import Elsewhere, HedgeBudget
from epd.roles.prefill.lateness import Lateness
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from tests.roles.desk import desk, gateway
from tests.roles.gateway.test_elsewhere import IMAGES, Asked, asked
from tests.roles.prefill.test_embeddings import BIG, E0, Pool, dismissed, pool
from tests.roles.simulated import DEFAULTS

FLOOR_S = 0.25


def late(own: Pool, room: str = "a") -> None:
    """Its rows are wanted, and take longer than those of all the others did."""
    own.usual()
    own.want(room)
    own.at.cluster.pass_time(FLOOR_S + 0.01)


def hedge(own: Pool) -> None:
    late(own)
    item = own.item("a.1", encoder="e1")
    own.at.do(lambda: own.role.add_room("a", item, is_rival=True))


def test_what_is_late_is_asked_for_once() -> None:
    with pool() as own:
        own.want("z", Image("unmeasured"))
        own.at.cluster.pass_time(FLOOR_S + 0.01)
        assert not own.asked, "nobody knows how long loads take"
        late(own)
        ((room, encoder, failure, waited_s),) = own.asked
        assert (room, encoder, failure) == ("a", E0, None)
        assert waited_s == pytest.approx(FLOOR_S, abs=0.02)
        own.at.cluster.pass_time(1.0)
        assert len(own.asked) == 1


@pytest.mark.parametrize(("first", "count"), [("a", "hedges_lost"), ("a.1", "hedges_won")])
def test_the_first_wins_and_all_memory_of_the_other_comes_back(first: str, count: str) -> None:
    with pool() as own:
        hedge(own)
        second = {"a": "a.1", "a.1": "a"}[first]
        assert own.role.live()["slots"] == 2 and own.role.live()["slot_promises"] == 1
        own.arrive(first)
        assert own.heard == [("ready", "a")] and own.at.actor.counters[count] == 1
        assert own.role.live()["slot_promises"] == 0
        assert own.transfer(second).state is Room.CANCEL_PENDING
        own.promise("big", BIG)
        assert len(own.heard) == 1, "its encoder may still write"
        own.arrive(second)
        assert own.heard == [("ready", "a"), "big"] and own.role.live()["slots"] == 0
        assert own.unwant("a") and own.role.live()["embedding_references"] == 0


def test_what_the_second_delivers_while_it_is_checked_comes_back() -> None:
    """PUBLISHING ends with its outcome, and nobody wants that any more."""
    with pool() as own:
        hedge(own)
        embedding = own.embedding()
        own.arrive("a")
        delivered = own.transfer("a.1")
        own.at.do(own.role.concluded, delivered, None)
        assert embedding.state is S.RESIDENT and embedding.room == "a"
        own.promise("big", BIG)
        assert own.role.live()["slots"] == 0 and own.heard[-1] == "big"


@pytest.mark.parametrize("lost", ["a", "a.1"])
def test_of_two_the_other_goes_on(lost: str) -> None:
    with pool() as own:
        hedge(own)
        own.hear(lost, PeerLost())
        assert len(own.asked) == 1 and own.role.live()["slot_promises"] == 0
        own.arrive({"a": "a.1", "a.1": "a"}[lost])
        assert own.heard == [("ready", "a")]


def test_a_second_load_gets_only_slots_that_nobody_needs() -> None:
    with pool() as own:
        late(own)
        own.promise("all", *[Image(f"other{n}") for n in range(12)])
        item = own.item("a.1", encoder="e1")
        own.at.said.clear()
        own.at.do(lambda: own.role.add_room("a", item, is_rival=True))
        assert dismissed(own) == ["a.1"] and own.at.whole.incoming.find("a.1") is None
        own.arrive("a")
        assert ("ready", "a") in own.heard


def test_who_leaves_in_the_middle_takes_both_back() -> None:
    with pool() as own:
        hedge(own)
        own.unwant("a")
        assert own.role.live()["slot_promises"] == own.role.live()["embedding_references"] == 0
        states = {own.transfer(room).state for room in ("a", "a.1")}
        assert states == {Room.CANCEL_PENDING}


def test_a_second_load_that_is_nobodys_is_stopped_for_those_who_follow() -> None:
    """Both encoders may never have heard of who left."""
    with pool() as own:
        hedge(own)
        own.want("b", encoder="e1")
        own.unwant("a")
        for room in ("a", "a.1"):
            assert own.transfer(room).state is Room.CANCEL_PENDING
            own.hear(room, CancelAcked())
        own.arrive("b")
        assert own.heard == [("ready", "b")]


def test_an_encoder_that_is_gone_does_not_say_what_is_late() -> None:
    with pool() as own:
        own.usual()
        own.at.do(own.at.part(Lateness).peer_lost, E0)
        own.want("a", encoder="e1")
        own.at.cluster.pass_time(FLOOR_S + 0.01)
        assert not own.asked


# --- the gateway ----------------------------------------------------------------------------------


def says_late(one: Asked, index: int = 1, waited_s: float = 0.3, attempt: int = 1) -> list[object]:
    encoder = one.machine.placement.encoders[index]
    wanted = RoomWanted(
        request_id=one.key, attempt=attempt, index=index, encoder=encoder, waited_s=waited_s
    )
    one.at.said.clear()
    one.at.do(one.at.actor.take, Received(one.prefill, 1, wanted, ()))
    return list(one.at.messages())


def test_a_second_encoder_is_asked_and_the_first_is_not_done_with_it() -> None:
    with asked() as one:
        former, books = one.machine.placement.encoders[1], one.at.whole.dispatcher
        before = books.books.at(former.instance_id).num_patches
        added, request = says_late(one)
        assert isinstance(request, EncodeRequest) and isinstance(added, RoomAdded)
        assert request.room == added.room == f"{one.room(1)}.1" and added.is_rival
        assert added.encoder == one.machine.placement.encoders[1] != former
        assert books.books.at(former.instance_id).num_patches == before
        assert books.offers.wants(one.machine, one.room(1))
        counters = one.at.actor.counters
        assert (one.machine.attempt, counters["hedges_asked"], counters["hedges"]) == (1, 1, 1)
        one.at.do(one.at.part(Elsewhere).peer_silent, former)
        one.at.do(one.at.part(Elsewhere).peer_silent, added.encoder)
        assert one.machine.placement.encoders[1] == added.encoder, "prefill tells which comes"


def test_what_is_late_may_be_the_offer_itself_which_is_repeated() -> None:
    """Else rows would not come if the second one fails (swarm 46000044)."""
    with asked() as one:
        says_late(one)
        told = EncodeAccepted(room=f"{one.room(1)}.1", attempt=1)
        one.at.tell("on_encode_accepted", told, one.encoder(1))
        one.at.said.clear()
        one.at.cluster.pass_time(DEFAULTS.timing.accept_timeout_s / 2 + 0.01)
        again = {m.room for m in one.at.messages() if isinstance(m, EncodeRequest)}
        assert again == {one.room(0), one.room(1)}


def test_both_encoders_hear_of_an_attempt_that_was_given_up() -> None:
    with asked() as one:
        says_late(one)
        one.at.said.clear()
        one.at.do(one.at.whole.dispatcher.withdraw, one.machine)
        told = {m.room for m in one.at.messages() if isinstance(m, AbortEncode)}
        assert told == {one.room(0), one.room(1), f"{one.room(1)}.1"}


@pytest.mark.parametrize(
    ("why", "count"),
    [("spent", "hedges_over_budget"), ("busy", "hedges_in_vain"), ("alone", "hedges_in_vain")],
)
def test_who_is_refused_gets_no_answer(why: str, count: str) -> None:
    with desk("1e1p1d" if why == "alone" else "2e1p1d", GATEWAY, "role") as at:
        one = Asked(at, "", *IMAGES)
        costs = mock.patch("epd.roles.gateway.dispatch.pays", return_value=why != "busy")
        spent = mock.patch.object(HedgeBudget, "take", return_value=why != "spent")
        with costs, spent as take:
            assert says_late(one) == []
        assert take.called == (why == "spent"), "only who would be asked costs a part of the budget"
        assert one.machine.attempt == 1 and one.at.actor.counters[count] == 1


def test_who_is_late_after_the_end_is_told_so() -> None:
    with gateway() as at:
        one = Asked(at, "", *IMAGES)
        assert says_late(one, attempt=2) == [AbortRequest(request_id=one.key, attempt=2)]
        one.tokens(0, 21)
        assert says_late(one) == []
