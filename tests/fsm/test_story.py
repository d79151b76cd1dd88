"""Journal and timelines: what metrics, request timelines and traces are made from."""

from __future__ import annotations

from typing import Any

from epd.fsm.outgoing import (
    BytesReady,
    CancelReceived,
    GrantReceived,
    SlotsLeased,
    WriteSucceeded,
)
from epd.fsm.room import RetryDue
from epd.fsm.story import Change, Moment, RecordingJournal, Transition, changes, timeline
from tests.fsm.tables import GRANT, make_embedding, make_event, make_outgoing


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def test_transitions_are_counted_and_living_machines_are_known() -> None:
    journal = RecordingJournal(Clock())
    first, second = make_outgoing(journal), make_outgoing(journal)
    assert journal.live == {("OUTGOING", "PENDING"): 2}
    first.fire(BytesReady("rows", 64))
    assert journal.live == {("OUTGOING", "PENDING"): 1, ("OUTGOING", "PARKED"): 1}
    for transfer in (first, second):
        transfer.fire(CancelReceived())
        transfer.fire(CancelReceived())  # answered again: it ended once
    assert journal.live == {}
    assert journal.transitions == {
        Transition("OUTGOING", "PENDING", "BytesReady", "PARKED"): 1,
        Transition("OUTGOING", "PARKED", "CancelReceived", "CANCELLED"): 1,
        Transition("OUTGOING", "PENDING", "CancelReceived", "CANCELLED"): 1,
        Transition("OUTGOING", "CANCELLED", "CancelReceived", "CANCELLED"): 2,
    }


def test_observers_see_every_transition_with_its_machine() -> None:
    seen: list[tuple[str, ...]] = []

    def see(machine: Any, event: Any, source: Any, target: Any) -> None:
        seen.append((machine.key, type(event).__name__, source.name, target.name))

    transfer = make_outgoing(RecordingJournal(Clock(), [see]))
    transfer.fire(RetryDue())
    transfer.fire(BytesReady("rows", 64))
    assert seen == [
        ("room", "RetryDue", "PENDING", "PENDING"),
        ("room", "BytesReady", "PENDING", "PARKED"),
    ]


def test_ignored_events_leave_no_trace() -> None:
    journal = RecordingJournal(Clock())
    transfer = make_outgoing(journal)
    transfer.fire(CancelReceived())
    counted = dict(journal.transitions)
    transfer.fire(RetryDue())
    assert dict(journal.transitions) == counted


def test_a_timeline_merges_machines_by_time() -> None:
    """From PENDING to WRITTEN, while an EMBEDDING is REQUESTED in between."""
    journal = RecordingJournal(Clock())
    transfer, embedding = make_outgoing(journal), make_embedding(journal)
    transfer.fire(BytesReady("rows", 64))
    embedding.fire(make_event(type(embedding).table.events[0]))
    transfer.fire(RetryDue())  # stays: not a moment of the timeline
    transfer.fire(GrantReceived(GRANT))
    transfer.fire(SlotsLeased(()))
    transfer.fire(WriteSucceeded(1))
    assert timeline([changes(transfer), changes(embedding)], start_s=100.0) == [
        Moment("OUTGOING", "room", "PARKED", 250.0),
        Moment("EMBEDDING", "hash", "REQUESTED", 500.0),
        Moment("OUTGOING", "room", "AWAITING_SLOTS", 1000.0),
        Moment("OUTGOING", "room", "WRITING", 1250.0),
        Moment("OUTGOING", "room", "WRITTEN", 1500.0),
    ]


def test_changes_of_another_process_are_shifted_to_one_clock() -> None:
    transfer = make_outgoing(RecordingJournal(Clock()))
    transfer.fire(BytesReady("rows", 64))
    theirs = [Change("REQUEST", "r/1", "RUNNING", 1100.0)]
    merged = timeline([changes(transfer, offset_s=1000.0), theirs], start_s=1100.0)
    assert [(m.machine, m.t_ms) for m in merged] == [("REQUEST", 0.0), ("OUTGOING", 250.0)]
