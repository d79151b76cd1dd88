"""TRANSFER where a part is under way or nothing is known yet, and who takes work."""

from __future__ import annotations

from epd.fsm.instance import (
    DrainAnnounced,
    HeartbeatMissed,
    HeartbeatReceived,
    HeartbeatsEnded,
    JoinAccepted,
)
from epd.fsm.transfer import (
    BytesReady,
    Do,
    GrantReceived,
    PartReady,
    PeerSilent,
    RetryDue,
    S,
    Side,
)
from tests.fsm.paths import follow
from tests.fsm.tables import GRANT, make_instance, make_transfer


def test_a_contract_that_breaks_under_a_part_is_told() -> None:
    """F11: STREAMING -> CANCEL_PENDING: more bytes than were granted slots for."""
    producer = make_transfer(side=Side.PRODUCER)
    follow(
        producer,
        (GrantReceived(GRANT), S.RESERVED, ()),
        (PartReady(16), S.STREAMING, (Do.HOLD_PART, Do.START_WRITE)),
        (BytesReady("source", 1000), S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,)),
    )
    assert producer.source == "source"
    kind, reason, retryable = producer.failure
    assert (kind, retryable) == ("contract", False) and "1000 bytes" in reason


def test_a_producer_that_knows_nothing_yet_offers_nothing() -> None:
    producer = make_transfer(side=Side.PRODUCER)
    producer.meta = None
    follow(producer, (RetryDue(), S.PENDING, ()), (PeerSilent(), S.PENDING, ()))


def test_who_is_healthy_takes_work() -> None:
    instance = make_instance()
    told = [instance.takes_work]
    events = (JoinAccepted(), HeartbeatMissed(), HeartbeatReceived("load"), DrainAnnounced())
    for event in events:
        instance.fire(event)
        told.append(instance.takes_work)
    assert told == [False, True, False, True, False]
    assert not instance.was_lost
    instance.fire(HeartbeatsEnded())
    assert instance.was_lost
