"""An image whose encoder was lost: the gateway sends it to another one, and tells prefill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from epd.failure import Failure, FailureKind
from epd.fsm.generation import S
from epd.messages import (
    AbortEncode,
    AbortRequest,
    Address,
    CancelTransfer,
    EncodeAccepted,
    EncodeRequest,
    Message,
    RoomAdded,
    RoomWanted,
)
from epd.roles.gateway.elsewhere import Elsewhere
from epd.transport.base import Received
from epd_lab.sim.cluster import GATEWAY
from epd_lab.sim.engine.golden import Image
from tests.roles.desk import Desk, Open, desk, gateway
from tests.roles.simulated import DEFAULTS

IMAGES = (Image("one"), Image("two"))
LOST = Failure(FailureKind.LOST, "instance was lost")


class Asked(Open):
    """Whose prefill instance asks for other rooms."""

    def wants(self, index: int, attempt: int = 1) -> list[Message]:
        return self.says(index, self.machine.placement.encoders[index], attempt)

    def says(self, index: int, encoder: Address, attempt: int = 1) -> list[Message]:
        wanted = RoomWanted(
            request_id=self.key, attempt=attempt, index=index, encoder=encoder, failure=LOST
        )
        self.at.said.clear()
        self.at.do(self.at.actor.take, Received(self.prefill, 1, wanted, ()))
        return self.at.messages()


@contextmanager
def asked() -> Iterator[Asked]:
    with gateway() as at:
        yield Asked(at, "", *IMAGES)


def test_the_image_goes_to_another_encoder_and_the_attempt_goes_on() -> None:
    with asked() as one:
        former, books = one.machine.placement, one.at.whole.dispatcher
        added, request = one.wants(1)
        assert isinstance(request, EncodeRequest) and isinstance(added, RoomAdded)
        other = one.machine.placement.encoders[1]
        assert other.instance_id != former.encoders[1].instance_id
        assert one.machine.placement.encoders[0] == former.encoders[0]
        assert request.room == added.room == f"{one.room(1)}.1"
        assert (added.index, added.encoder, one.machine.attempt) == (1, other, 1)
        assert [to for to, _ in one.at.said] == [one.prefill, other.instance_id]
        assert books.in_flight(request.mm_hash) == (other.instance_id,)
        assert books.books.assigned_to(other.instance_id) == 1
        assert one.at.actor.counters["images_moved"] == 1


def test_the_former_room_is_over_and_the_new_one_is_wanted() -> None:
    with asked() as one:
        former, _ = one.encoder(1), one.wants(1)
        told = EncodeAccepted(room=one.room(1), attempt=1)
        assert one.at.tell("on_encode_accepted", told, former) == [AbortEncode(room=one.room(1))]
        told = EncodeAccepted(room=f"{one.room(1)}.1", attempt=1)
        assert one.at.tell("on_encode_accepted", told, one.encoder(1)) == []


def test_who_asks_again_is_told_again() -> None:
    """The answer may be lost."""
    with asked() as one:
        former = one.machine.placement.encoders[1]
        added, _ = one.wants(1)
        assert one.says(1, former) == [added]
        assert one.at.actor.counters["images_moved"] == 1


def test_what_has_moved_meanwhile_is_not_moved_again() -> None:
    """Its former encoder falls silent while prefill asks."""
    with asked() as one:
        former = one.machine.placement.encoders[1]
        with mock.patch.object(one.at.actor.mailbox, "post") as post:
            one.at.part(Elsewhere).peer_silent(former)
        one.wants(1)
        for call in post.call_args_list:
            one.at.do(*call.args[1:])
        moved = [message.room for _, message in one.sent(EncodeRequest)]
        assert f"{one.room(1)}.1" in moved and f"{one.room(1)}.2" not in moved


def test_what_has_taken_the_place_of_the_lost_is_asked() -> None:
    """It has the same name."""
    with desk("1e1p1d", GATEWAY, "role") as at:
        one = Asked(at, "", *IMAGES)
        with mock.patch.object(at.actor, "is_lost", return_value=True):
            one.wants(1)
        assert (one.machine.attempt, at.actor.counters["images_moved"]) == (1, 1)


def test_what_no_encoder_can_do_fails_the_attempt() -> None:
    with asked() as one:
        for _ in range(DEFAULTS.timing.max_attempts - 1):
            assert one.wants(1) and one.machine.attempt == 1
        blamed = one.encoder(1)
        one.wants(1)
        assert (one.machine.attempt, one.machine.failure) == (2, LOST)
        assert one.machine.avoided == {blamed}


def test_without_another_encoder_the_attempt_has_failed() -> None:
    with desk("1e1p1d", GATEWAY, "role") as at:
        one = Asked(at, "", *IMAGES)
        one.wants(1)
        assert (one.machine.attempt, one.machine.failure) == (2, LOST)


def test_who_asks_for_what_is_over_is_told_so() -> None:
    with asked() as one:
        assert one.wants(0, attempt=2) == [AbortRequest(request_id=one.key, attempt=2)]
        one.tokens(0, 21)
        assert one.wants(0) == [], "its rows have been used"


def test_who_asks_for_what_was_given_up_is_told_so_before_the_next_attempt() -> None:
    """No attempt follows until there is an encoder, and what gave this one up may be lost."""
    with asked() as one:
        for _ in range(2):
            one.fails(one.prefill, "engine")
        assert one.machine.state is S.MIGRATING
        assert one.wants(0, attempt=2) == [AbortRequest(request_id=one.key, attempt=2)]


def test_prefill_calls_off_a_room_that_nobody_waits_for() -> None:
    at: Desk
    with desk("2e1p1d", "p0", "prefill") as at:
        encoder = Address("e1", 1, "")
        added = RoomAdded(request_id="x", attempt=1, index=0, room="x/1/0.1", encoder=encoder)
        assert at.tell("on_room_added", added, "gateway") == [
            CancelTransfer(room="x/1/0.1", attempt=1)
        ]
