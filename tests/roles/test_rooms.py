"""The rooms of one instance: messages of their peers, repeats and tombstones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import msgspec
import pytest

from epd.failure import Failure, FailureKind
from epd.fsm import incoming as fsm
from epd.fsm import membership
from epd.fsm.outgoing import S
from epd.fsm.room import GraceEnded, PeerSilent, RetryDue
from epd.messages import (
    CancelAck,
    CancelTransfer,
    Commit,
    CommitAck,
    TransferAborted,
    TransferInDoubt,
)
from tests.fsm.tables import at as in_state
from tests.roles.rooms import (
    OFFER,
    PEER,
    REGION,
    TIMING,
    consume,
    grant,
    hear,
    produce,
    rooms,
)

REFUSAL = Failure(FailureKind.CAPACITY, "too long")
BECAUSE = Failure(FailureKind.ENGINE, "because")

# --- messages that are faster than requests -------------------------------------------------------


def test_a_grant_that_is_faster_than_its_request_is_kept_for_it() -> None:
    with rooms() as at:
        hear(at, grant(at, left_s=0.5))
        opened = at.role.find("r")
        assert opened.state is S.GRANTED and opened.peer.epoch == 1
        owner = produce(at, offers=False)
        assert at.role.find("r") is opened and opened.owner == "key"
        hear(at, grant(at))
        owner.granted.assert_called_once_with(opened)
        at.cluster.pass_time(24.9)
        assert not opened.terminal
        at.cluster.pass_time(0.2)
        assert opened.state is S.EXPIRED, "its deadline is the request's"


@pytest.mark.parametrize("left_s", [0.5, 20.0])
def test_a_grant_without_a_request_ends_however_often_it_is_repeated(left_s: float) -> None:
    """One that a link held up opens a room that is over, and whose consumer may have forgotten."""
    with rooms() as at:
        for _ in range(4):
            hear(at, grant(at, left_s=left_s))
            at.cluster.pass_time(min(left_s, 3 * TIMING.link_timeout_s) / 4 - 0.001)
        opened = at.role.find("r")
        assert opened.state is S.GRANTED
        at.said.clear()
        at.cluster.pass_time(0.01)
        assert opened.state is S.FAILED and at.role.live() == {"outgoing": 0}
        (aborted,) = at.messages()
        assert isinstance(aborted, TransferAborted)
        assert aborted.failure.kind == FailureKind.TRANSFER
        assert at.actor.counters["grants_not_asked_for"] == 1


def test_a_grant_whose_deadline_cannot_be_read_opens_no_room() -> None:
    with rooms() as at:
        in_state(at.actor.memberships["gateway"], membership.S.JOINING)
        hear(at, grant(at))
        assert at.role.find("r") is None


def test_a_cancel_that_is_faster_than_its_request_wins() -> None:
    """F42."""
    with rooms() as at:
        assert hear(at, CancelTransfer(room="r", attempt=1)) == [CancelAck(room="r", attempt=1)]
        produce(at, offers=False)
        opened = at.role.find("r")
        assert opened.state is S.CANCELLED and at.role.live() == {"outgoing": 0}
        hear(at, grant(at))
        assert opened.state is S.CANCELLED


def test_why_it_was_called_off_is_kept() -> None:
    with rooms() as at:
        owner = produce(at)
        hear(at, CancelTransfer(room="r", attempt=1, failure=REFUSAL))
        opened = at.role.find("r")
        assert opened.failure == REFUSAL
        owner.concluded.assert_called_once_with(opened, REFUSAL)


MESSAGES = [
    ("outgoing", CancelTransfer(room="r", attempt=1)),
    ("outgoing", CommitAck(room="r", attempt=1)),
    ("incoming", Commit(room="r", attempt=1, nbytes=1, parts=())),
    ("incoming", CancelAck(room="r", attempt=1)),
    ("incoming", TransferAborted(room="r", attempt=1, failure=BECAUSE)),
    ("incoming", TransferInDoubt(room="r", attempt=1, reason="because")),
]


@pytest.mark.parametrize(("end", "word"), MESSAGES)
def test_messages_of_another_life_or_of_no_room_are_not_heard(end: str, word: Any) -> None:
    """F44."""
    with rooms(end) as at:
        produce(at) if end == "outgoing" else consume(at)
        with mock.patch.object(at.role, "fire") as fire:
            for epoch, source in ((2, "d0"), (1, "e0")):
                assert hear(at, word, epoch, source) == []
            assert at.actor.counters["message_of_other_epoch"] == 2
            assert not fire.called
            hear(at, word)
            assert fire.call_count == 1
            if not isinstance(word, CancelTransfer):
                hear(at, msgspec.structs.replace(word, room="nobody's"))
                assert fire.call_count == 1


def test_what_messages_say_is_what_the_machine_hears() -> None:
    with rooms("incoming") as at:
        consume(at)
        heard = []
        with mock.patch.object(at.role, "fire", lambda transfer, event: heard.append(event)):
            hear(at, Commit(room="r", attempt=1, nbytes=7, parts=((7, 9),)))
            hear(at, TransferAborted(room="r", attempt=1, failure=BECAUSE))
            hear(at, TransferInDoubt(room="r", attempt=1, reason="who knows"))
        assert heard == [
            fsm.CommitReceived(7, ((7, 9),), None),
            fsm.AbortReceived(BECAUSE),
            fsm.DoubtReceived(Failure(FailureKind.TRANSFER, "who knows")),
        ]


# --- messages that it says ------------------------------------------------------------------------


def test_an_offer_is_repeated_and_its_peer_doubted_until_it_is_granted() -> None:
    with rooms() as at:
        doubt = at.actor.doubt = mock.Mock()
        produce(at, "a")
        at.cluster.pass_time(0.1)
        produce(at, "b")
        at.said.clear()
        at.cluster.pass_time(TIMING.retry_interval_s - 0.11)
        assert not at.said and not doubt.called
        at.cluster.pass_time(0.02)
        assert at.said == [("d0", OFFER)]
        doubt.assert_called_once_with(PEER)
        hear(at, CancelTransfer(room="a", attempt=1))
        at.said.clear()
        at.cluster.pass_time(0.1)
        assert at.said == [("d0", OFFER)], "the other's time has come"
        hear(at, CancelTransfer(room="b", attempt=1))
        assert not [name for name in at.actor.timers if name.startswith("OUTGOING")]


def test_a_grant_is_made_by_its_owner_and_repeated() -> None:
    with rooms("incoming") as at:
        owner, transfer = consume(at)
        at.do(at.role.fire, transfer, fsm.SlotsLeased((1,), 16))
        at.cluster.pass_time(TIMING.retry_interval_s + 0.01)
        assert at.said == [("d0", owner.grant.return_value)] * 2
        owner.grant.assert_called_with(transfer)


@pytest.mark.parametrize("ends", ["delivered", "cancelled"])
def test_slots_are_lent_from_the_grant_to_the_end_of_writing(ends: str) -> None:
    with rooms("incoming") as at:
        _, transfer = consume(at)
        plane = at.actor.ports.transfers
        with (
            mock.patch.object(plane, "lend") as lend,
            mock.patch.object(plane, "take_back") as back,
        ):
            at.do(at.role.fire, transfer, fsm.SlotsLeased((1,), 16))
            lend.assert_called_once_with(REGION, (0,), PEER, "r")
            assert not back.called
            if ends == "delivered":
                at.do(at.role.fire, transfer, fsm.CommitReceived(16, ((16, 0),), None))
            else:
                at.do(at.role.fire, transfer, fsm.CancelRequested())
                assert not back.called, "it may still be writing"
                at.do(at.role.fire, transfer, fsm.CancelAcked())
            back.assert_called_once_with(REGION, "r")


def test_who_does_not_want_it_any_more_leaves_the_queue_and_says_so() -> None:
    with rooms("incoming") as at:
        owner, transfer = consume(at)
        at.do(at.role.fire, transfer, fsm.CancelRequested())
        assert at.said == [("d0", CancelTransfer(room="r", attempt=1))]
        owner.withdraw_lease.assert_called_once_with(transfer)
        owner.concluded.assert_called_once_with(transfer, transfer.why)


def test_who_does_not_end_is_told_to_the_operator() -> None:
    with rooms("incoming") as at:
        _, transfer = consume(at)
        at.do(at.role.report_hang, transfer, None)
        assert at.actor.counters["transfer_hangs"] == 1


def test_slots_are_given_back_with_the_message_of_the_writer() -> None:
    with rooms("incoming") as at:
        owner, transfer = consume(at)
        at.do(at.role.fire, transfer, fsm.SlotsLeased((1,), 16))
        hear(at, TransferAborted(room="r", attempt=1, failure=BECAUSE))
        owner.release_slots.assert_called_once_with(transfer)
        assert transfer.failure == BECAUSE


@pytest.mark.parametrize(
    ("send", "said"),
    [
        ("send_abort", TransferAborted(room="r", attempt=1, failure=BECAUSE)),
        ("send_doubt", TransferInDoubt(room="r", attempt=1, reason="because")),
    ],
)
def test_a_failure_and_a_doubt_are_sent_with_their_reason(send: str, said: object) -> None:
    with rooms() as at:
        produce(at)
        transfer = at.role.find("r")
        transfer.failure = BECAUSE
        at.said.clear()
        at.do(getattr(at.role, send), transfer, None)
        assert at.said == [("d0", said)]


# --- time -----------------------------------------------------------------------------------------


def test_ended_rooms_are_remembered_for_a_while_and_have_no_timers() -> None:
    with rooms() as at:
        for room in "ab":
            produce(at, room)
            transfer = at.role.find(room)
            at.do(at.role.arm_retry, transfer, None)
            at.do(at.role.arm_grace, transfer, None)
            assert at.role.live() == {"outgoing": 1}
            hear(at, CancelTransfer(room=room, attempt=1))
            armed = [name for name in at.actor.timers if name.startswith(("OUTGOING", "Rooms."))]
            assert armed == ["Rooms._forget"] and at.role.live() == {"outgoing": 0}
            at.cluster.pass_time(1.0)
        at.cluster.pass_time(TIMING.tombstone_s - 2.1)
        assert at.role.find("a") is not None
        at.cluster.pass_time(0.2)
        assert at.role.find("a") is None and at.role.find("b") is not None
        at.cluster.pass_time(1.0 + TIMING.tombstone_s / 8)
        assert at.role.find("b") is None and at.role.live() == {"outgoing": 0}
        assert "Rooms._forget" not in [*at.actor.timers]


def test_who_asks_about_a_doubt_again_doubts_the_link_each_time() -> None:
    """The writer's last message may wait in a link that carries nothing."""
    with rooms() as at:
        doubt = at.actor.doubt = mock.Mock()
        produce(at)
        transfer = at.role.find("r")
        for _ in range(2):
            doubt.reset_mock()
            at.do(at.role.arm_retry, transfer, None)
            at.cluster.pass_time(1.1 * TIMING.retry_interval_s)
            doubt.assert_called_with(transfer.peer)


def test_a_late_message_makes_no_tombstone_last_longer() -> None:
    with rooms() as at:
        for room in "ab":
            hear(at, CancelTransfer(room=room, attempt=1))
        at.cluster.pass_time(TIMING.tombstone_s - 0.1)
        hear(at, CancelTransfer(room="a", attempt=1))
        at.cluster.pass_time(0.1 + TIMING.tombstone_s / 8)
        assert at.role.find("a") is None


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_bounded_wait_ends_as_silence_or_with_the_wait(*, cancelled: bool) -> None:
    with rooms("incoming") as at:
        _, transfer = consume(at)
        at.do(at.role.fire, transfer, fsm.SlotsLeased((1,), 16))
        at.do(at.role.bound_wait, transfer, 0.3)
        at.cluster.pass_time(0.29)
        assert at.actor.timers.runs(transfer, PeerSilent)
        if cancelled:
            at.do(at.role.fire, transfer, fsm.CancelRequested())
            assert not at.actor.timers.runs(transfer, PeerSilent)
        at.cluster.pass_time(0.02)
        states = fsm.S.CANCEL_PENDING, fsm.S.EXPIRE_PENDING
        assert transfer.state is states[not cancelled]


def test_a_doubt_is_looked_into_at_its_own_pace() -> None:
    with rooms() as at:
        produce(at)
        transfer = at.role.find("r")
        heard: list[Any] = []
        with mock.patch.object(at.role, "fire", lambda _, event: heard.append(event)):
            at.cluster.pass_time(TIMING.retry_interval_s - 0.1)
            at.do(at.role.arm_retry, transfer, None)
            at.cluster.pass_time(TIMING.retry_interval_s - 0.01)
            assert not heard, "not at that of repeats"
            at.cluster.pass_time(0.02)
        assert heard == [RetryDue()]


def test_grace_ends() -> None:
    with rooms() as at:
        produce(at)
        transfer = at.role.find("r")
        heard: list[Any] = []
        with mock.patch.object(at.role, "fire", lambda _, event: heard.append(event)):
            at.do(at.role.arm_grace, transfer, None)
            at.cluster.pass_time(TIMING.abort_timeout_s + 0.01)
        assert heard[-1] == GraceEnded()
