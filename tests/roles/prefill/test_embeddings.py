"""The receive pool of a prefill instance: who gets slots, who hears of rows, and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.failure import Failure, FailureKind
from epd.fsm import embedding as fsm
from epd.fsm import incoming
from epd.fsm.embedding import S
from epd.fsm.room import PeerLost
from epd.messages import Address, CancelTransfer, Grant, MediaItem
from epd.roles.prefill.embeddings import Want, _load_outcome
from epd_lab.sim.engine import golden
from epd_lab.sim.engine.golden import Image
from epd_lab.sim.workload import mm_hash_of
from tests.roles.desk import Desk, desk
from tests.roles.simulated import DEFAULTS

ONE, TWO = Image("one"), Image("two")  # a slot each
BIG = Image("big", (1, 16, 12))  # all twelve slots
E0, LOST_E1 = Address("e0", 1, ""), "instance e1 was lost"
LOST = Failure(FailureKind.LOST, "instance e0 was lost")


class Pool:
    """The embeddings of p0; `heard`: what its waiters are told, by room."""

    def __init__(self, at: Desk) -> None:
        self.at, self.role = at, at.role
        self.heard: list[Any] = []
        self.asked: list[Any] = []  # of their gateways

    def item(self, room: str, image: Image = ONE, encoder: str = "e0") -> MediaItem:
        address = Address(encoder, 1, "")
        key, grid = mm_hash_of(image), image.grid_thw
        return MediaItem(
            index=2,
            mm_hash=key,
            offset=1,
            num_rows=image.num_rows,
            grid_thw=grid,
            room=room,
            encoder=address,
        )

    def want(self, room: str, image: Image = ONE, encoder: str = "e0") -> Any:
        self.at.said.clear()
        due_s = self.at.actor.cluster_s() + 20.0
        item = self.item(room, image, encoder)
        want = Want(
            item,
            1,
            due_s,
            "gateway",
            lambda room, rows: self.heard.append(("ready", room)),
            lambda *failure: self.heard.append((room, *failure)),
            lambda *asked: self.asked.append((room, *asked)),
        )
        self.at.do(self.role.want, want)
        return self.embedding(image)

    def embedding(self, image: Image = ONE) -> Any:
        return self.at.machine(fsm.Embedding, mm_hash_of(image))

    def usual(self, num_loads: int = 20) -> None:
        """Of an encoder whose rows come at once."""
        for number in range(num_loads):
            image = Image(f"usual{number}")
            self.want(image.name, image)
            self.arrive(image.name, image)
            self.unwant(image.name, image)
        self.heard.clear()

    def unwant(self, room: str, image: Image = ONE) -> bool:
        self.at.said.clear()
        return bool(self.at.do(self.role.unwant, mm_hash_of(image), room))

    def add_room(self, of: str, room: str) -> bool:
        return bool(self.at.do(self.role.add_room, of, self.item(room, ONE, "e1")))

    def promise(self, key: str, *images: Image) -> None:
        items = tuple(self.item(f"{key}/{n}", image) for n, image in enumerate(images))
        self.at.do(self.role.promise, key, items, lambda: self.heard.append(key))

    def transfer(self, room: str) -> incoming.Incoming:
        found = self.at.whole.incoming.find(room)
        assert found is not None
        return found

    def hear(self, room: str, event: Any) -> None:
        self.at.said.clear()
        self.at.do(self.at.whole.incoming.fire, self.transfer(room), event)

    def arrive(self, room: str, image: Image = ONE) -> None:
        """Its rows."""
        nbytes = image.num_rows * golden.ROW_NBYTES
        self.hear(room, incoming.CommitReceived(nbytes, ((nbytes, 0),), None))


@contextmanager
def pool(**settings: Any) -> Iterator[Pool]:
    prefill = msgspec.structs.replace(DEFAULTS.prefill, **settings)
    with desk("2e1p1d", "p0", "embeddings", replace(DEFAULTS, prefill=prefill)) as at:
        yield Pool(at)


def dismissed(pool: Pool) -> list[str]:
    return [m.room for m in pool.at.messages() if isinstance(m, CancelTransfer)]


def test_an_image_is_asked_for_once_and_all_who_want_it_hear() -> None:
    with pool() as own:
        embedding = own.want("a")
        (grant,) = own.at.messages()
        transfer = own.transfer("a")
        assert isinstance(grant, Grant) and own.at.said[0][0] == "e0"
        assert (grant.room, grant.attempt, grant.mm_hash) == ("a", 1, mm_hash_of(ONE))
        assert (grant.slots, grant.num_rows) == (transfer.slots, ONE.num_rows)
        assert grant.contract == golden.ROW_CONTRACT and len(grant.slots) == 1
        assert grant.deadline_s == pytest.approx(own.at.actor.cluster_s() + 20.0)
        assert embedding.state is S.LOADING
        for room in "bc":
            own.want(room)
            assert not own.at.said
        assert own.role.live()["embedding_references"] == 3
        assert own.role.live()["embeddings_loading"] == 1
        own.arrive("a")
        assert own.heard == [("ready", room) for room in "abc"]
        assert dismissed(own) == ["b", "c"]
        own.want("d")
        assert own.heard[-1] == ("ready", "d") and dismissed(own) == ["d"]
        assert own.role.live()["embeddings_loading"] == 0 and own.role.live()["slots"] == 0
        assert own.role.live()["embedding_references"] == 4


def test_nothing_is_asked_of_an_encoder_that_was_given_up() -> None:
    """Rooms that were open have heard of its silence; one that is opened then would wait for
    its deadline."""
    with pool() as own:
        own.want("a")
        own.want("b")
        own.at.fall_silent("e0", for_s=2 * DEFAULTS.timing.link_timeout_s + 0.01)
        silent = Failure(FailureKind.TRANSFER, "instance e0 does not answer")
        assert own.asked == [("a", E0, silent, 0.0), ("b", E0, silent, 0.0)] and not own.heard
        assert own.at.whole.incoming.find("b") is None
        assert own.add_room("a", "a.1")
        own.arrive("a.1")
        assert own.heard == [("ready", "a"), ("ready", "b")]


def test_rows_are_deposited_by_reference_where_both_live_here() -> None:
    with pool() as own:
        with mock.patch.object(own.at.actor.ports.transfers, "allocate") as allocate:
            allocate.return_value = own.role.region
            made, both = type(own.role), (mock.Mock(), mock.Mock())
            other = mock.MagicMock(ports=own.at.actor.ports)
            config = own.at.cluster.settings.prefill
            timing = own.at.cluster.settings.timing
            made(other, own.at.whole.incoming, golden.ROW_CONTRACT, config, timing, *both)
        nbytes = config.slot_nbytes
        allocate.assert_called_once_with("rows", 12, nbytes, by_reference=True)


def test_who_leaves_as_the_last_stops_the_load_and_as_another_only_its_room() -> None:
    with pool() as own:
        for room in "abc":
            own.want(room)
        assert not own.unwant("x") and not own.unwant("a", TWO)
        assert own.unwant("c") and dismissed(own) == ["c"]
        embedding = own.embedding()
        assert own.unwant("a"), "the load's own"
        assert dismissed(own) == ["a"]
        own.promise("big", BIG)
        assert embedding.room == "a" and not own.heard, "until the encoder's message"
        own.hear("a", incoming.CancelAcked())
        assert embedding.room == "b", "a follower's takes over"
        assert own.heard == ["big"]
        assert own.unwant("b") and embedding.state is S.ABANDONED


def test_who_comes_back_to_a_load_that_was_given_up_promises_again() -> None:
    with pool() as own:
        embedding = own.want("a")
        own.unwant("a")
        assert embedding.state is S.ABANDONED and own.role.live()["embeddings_loading"] == 1
        own.promise("big", BIG)
        assert not own.heard, "a slot may still be written"
        own.want("b")
        assert embedding.state is S.LOADING and own.heard == ["big"]


def test_promises_are_for_all_or_nothing_in_order_and_one_that_breaks_holds_up_no_other() -> None:
    with pool() as own:
        own.promise("a", ONE)
        own.promise("b", BIG)
        own.promise("c", ONE)
        assert own.heard == ["a"]

        def breaks() -> None:
            raise OSError("planned")

        own.at.do(own.role.give_up, "b")
        assert own.heard == ["a", "c"]
        own.at.do(own.role.promise, "d", (own.item("d/0", BIG),), breaks)
        own.promise("e", ONE)
        own.at.do(own.role.give_up, "a")
        own.at.do(own.role.give_up, "c")
        assert own.at.actor.counters["faults"] == 1
        own.at.do(own.role.give_up, "d")
        assert own.heard == ["a", "c", "e"]
        own.at.do(own.role.give_up, "e")
        assert own.role.live()["slot_promises"] == 0


def test_rows_that_nobody_references_make_room_the_oldest_first() -> None:
    with pool() as own:
        for room, image in (("a", ONE), ("b", TWO)):
            own.want(room, image)
            own.arrive(room, image)
        own.unwant("a")
        own.unwant("b", TWO)
        own.want("c")  # used again, and let go
        own.unwant("c")
        own.want("big", Image("eleven", (1, 16, 11)))
        assert own.embedding(TWO) is None
        assert own.embedding().state is S.RESIDENT
        assert len(own.transfer("big").slots) == 11


def test_slots_are_handed_out_to_all_whom_they_serve() -> None:
    with pool() as own:
        own.want("big", BIG)
        own.want("a")
        own.want("b", TWO, "e1")
        assert own.role.live()["lease_queue"] == 2
        assert own.transfer("a").state is incoming.S.PENDING
        own.hear("big", incoming.AbortReceived(Failure(FailureKind.ENGINE, "because")))
        assert own.heard == [("big", Failure(FailureKind.ENGINE, "because", "e0"))]
        assert own.role.live()["lease_queue"] == 0
        assert len(own.transfer("a").slots) == len(own.transfer("b").slots) == 1


def test_what_waits_for_slots_leaves_the_queue_with_its_room() -> None:
    with pool() as own:
        own.want("big", BIG)
        own.want("a")
        own.unwant("a")
        live = own.role.live()
        assert (live["lease_queue"], live["embeddings_loading"]) == (0, 1), "big"


@pytest.mark.parametrize(("kind", "told"), [("media", "image 3: because"), ("engine", "because")])
def test_all_who_want_it_hear_why_it_failed(kind: str, told: str) -> None:
    with pool() as own:
        own.want("a")
        own.want("b")
        aborted = incoming.AbortReceived(Failure(FailureKind(kind), "because"))
        own.hear("a", aborted)
        assert not own.heard, "the follower's room is tried"
        own.hear("b", aborted)
        assert own.heard == [(room, Failure(FailureKind(kind), told, "e0")) for room in "ab"]
        assert own.role.live()["slots"] == 0 and own.embedding() is None


def test_an_encoder_that_was_lost_before_is_not_asked() -> None:
    with pool() as own:
        own.at.actor.lost.add(("e0", 1))
        own.want("a")
        assert own.asked == [("a", E0, LOST, 0.0)] and not own.heard
        assert own.at.whole.incoming.find("a") is None


def test_rows_of_the_lost_come_in_another_room_and_who_waits_hears_of_them() -> None:
    """F19."""
    with pool() as own:
        own.at.actor.lost.add(("e0", 1))
        embedding = own.want("a")
        assert embedding.state is S.AWAITING_ROOM
        assert not own.add_room("x", "x.1"), "nobody waits for it"
        assert own.add_room("a", "a.1") and embedding.state is S.LOADING
        assert own.role.live()["embedding_references"] == 2
        own.arrive("a.1")
        assert own.heard == [("ready", "a")], "the further room has nobody of its own"
        assert own.unwant("a") and not embedding.waiters


def test_another_room_is_asked_for_until_it_comes() -> None:
    """The question or its answer may be lost, or come twice."""
    with pool() as own:
        own.at.actor.lost.add(("e0", 1))
        embedding = own.want("a")
        own.at.cluster.pass_time(DEFAULTS.timing.accept_timeout_s / 4 + 0.01)
        assert own.asked == [("a", E0, LOST, 0.0)] * 2
        assert own.add_room("a", "a.1") and own.add_room("a", "a.1")
        assert embedding.state is S.LOADING and len(embedding.waiters) == 2
        own.at.cluster.pass_time(DEFAULTS.timing.accept_timeout_s / 2)
        assert len(own.asked) == 2


def test_a_room_that_failed_is_not_tried_again_if_it_is_told_again() -> None:
    with pool() as own:
        own.at.actor.lost.add(("e0", 1))
        embedding = own.want("a")
        own.add_room("a", "a.1")
        own.hear("a.1", PeerLost())
        assert own.add_room("a", "a.1") and embedding.state is S.AWAITING_ROOM


def test_who_leaves_takes_its_further_room_along() -> None:
    with pool() as own:
        embedding = own.want("a")
        own.add_room("a", "a.1")
        assert own.unwant("a") and not embedding.waiters
        assert sorted(dismissed(own)) == ["a", "a.1"]
        assert embedding.state is S.ABANDONED, "its load is waited for"


def test_another_room_is_not_waited_for_for_ever_and_the_last_that_failed_is_blamed() -> None:
    """Either message may be lost."""
    with pool() as own:
        own.at.actor.lost.add(("e0", 1))
        embedding = own.want("a")
        own.add_room("a", "a.1")
        own.hear("a.1", PeerLost())
        assert own.asked[1:] == [("a", Address("e1", 1, ""), Failure(LOST.kind, LOST_E1), 0.0)]
        own.at.do(own.role.fire, embedding, fsm.NoRoomCame())
        assert own.heard == [("a", Failure(LOST.kind, LOST_E1, "e1"))]
        assert embedding.state is S.FAILED


def test_slots_of_the_lost_are_not_promised_until_it_is_fenced() -> None:
    """F41."""
    with pool() as own:
        own.want("a")
        with mock.patch.object(own.at.actor.ports.transfers, "fence", mock.AsyncMock()):
            own.hear("a", PeerLost())
        embedding = own.embedding()
        assert embedding.state is S.AWAITING_ROOM
        own.promise("big", BIG)
        own.heard.clear()
        own.at.do(own.at.whole.incoming.fire, own.transfer("a"), incoming.PeerFenced())
        assert own.heard == ["big"]


def test_the_end_of_a_room_that_another_has_followed_is_no_failure_of_the_load() -> None:
    with pool() as own:
        embedding = own.want("a")
        transfer: Any = SimpleNamespace(key="other", owner=embedding.key)
        failure = Failure(FailureKind.LOST, "lost")
        with mock.patch.object(own.role, "fire") as fire:
            own.at.do(lambda: own.role.concluded(transfer, failure))
            transfer.owner = "nobody"
            own.at.do(lambda: own.role.concluded(transfer, failure))
        assert not fire.called


OUTCOMES = [
    ("lost", False, fsm.EncoderLost(Failure(FailureKind.LOST, "because"))),
    ("lost", True, fsm.EncoderLost(Failure(FailureKind.LOST, "because"))),
    ("transfer", False, fsm.LoadFailed(Failure(FailureKind.TRANSFER, "because"))),
    ("engine", False, fsm.LoadFailed(Failure(FailureKind.ENGINE, "because"))),
    ("deadline", False, fsm.LoadTimedOut(Failure(FailureKind.DEADLINE, "because"))),
    ("deadline", True, fsm.LoadLost(Failure(FailureKind.DEADLINE, "because"))),
]


@pytest.mark.parametrize(("kind", "held", "outcome"), OUTCOMES)
def test_why_a_load_ended(kind: str, outcome: Any, *, held: bool) -> None:
    room: Any = SimpleNamespace(held=held, peer=E0, key="")
    assert _load_outcome(room, Failure(FailureKind(kind), "because")) == outcome


@pytest.mark.parametrize("bounded", [True, False])
def test_the_wait_for_rows_may_have_a_bound(*, bounded: bool) -> None:
    with pool(rows_timeout_s=0.5 if bounded else 0.0) as own:
        with mock.patch.object(own.at.whole.incoming, "bound_wait") as bound:
            own.want("a")
        transfer = own.transfer("a")
        assert bound.call_args_list == ([mock.call(transfer, 0.5)] if bounded else [])
        assert transfer.nbytes == ONE.num_rows * golden.ROW_NBYTES


def test_what_does_not_fit_the_pool_is_told_with_its_remedy() -> None:
    with pool() as own:
        assert own.role.refusal((own.item("a", BIG),)) == ""
        reason = own.role.refusal((own.item("a", BIG), own.item("b")))
        assert "need 13 slots" in reason and "has 12" in reason and "prefill.pool_nbytes" in reason
        assert own.role.num_slots_for(5) == 2 and own.role.num_slots_for(4) == 1
