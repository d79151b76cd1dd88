"""Journal and timelines: what metrics, request timelines and traces are made from."""

from __future__ import annotations

from typing import Any

import pytest

from epd.fsm.kernel import IllegalEvent
from epd.fsm.outgoing import (
    BytesReady,
    CancelReceived,
    GrantReceived,
    SlotsLeased,
    WriteSucceeded,
)
from epd.fsm.room import RetryDue
from epd.fsm.story import ILLEGAL, Change, Moment, RecordingJournal, Transition, changes, timeline
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
    first.fire(BytesReady(64))
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
    transfer.fire(BytesReady(64))
    assert seen == [
        ("room", "RetryDue", "PENDING", "PENDING"),
        ("room", "BytesReady", "PENDING", "PARKED"),
    ]


def test_events_that_move_nothing_are_only_counted() -> None:
    journal = RecordingJournal(Clock())
    transfer = make_outgoing(journal)
    transfer.fire(CancelReceived())
    counted = dict(journal.transitions)
    transfer.fire(RetryDue())
    assert dict(journal.transitions) == counted
    late = Transition("OUTGOING", "CANCELLED", "RetryDue", "CANCELLED")
    illegal = Transition("OUTGOING", "CANCELLED", "WriteSucceeded", "CANCELLED")
    with pytest.raises(IllegalEvent):
        transfer.fire(WriteSucceeded(1))
    assert journal.unmoved_events == {
        late: (1, "its timer does not run here"),
        illegal: (1, ILLEGAL),
    }


def test_who_is_where_since_when_and_who_has_ended() -> None:
    clock = Clock()
    journal = RecordingJournal(clock)
    first, second = make_outgoing(journal), make_outgoing(journal)
    clock.now = 200.0
    second.fire(BytesReady(64))
    clock.now = 300.0
    second.fire(RetryDue())  # it stays where it is since 200
    where = {state.name: machines for _, state, machines in journal.residents()}
    assert where == {"PENDING": {first: 100.25}, "PARKED": {second: 200.25}}
    clock.now = 400.0
    second.fire(CancelReceived())
    ended = [(one.key, one.state.name, one.since_s) for one in journal.ended()]
    assert ended == [("room", "CANCELLED", 400.25)]
    assert len(list(journal.residents())) == 1


def test_a_timeline_merges_machines_by_time() -> None:
    """From PENDING to WRITTEN, while an EMBEDDING is REQUESTED in between."""
    clock = Clock()
    journal = RecordingJournal(clock)
    transfer, embedding = make_outgoing(journal), make_embedding(journal)
    clock.now = 100.0
    transfer.fire(BytesReady(64))
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
    clock = Clock()
    transfer = make_outgoing(RecordingJournal(clock))
    clock.now = 100.0
    transfer.fire(BytesReady(64))
    theirs = [Change("REQUEST", "r/1", "RUNNING", 1100.0)]
    merged = timeline([changes(transfer, offset_s=1000.0), theirs], start_s=1100.0)
    assert [(m.machine, m.t_ms) for m in merged] == [("REQUEST", 0.0), ("OUTGOING", 250.0)]
