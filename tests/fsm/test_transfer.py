"""TRANSFER from either end: the paths of a room, and the faults that its rows make impossible."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.fsm.transfer import (
    AbortReceived,
    BytesReady,
    CancelAcked,
    CancelReceived,
    CancelRequested,
    CommitAcked,
    CommitReceived,
    DeadlinePassed,
    Do,
    DoubtReceived,
    GraceEnded,
    GrantReceived,
    Manifest,
    PartReady,
    PeerFenced,
    PeerLost,
    Published,
    PublishFailed,
    RetryDue,
    S,
    Side,
    SlotsLeased,
    SourceFailed,
    Transfer,
    WriteOutcomeUnknown,
    WriteRefused,
    WriteSettled,
    WriteSucceeded,
)
from tests.fsm.paths import follow
from tests.fsm.tables import GRANT, make_transfer

READY = BytesReady("source", 64)
LEASED = SlotsLeased((0, 1))
GRANTED = GrantReceived(GRANT)


@pytest.fixture
def producer() -> Transfer:
    made = make_transfer(side=Side.PRODUCER)
    made.grant, made.nbytes = None, 0
    return made


@pytest.fixture
def consumer() -> Transfer:
    return make_transfer(side=Side.CONSUMER)


# --- producer -------------------------------------------------------------------------------------


def test_bytes_before_the_grant_are_parked_and_flushed_then(producer: Transfer) -> None:
    """F1: PENDING -> PARKED -> WRITING -> COMPLETE -> RELEASED."""
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.WRITING, (Do.START_WRITE,)),
        (WriteSucceeded(7), S.COMPLETE, (Do.SEND_COMMIT, Do.ARM_RETRY)),
        (CommitAcked(), S.RELEASED, (Do.RELEASE_SOURCE, Do.CONCLUDE_DELIVERED)),
    )
    assert (producer.parts, producer.part_nbytes, producer.written_nbytes) == (((64, 7),), 0, 64)


def test_parts_go_while_the_rest_is_made(producer: Transfer) -> None:
    """RESERVED -> STREAMING -> STREAMING -> RESERVED -> STREAMING -> WRITING -> COMPLETE."""
    ready = BytesReady("source", 2 * 64)
    held = SimpleNamespace(**{**vars(GRANT), "slots": (0, 1, 2)})
    follow(
        producer,
        (PartReady(16), S.PENDING, ()),
        (GrantReceived(held), S.RESERVED, ()),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART,)),
        (PartReady(32), S.STREAMING, (Do.HOLD_PART,)),
        (WriteSucceeded(1), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (WriteSucceeded(2), S.RESERVED, (Do.RELEASE_SOURCE,)),
        (PartReady(32), S.RESERVED, ()),
        (PartReady(48), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (ready, S.WRITING, ()),
        (WriteSucceeded(3), S.WRITING, (Do.START_WRITE,)),
        (WriteSucceeded(4), S.COMPLETE, (Do.SEND_COMMIT, Do.ARM_RETRY)),
        (PartReady(48), S.COMPLETE, ()),
        (CommitAcked(), S.RELEASED, (Do.RELEASE_SOURCE, Do.CONCLUDE_DELIVERED)),
    )
    assert producer.parts == ((16, 1), (16, 2), (16, 3), (80, 4))


@pytest.mark.parametrize(
    ("event", "effects"),
    [
        (CancelReceived(), (Do.CONCLUDE_FAILED,)),
        (PeerLost(), (Do.CONCLUDE_FAILED,)),
        (SourceFailed("engine", "failed", True), ()),
    ],
    ids=["cancelled", "lost", "withdrawn"],
)
def test_a_part_under_way_keeps_its_source(
    producer: Transfer, event: Any, effects: tuple[Do, ...]
) -> None:
    """F6: STREAMING -> CANCEL_PENDING -> CANCELLED; what comes of the request changes nothing."""
    follow(
        producer,
        (GRANTED, S.RESERVED, ()),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (event, S.CANCEL_PENDING, effects),
        (PartReady(32), S.CANCEL_PENDING, ()),
        (WriteSucceeded(1), S.CANCELLED, (Do.RELEASE_SOURCE, Do.SEND_CANCEL_ACK)),
    )


def test_a_grant_before_the_bytes(producer: Transfer) -> None:
    """PENDING -> RESERVED -> WRITING."""
    follow(producer, (GRANTED, S.RESERVED, ()), (READY, S.WRITING, (Do.START_WRITE,)))


def test_parked_bytes_have_a_reaper(producer: Transfer) -> None:
    """F1: PENDING -> PARKED -> EXPIRED, and a grant that comes too late is answered."""
    ends = (Do.RELEASE_SOURCE, Do.SEND_ABORT, Do.CONCLUDE_FAILED)
    follow(
        producer,
        (READY, S.PARKED, ()),
        (DeadlinePassed(), S.EXPIRED, ends),
        (GRANTED, S.EXPIRED, (Do.SEND_ABORT,)),
    )
    assert producer.failure[0] == "deadline"


def test_a_commit_is_repeated_until_acknowledged(producer: Transfer) -> None:
    """COMPLETE -> COMPLETE -> COMPLETE -> RELEASED."""
    again = (Do.SEND_COMMIT, Do.ARM_RETRY)
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.WRITING, (Do.START_WRITE,)),
        (WriteSucceeded(7), S.COMPLETE, again),
        (RetryDue(), S.COMPLETE, again),
        (GRANTED, S.COMPLETE, (Do.SEND_COMMIT,)),
        (CommitAcked(), S.RELEASED, (Do.RELEASE_SOURCE, Do.CONCLUDE_DELIVERED)),
        (CommitAcked(), S.RELEASED, ()),
    )


def test_a_cancelled_write_keeps_its_source_until_the_write_has_ended(producer: Transfer) -> None:
    """F6: PARKED -> WRITING -> CANCEL_PENDING -> CANCELLED."""
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.WRITING, (Do.START_WRITE,)),
        (CancelReceived(), S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,)),
        (CancelReceived(), S.CANCEL_PENDING, ()),
        (WriteSucceeded(7), S.CANCELLED, (Do.RELEASE_SOURCE, Do.SEND_CANCEL_ACK)),
    )


@pytest.mark.parametrize(
    ("stop", "pending"),
    [(DeadlinePassed(), S.EXPIRE_PENDING), (PeerLost(), S.CANCEL_PENDING)],
)
def test_an_unknown_outcome_keeps_the_source_until_its_end_is_certain(
    producer: Transfer, stop: DeadlinePassed, pending: S
) -> None:
    """F8: WRITING -> EXPIRE_PENDING or CANCEL_PENDING -> QUARANTINED -> FAILED."""
    producer.fire(READY)
    producer.fire(GRANTED)
    producer.fire(stop)
    assert producer.state is pending
    follow(
        producer,
        (WriteOutcomeUnknown("timed out"), S.QUARANTINED, (Do.SETTLE_WRITE,)),
        (DeadlinePassed(), S.QUARANTINED, ()),
        (CancelReceived(), S.QUARANTINED, ()),
        (RetryDue(), S.QUARANTINED, (Do.SETTLE_WRITE,)),
        (PeerFenced(), S.FAILED, (Do.RELEASE_SOURCE,)),
    )


def test_a_doubt_is_told_and_ends_when_the_engine_has_settled(producer: Transfer) -> None:
    """F8: WRITING -> QUARANTINED -> FAILED while the peer lives; the doubt is said again."""
    producer.fire(READY)
    producer.fire(GRANTED)
    told = (Do.CONCLUDE_FAILED, Do.SEND_DOUBT, Do.SETTLE_WRITE)
    follow(
        producer,
        (WriteOutcomeUnknown("timed out"), S.QUARANTINED, told),
        (GRANTED, S.QUARANTINED, (Do.SEND_DOUBT,)),
        (WriteSettled(), S.FAILED, (Do.RELEASE_SOURCE, Do.SEND_ABORT)),
        (CancelReceived(), S.FAILED, (Do.SEND_CANCEL_ACK,)),
        (WriteSettled(), S.FAILED, ()),
    )
    assert producer.failure[:2] == ("transfer", "timed out")


def test_a_write_that_does_not_end_keeps_its_source(producer: Transfer) -> None:
    """F8: WRITING -> EXPIRE_PENDING -> EXPIRE_PENDING -> EXPIRED: only its own outcome frees it."""
    follow(
        producer,
        (GRANTED, S.RESERVED, ()),
        (READY, S.WRITING, (Do.START_WRITE,)),
        (DeadlinePassed(), S.EXPIRE_PENDING, (Do.CONCLUDE_FAILED, Do.ARM_GRACE)),
        (GraceEnded(), S.EXPIRE_PENDING, (Do.ARM_GRACE,)),
        (PeerLost(), S.EXPIRE_PENDING, ()),
        (WriteRefused("gone"), S.EXPIRED, (Do.RELEASE_SOURCE, Do.SEND_CANCEL_ACK)),
    )


@pytest.mark.parametrize(
    "grant",
    [
        SimpleNamespace(**{**vars(GRANT), "num_rows": 3}),
        SimpleNamespace(**{**vars(GRANT), "contract": "another dtype"}),
        SimpleNamespace(**{**vars(GRANT), "slots": ()}),
    ],
    ids=["rows", "contract", "room"],
)
@pytest.mark.parametrize("bytes_first", [True, False])
def test_no_byte_moves_against_the_contract(
    producer: Transfer, grant: SimpleNamespace, bytes_first: bool
) -> None:
    """F11: PARKED or RESERVED -> FAILED; both ends are told, the source is free."""
    events = [READY, GrantReceived(grant)]
    first, second = events if bytes_first else reversed(events)
    assert producer.fire(first) == ()
    assert producer.fire(second) == (Do.RELEASE_SOURCE, Do.SEND_ABORT, Do.CONCLUDE_FAILED)
    assert producer.state is S.FAILED
    assert producer.failure[0] == "contract" and not producer.failure[2]


def test_what_the_consumer_holds_is_not_sent(producer: Transfer) -> None:
    """Three blocks of KV, of which the consumer knows one: two slots are enough."""
    held = SimpleNamespace(**{**vars(GRANT), "num_held": 1})
    assert producer.fire(BytesReady("source", 3 * 64)) == ()
    assert producer.fire(GrantReceived(held)) == (Do.START_WRITE,)
    assert producer.sent_nbytes == 2 * 64


def test_cancel_before_everything_wins(producer: Transfer) -> None:
    """F42: PENDING -> CANCELLED; the grant and the bytes that follow revive nothing."""
    follow(
        producer,
        (CancelReceived(), S.CANCELLED, (Do.SEND_CANCEL_ACK, Do.CONCLUDE_FAILED)),
        (GRANTED, S.CANCELLED, (Do.SEND_ABORT,)),
        (READY, S.CANCELLED, (Do.RELEASE_SOURCE,)),
        (CancelReceived(), S.CANCELLED, (Do.SEND_CANCEL_ACK,)),
    )


def test_an_offer_is_repeated_only_by_who_offers(producer: Transfer) -> None:
    """PENDING -> PENDING, with and without an offer (KV, rows)."""
    follow(producer, (RetryDue(), S.PENDING, ()))
    producer.meta = Manifest(None, 4, offers=True)
    follow(producer, (RetryDue(), S.PENDING, (Do.SEND_OFFER, Do.ARM_RETRY)))


def test_a_source_that_is_withdrawn_mid_write_stays_until_the_write_ends(
    producer: Transfer,
) -> None:
    """WRITING -> CANCEL_PENDING -> CANCELLED; its owner withdrew it and is not told."""
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.WRITING, (Do.START_WRITE,)),
        (SourceFailed("withdrawn", "ended", False), S.CANCEL_PENDING, ()),
        (WriteSucceeded(7), S.CANCELLED, (Do.RELEASE_SOURCE, Do.SEND_CANCEL_ACK)),
    )


# --- consumer -------------------------------------------------------------------------------------


def test_delivery(consumer: Transfer) -> None:
    """PENDING -> RESERVED -> COMPLETE -> RELEASED; the slots now belong to what was published."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (RetryDue(), S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (CommitReceived(64, 7), S.COMPLETE, (Do.SEND_COMMIT_ACK, Do.PUBLISH)),
        (CommitReceived(64, 7), S.COMPLETE, (Do.SEND_COMMIT_ACK,)),
        (Published(), S.RELEASED, (Do.CONCLUDE_DELIVERED,)),
        (CommitReceived(64, 7), S.RELEASED, (Do.SEND_COMMIT_ACK,)),
    )


def test_what_has_landed_is_published_whatever_comes(consumer: Transfer) -> None:
    """COMPLETE stays through cancel, deadline and loss; publishing decides."""
    consumer.fire(LEASED)
    consumer.fire(CommitReceived(64, 7))
    for late in (CancelRequested(), DeadlinePassed(), PeerLost(), RetryDue()):
        follow(consumer, (late, S.COMPLETE, ()))
    wrong = (Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED)
    follow(consumer, (PublishFailed("checksum"), S.FAILED, wrong))


def test_a_cancel_keeps_the_slots_until_the_writer_has_spoken(consumer: Transfer) -> None:
    """F6: RESERVED -> CANCEL_PENDING -> CANCELLED."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (CancelRequested(), S.CANCEL_PENDING, (Do.SEND_CANCEL, Do.ARM_RETRY)),
        (RetryDue(), S.CANCEL_PENDING, (Do.SEND_CANCEL, Do.ARM_RETRY)),
        (CancelAcked(), S.CANCELLED, (Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED)),
        (CancelAcked(), S.CANCELLED, ()),
    )


def test_time_alone_never_frees_slots(consumer: Transfer) -> None:
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
        (AbortReceived("engine", "failed", True), (Do.RELEASE_SLOTS,)),
        (CommitReceived(64, 7), (Do.SEND_COMMIT_ACK, Do.RELEASE_SLOTS)),
    ],
    ids=["cancel ack", "abort", "commit"],
)
def test_lost_is_not_dead_and_its_word_frees_the_slots(
    consumer: Transfer, word: CancelAcked, effects: tuple[Do, ...]
) -> None:
    """F7: RESERVED -> QUARANTINED -> FAILED by any word that the writer is done."""
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (PeerLost(), S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.START_FENCE)),
        (word, S.FAILED, effects),
    )
    assert consumer.failure[0] == "lost"


@pytest.mark.parametrize("word", [CancelAcked(), AbortReceived("transfer", "over", True)])
def test_slots_in_doubt_wait_for_the_writers_last_word(
    consumer: Transfer, word: CancelAcked
) -> None:
    """F8: RESERVED -> QUARANTINED, its owner is told at once -> FAILED, the slots return."""
    doubt = DoubtReceived("transfer", "timed out", True)
    follow(
        consumer,
        (LEASED, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY)),
        (doubt, S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.ARM_RETRY)),
        (doubt, S.QUARANTINED, ()),
        (RetryDue(), S.QUARANTINED, (Do.SEND_CANCEL, Do.START_FENCE)),
        (word, S.FAILED, (Do.RELEASE_SLOTS,)),
    )
    assert consumer.failure == ("transfer", "timed out", True)


def test_who_was_called_off_has_a_reason(producer: Transfer) -> None:
    """PARKED -> CANCELLED: its owner may have to tell somebody."""
    producer.fire(READY)
    producer.fire(CancelReceived())
    assert producer.failure[0] == "transfer" and "does not want it" in producer.failure[1]


def test_a_refusal_comes_with_its_reason(producer: Transfer) -> None:
    """PENDING -> CANCELLED: what the consumer could never take is not tried again."""
    producer.fire(CancelReceived(("capacity", "too long", False)))
    assert producer.failure == ("capacity", "too long", False)


def test_a_short_commit_fails_the_room(consumer: Transfer) -> None:
    """F11: RESERVED -> FAILED; the writer is done, so the slots are free."""
    ends = (Do.SEND_COMMIT_ACK, Do.RELEASE_SLOTS, Do.CONCLUDE_FAILED)
    consumer.fire(LEASED)
    follow(consumer, (CommitReceived(63, 7), S.FAILED, ends))
    assert "63 bytes where 64 were granted" in consumer.failure[1]


def test_slots_that_come_after_the_cancel_go_back(consumer: Transfer) -> None:
    """PENDING -> CANCELLED -> CANCELLED."""
    ends = (Do.WITHDRAW_LEASE, Do.SEND_CANCEL, Do.CONCLUDE_FAILED)
    follow(
        consumer,
        (CancelRequested(), S.CANCELLED, ends),
        (LEASED, S.CANCELLED, (Do.RELEASE_SLOTS,)),
    )
