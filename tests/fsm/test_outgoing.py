"""OUTGOING: the paths of a producer's end, and the faults that its rows make impossible."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event
from epd.fsm.outgoing import (
    BytesReady,
    CancelReceived,
    CommitAcked,
    Do,
    GrantReceived,
    Manifest,
    Outgoing,
    PartReady,
    PeerFenced,
    S,
    SlotsLeased,
    SourceFailed,
    WriteOutcomeUnknown,
    WriteRefused,
    WriteSettled,
    WriteSucceeded,
)
from epd.fsm.room import DeadlinePassed, GraceEnded, PeerLost, PeerSilent, RetryDue
from epd.messages import Grant
from tests.fsm.paths import follow
from tests.fsm.tables import CONTRACT, FAILURE, GRANT, OFFER, make_outgoing

READY = BytesReady(64)
GRANTED = GrantReceived(GRANT)
LEASED = SlotsLeased((5,))
RELEASED = (Do.RELEASE_SOURCE, Do.RELEASE_SLOTS)
DELIVERED = (*RELEASED, Do.CONCLUDE_DELIVERED)
STOPPED = (*RELEASED, Do.SEND_CANCEL_ACK)


@pytest.fixture
def producer() -> Outgoing:
    return make_outgoing()


def test_bytes_before_the_grant_are_parked_and_flushed_then(producer: Outgoing) -> None:
    """F1: PENDING -> PARKED -> WRITING -> WRITTEN -> DELIVERED."""
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,)),
        (LEASED, S.WRITING, (Do.START_WRITE,)),
        (WriteSucceeded(7), S.WRITTEN, (Do.SEND_COMMIT, Do.ARM_RETRY)),
        (CommitAcked(), S.DELIVERED, DELIVERED),
    )
    assert (producer.parts, producer.part_nbytes, producer.written_nbytes) == (((64, 7),), 0, 64)


def test_parts_go_while_the_rest_is_made(producer: Outgoing) -> None:
    """GRANTED -> STREAMING -> STREAMING -> GRANTED -> STREAMING -> WRITING -> WRITTEN."""
    ready = BytesReady(2 * 64)
    held = replace(GRANT, slots=(0, 1, 2))
    follow(
        producer,
        (PartReady(16), S.PENDING, ()),
        (GrantReceived(held), S.GRANTED, ()),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART,)),
        (PartReady(32), S.STREAMING, (Do.HOLD_PART,)),
        (WriteSucceeded(1), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (WriteSucceeded(2), S.GRANTED, (Do.RELEASE_SOURCE,)),
        (PartReady(32), S.GRANTED, ()),
        (PartReady(48), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (ready, S.WRITING, ()),
        (WriteSucceeded(3), S.WRITING, (Do.START_WRITE,)),
        (WriteSucceeded(4), S.WRITTEN, (Do.SEND_COMMIT, Do.ARM_RETRY)),
        (PartReady(48), S.WRITTEN, ()),
        (CommitAcked(), S.DELIVERED, DELIVERED),
    )
    assert producer.parts == ((16, 1), (16, 2), (16, 3), (80, 4))


@pytest.mark.parametrize(
    ("event", "effects"),
    [
        (CancelReceived(), (Do.CONCLUDE_FAILED,)),
        (PeerLost(), (Do.CONCLUDE_FAILED,)),
        (SourceFailed(FAILURE), ()),
    ],
    ids=["cancelled", "lost", "withdrawn"],
)
def test_a_part_under_way_keeps_its_source(
    producer: Outgoing, event: Any, effects: tuple[Do, ...]
) -> None:
    """F6: STREAMING -> CANCEL_PENDING -> CANCELLED; what comes of the request changes nothing."""
    follow(
        producer,
        (GRANTED, S.GRANTED, ()),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (event, S.CANCEL_PENDING, effects),
        (PartReady(32), S.CANCEL_PENDING, ()),
        (WriteSucceeded(1), S.CANCELLED, STOPPED),
    )


def test_a_grant_before_the_bytes(producer: Outgoing) -> None:
    """PENDING -> GRANTED -> AWAITING_SLOTS -> WRITING."""
    follow(
        producer,
        (GRANTED, S.GRANTED, ()),
        (READY, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,)),
        (LEASED, S.WRITING, (Do.START_WRITE,)),
    )


@pytest.mark.parametrize(
    ("end", "state", "told"),
    [
        (CancelReceived(), S.CANCELLED, (Do.SEND_CANCEL_ACK, Do.CONCLUDE_FAILED)),
        (SourceFailed(FAILURE), S.FAILED, (Do.SEND_ABORT,)),
        (PeerLost(), S.FAILED, (Do.CONCLUDE_FAILED,)),
        (DeadlinePassed(), S.EXPIRED, (Do.SEND_ABORT, Do.CONCLUDE_FAILED)),
    ],
)
def test_who_waits_for_slots_to_write_from_ends_at_once(
    producer: Outgoing, end: Event, state: S, told: tuple[Do, ...]
) -> None:
    """F3, F4: nothing is written yet; slots that are leased in the same moment go back."""
    producer.fire(READY)
    producer.fire(GRANTED)
    follow(
        producer,
        (GRANTED, S.AWAITING_SLOTS, ()),
        (RetryDue(), S.AWAITING_SLOTS, ()),
        (end, state, (Do.RELEASE_SOURCE, Do.RELEASE_SLOTS, *told)),
        (LEASED, state, (Do.RELEASE_SLOTS,)),
    )
    assert producer.slots == (5,), "what goes back is known"


def test_parked_bytes_have_a_reaper(producer: Outgoing) -> None:
    """F1: PENDING -> PARKED -> EXPIRED, and a grant that comes too late is answered."""
    ends = (Do.RELEASE_SOURCE, Do.SEND_ABORT, Do.CONCLUDE_FAILED)
    follow(
        producer,
        (READY, S.PARKED, ()),
        (DeadlinePassed(), S.EXPIRED, ends),
        (GRANTED, S.EXPIRED, (Do.SEND_ABORT,)),
    )
    assert producer.why.kind is FailureKind.DEADLINE


def test_a_commit_is_repeated_until_acknowledged(producer: Outgoing) -> None:
    """WRITTEN -> WRITTEN -> WRITTEN -> DELIVERED."""
    again = (Do.SEND_COMMIT, Do.ARM_RETRY)
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,)),
        (LEASED, S.WRITING, (Do.START_WRITE,)),
        (WriteSucceeded(7), S.WRITTEN, again),
        (RetryDue(), S.WRITTEN, again),
        (GRANTED, S.WRITTEN, (Do.SEND_COMMIT,)),
        (CommitAcked(), S.DELIVERED, DELIVERED),
        (CommitAcked(), S.DELIVERED, ()),
    )


def test_a_cancelled_write_keeps_its_source_until_the_write_has_ended(producer: Outgoing) -> None:
    """F6: PARKED -> WRITING -> CANCEL_PENDING -> CANCELLED."""
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,)),
        (LEASED, S.WRITING, (Do.START_WRITE,)),
        (CancelReceived(), S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,)),
        (CancelReceived(), S.CANCEL_PENDING, ()),
        (WriteSucceeded(7), S.CANCELLED, STOPPED),
    )


@pytest.mark.parametrize(
    ("stop", "pending"),
    [(DeadlinePassed(), S.EXPIRE_PENDING), (PeerLost(), S.CANCEL_PENDING)],
)
def test_an_unknown_outcome_keeps_the_source_until_its_end_is_certain(
    producer: Outgoing, stop: DeadlinePassed, pending: S
) -> None:
    """F8: WRITING -> EXPIRE_PENDING or CANCEL_PENDING -> QUARANTINED -> FAILED."""
    for event in (READY, GRANTED, LEASED, stop):
        producer.fire(event)
    assert producer.state is pending
    follow(
        producer,
        (WriteOutcomeUnknown("timed out"), S.QUARANTINED, (Do.SETTLE_WRITE,)),
        (DeadlinePassed(), S.QUARANTINED, ()),
        (CancelReceived(), S.QUARANTINED, ()),
        (RetryDue(), S.QUARANTINED, (Do.SETTLE_WRITE,)),
        (PeerFenced(), S.FAILED, RELEASED),
    )


def test_a_doubt_is_told_and_ends_when_the_engine_has_settled(producer: Outgoing) -> None:
    """F8: WRITING -> QUARANTINED -> FAILED while the peer lives; the doubt is said again."""
    for event in (READY, GRANTED, LEASED):
        producer.fire(event)
    told = (Do.CONCLUDE_FAILED, Do.SEND_DOUBT, Do.SETTLE_WRITE)
    follow(
        producer,
        (WriteOutcomeUnknown("timed out"), S.QUARANTINED, told),
        (GRANTED, S.QUARANTINED, (Do.SEND_DOUBT,)),
        (WriteSettled(), S.FAILED, (*RELEASED, Do.SEND_ABORT)),
        (CancelReceived(), S.FAILED, (Do.SEND_CANCEL_ACK,)),
        (WriteSettled(), S.FAILED, ()),
    )
    assert producer.failure == Failure(FailureKind.TRANSFER, "timed out")


def test_a_write_that_does_not_end_keeps_its_source(producer: Outgoing) -> None:
    """F8: WRITING -> EXPIRE_PENDING -> EXPIRE_PENDING -> EXPIRED: only its own outcome frees it,
    and the operator hears of it."""
    follow(
        producer,
        (GRANTED, S.GRANTED, ()),
        (READY, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,)),
        (LEASED, S.WRITING, (Do.START_WRITE,)),
        (DeadlinePassed(), S.EXPIRE_PENDING, (Do.CONCLUDE_FAILED, Do.ARM_GRACE)),
        (GraceEnded(), S.EXPIRE_PENDING, (Do.REPORT_HANG, Do.ARM_GRACE)),
        (PeerLost(), S.EXPIRE_PENDING, ()),
        (WriteRefused("gone"), S.EXPIRED, STOPPED),
    )


@pytest.mark.parametrize(
    "grant",
    [
        replace(GRANT, num_rows=3),
        replace(GRANT, contract=replace(CONTRACT, dtype="f32")),
        replace(GRANT, slots=()),
    ],
    ids=["rows", "contract", "room"],
)
@pytest.mark.parametrize("bytes_first", [True, False])
def test_no_byte_moves_against_the_contract(
    producer: Outgoing, grant: Grant, bytes_first: bool
) -> None:
    """F11: PARKED or GRANTED -> FAILED; both ends are told, the source is free."""
    events = [READY, GrantReceived(grant)]
    first, second = events if bytes_first else reversed(events)
    assert producer.fire(first) == ()
    assert producer.fire(second) == (Do.RELEASE_SOURCE, Do.SEND_ABORT, Do.CONCLUDE_FAILED)
    assert producer.state is S.FAILED
    assert producer.why.kind is FailureKind.CONTRACT and not producer.why.retryable


def test_what_the_consumer_holds_is_not_sent(producer: Outgoing) -> None:
    """Three blocks of KV, of which the consumer knows one: two slots are enough."""
    held = replace(GRANT, num_held=1)
    assert producer.fire(BytesReady(3 * 64)) == ()
    assert producer.fire(GrantReceived(held)) == (Do.LEASE_SLOTS,)
    assert producer.sent_nbytes == 2 * 64
    with pytest.raises(ValueError, match="2 places of 1"):
        replace(held, held=(0, 1))


def test_cancel_before_everything_wins(producer: Outgoing) -> None:
    """F42: PENDING -> CANCELLED; the grant and the bytes that follow revive nothing."""
    follow(
        producer,
        (CancelReceived(), S.CANCELLED, (Do.SEND_CANCEL_ACK, Do.CONCLUDE_FAILED)),
        (GRANTED, S.CANCELLED, (Do.SEND_ABORT,)),
        (READY, S.CANCELLED, (Do.RELEASE_SOURCE,)),
        (CancelReceived(), S.CANCELLED, (Do.SEND_CANCEL_ACK,)),
    )


def test_an_offer_is_repeated_only_by_who_offers(producer: Outgoing) -> None:
    """PENDING -> PENDING, with and without an offer (KV, rows)."""
    follow(producer, (RetryDue(), S.PENDING, ()))
    producer.manifest = Manifest(None, 4, OFFER)
    follow(producer, (RetryDue(), S.PENDING, (Do.SEND_OFFER, Do.ARM_RETRY)))


def test_a_source_that_is_withdrawn_mid_write_stays_until_the_write_ends(
    producer: Outgoing,
) -> None:
    """WRITING -> CANCEL_PENDING -> CANCELLED; its owner withdrew it and is not told."""
    follow(
        producer,
        (READY, S.PARKED, ()),
        (GRANTED, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,)),
        (LEASED, S.WRITING, (Do.START_WRITE,)),
        (SourceFailed(FAILURE), S.CANCEL_PENDING, ()),
        (WriteSucceeded(7), S.CANCELLED, STOPPED),
    )


def test_who_was_called_off_has_a_reason(producer: Outgoing) -> None:
    """PARKED -> CANCELLED: its owner may have to tell somebody."""
    producer.fire(READY)
    producer.fire(CancelReceived())
    assert producer.why.kind is FailureKind.TRANSFER
    assert "does not want it" in producer.why.reason


def test_a_refusal_comes_with_its_reason(producer: Outgoing) -> None:
    """PENDING -> CANCELLED: what the consumer could never take is not tried again."""
    refusal = Failure(FailureKind.CAPACITY, "too long")
    producer.fire(CancelReceived(refusal))
    assert producer.failure == refusal


def test_a_contract_that_breaks_under_a_part_is_told(producer: Outgoing) -> None:
    """F11: STREAMING -> CANCEL_PENDING: more bytes than were granted slots for."""
    follow(
        producer,
        (GrantReceived(GRANT), S.GRANTED, ()),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (BytesReady(1000), S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,)),
    )
    assert producer.why.kind is FailureKind.CONTRACT and "1000 bytes" in producer.why.reason


def test_a_producer_that_knows_nothing_yet_offers_nothing(producer: Outgoing) -> None:
    producer.manifest = None
    follow(producer, (RetryDue(), S.PENDING, ()), (PeerSilent(), S.PENDING, ()))
