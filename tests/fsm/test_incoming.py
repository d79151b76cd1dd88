"""INCOMING: the paths of a consumer's end, and the faults that its rows make impossible."""

from __future__ import annotations

import pytest

from epd.failure import FailureKind
from epd.fsm.incoming import (
    AbortReceived,
    BlocksLeased,
    CancelAcked,
    CancelRequested,
    CommitReceived,
    Do,
    DoubtReceived,
    Incoming,
    PeerFenced,
    Published,
    PublishFailed,
    S,
    SlotsLeased,
)
from epd.fsm.room import DeadlinePassed, GraceEnded, PeerLost, RetryDue
from tests.fsm.paths import follow
from tests.fsm.tables import FAILURE, make_incoming

LEASED = SlotsLeased((0, 1), 64)
COMMITTED = CommitReceived(64, ((64, 7),))


@pytest.fixture
def consumer() -> Incoming:
    return make_incoming()


def test_delivery(consumer: Incoming) -> None:
    """PENDING -> RESERVED -> PUBLISHING -> DELIVERED; the slots belong to what was published."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (RetryDue(), S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (COMMITTED, S.PUBLISHING, (Do.SEND_COMMIT_ACK, Do.PUBLISH)),
        (COMMITTED, S.PUBLISHING, (Do.SEND_COMMIT_ACK,)),
        (Published(), S.DELIVERED, (Do.CONCLUDE_DELIVERED,)),
        (COMMITTED, S.DELIVERED, (Do.SEND_COMMIT_ACK,)),
    )


def test_kv_waits_for_blocks_and_then_for_slots_to_land_in(consumer: Incoming) -> None:
    """PENDING -> AWAITING_LANDING -> RESERVED; what knows no grant yet goes back by time, too."""
    blocks = BlocksLeased((7, 8, 9), 1, held=(2,), ahead=(4,))
    follow(
        consumer,
        (blocks, S.AWAITING_LANDING, (Do.AWAIT_LANDING,)),
        (CancelAcked(), S.AWAITING_LANDING, ()),
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
    )
    assert (consumer.blocks, consumer.ahead, consumer.slots) == ((7, 8, 9), (4,), (0, 1))
    assert (consumer.num_held, consumer.held_places) == (1, (2,))
    late = make_incoming()
    late.fire(blocks)
    freed = (Do.WITHDRAW_LEASE, Do.RELEASE_SLOTS)
    follow(
        late,
        (DeadlinePassed(), S.EXPIRED, (*freed, Do.SEND_CANCEL, Do.CONCLUDE_FAILED)),
        (LEASED, S.EXPIRED, (Do.RELEASE_SLOTS,)),
    )
    assert (late.blocks, late.ahead) == ((), ()), "they went back when its time was over"
    follow(late, (blocks, S.EXPIRED, (Do.RELEASE_SLOTS,)))
    assert (late.blocks, late.ahead) == ((7, 8, 9), (4,))


def test_what_has_landed_is_published_whatever_comes(consumer: Incoming) -> None:
    """PUBLISHING stays through cancel, deadline and loss; publishing decides,
    and the operator hears if it does not."""
    consumer.fire(LEASED)
    consumer.fire(COMMITTED)
    for late in (CancelRequested(), PeerLost(), RetryDue()):
        follow(consumer, (late, S.PUBLISHING, ()))
    follow(
        consumer,
        (DeadlinePassed(), S.PUBLISHING, (Do.ARM_GRACE,)),
        (GraceEnded(), S.PUBLISHING, (Do.REPORT_HANG, Do.ARM_GRACE)),
    )
    wrong = (Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED)
    follow(consumer, (PublishFailed("checksum"), S.FAILED, wrong))


def test_a_cancel_keeps_the_slots_until_the_writer_has_spoken(consumer: Incoming) -> None:
    """F6: RESERVED -> CANCEL_PENDING -> CANCELLED."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (CancelRequested(), S.CANCEL_PENDING, (Do.SEND_CANCEL, Do.ARM_RETRY)),
        (RetryDue(), S.CANCEL_PENDING, (Do.SEND_CANCEL, Do.ARM_RETRY)),
        (CancelAcked(), S.CANCELLED, (Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED)),
        (CancelAcked(), S.CANCELLED, ()),
    )


def test_time_alone_never_frees_slots(consumer: Incoming) -> None:
    """F7: RESERVED -> EXPIRE_PENDING -> QUARANTINED -> FAILED by a fence."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (
            DeadlinePassed(),
            S.EXPIRE_PENDING,
            (Do.CONCLUDE_FAILED, Do.SEND_CANCEL, Do.ARM_RETRY, Do.ARM_GRACE),
        ),
        (GraceEnded(), S.QUARANTINED, (Do.START_FENCE,)),
        (GraceEnded(), S.QUARANTINED, ()),
        (RetryDue(), S.QUARANTINED, (Do.SEND_CANCEL, Do.START_FENCE)),
        (PeerFenced(), S.FAILED, (Do.RELEASE_SLOTS,)),
    )


@pytest.mark.parametrize(
    ("word", "effects"),
    [
        (CancelAcked(), (Do.RELEASE_SLOTS,)),
        (AbortReceived(FAILURE), (Do.RELEASE_SLOTS,)),
        (COMMITTED, (Do.RELEASE_SLOTS, Do.SEND_COMMIT_ACK)),
    ],
    ids=["cancel ack", "abort", "commit"],
)
def test_lost_is_not_dead_and_its_message_frees_the_slots(
    consumer: Incoming, word: CancelAcked, effects: tuple[Do, ...]
) -> None:
    """F7: RESERVED -> QUARANTINED -> FAILED by any message that the writer is done."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (PeerLost(), S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.START_FENCE)),
        (word, S.FAILED, effects),
    )
    assert consumer.why.kind is FailureKind.LOST


@pytest.mark.parametrize("word", [CancelAcked(), AbortReceived(FAILURE)])
def test_slots_in_doubt_wait_for_the_writers_last_message(
    consumer: Incoming, word: CancelAcked
) -> None:
    """F8: RESERVED -> QUARANTINED, its owner is told at once -> FAILED, the slots return."""
    doubt = DoubtReceived(FAILURE)
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (doubt, S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.ARM_RETRY)),
        (doubt, S.QUARANTINED, ()),
        (RetryDue(), S.QUARANTINED, (Do.SEND_CANCEL, Do.START_FENCE)),
        (word, S.FAILED, (Do.RELEASE_SLOTS,)),
    )
    assert consumer.failure == FAILURE


def test_a_short_commit_fails_the_room(consumer: Incoming) -> None:
    """F11: RESERVED -> FAILED; the writer is done, so the slots are free."""
    ends = (Do.RELEASE_SLOTS, Do.SEND_COMMIT_ACK, Do.CONCLUDE_FAILED)
    consumer.fire(LEASED)
    follow(consumer, (CommitReceived(63, ((63, 7),)), S.FAILED, ends))
    assert "63 bytes where 64 were granted" in consumer.why.reason


def test_slots_that_come_after_the_cancel_go_back(consumer: Incoming) -> None:
    """PENDING -> CANCELLED -> CANCELLED."""
    ends = (Do.WITHDRAW_LEASE, Do.SEND_CANCEL, Do.CONCLUDE_FAILED)
    follow(
        consumer,
        (CancelRequested(), S.CANCELLED, ends),
        (LEASED, S.CANCELLED, (Do.RELEASE_SLOTS,)),
    )


def test_a_producer_that_was_called_off_is_not_waited_for(consumer: Incoming) -> None:
    """RESERVED -> FAILED: the gateway called it off, and it will not write: the slots are free."""
    consumer.fire(LEASED)
    follow(consumer, (CancelAcked(), S.FAILED, (Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED)))
    assert consumer.why.kind is FailureKind.TRANSFER
