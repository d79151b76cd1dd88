"""A run as a page: what is late is told as a cluster would tell it."""

from __future__ import annotations

from typing import Any

from epd_lab.sim.reports.page import answers_of

ROOM = ("p0:1", "r/1/0")


def moved(at_s: float, source: str, event: str, target: str) -> Any:
    return at_s, "INCOMING", (*ROOM, source, event, target)


def test_a_room_whose_fence_was_asked_in_vain_is_late() -> None:
    events = [
        (0.0, "spawn", ("p0:1",)),
        moved(1.0, "PENDING", "SlotsLeased", "RESERVED"),
        moved(1.5, "RESERVED", "RetryDue", "RESERVED"),
        moved(2.0, "RESERVED", "PeerLost", "QUARANTINED"),
        moved(2.5, "QUARANTINED", "RetryDue", "QUARANTINED"),
        moved(4.0, "QUARANTINED", "PeerFenced", "FAILED"),
    ]
    found = {}
    for answer in answers_of(events, 5.0, "a run", ()).answers:
        for state in answer.told.states:
            assert [one.is_late for one in answer.told.machines] == [state.late == 1]
            found[round(answer.at_ms)] = (state.state, state.late)
    assert found[1900] == ("RESERVED", 0)
    assert found[2250] == ("QUARANTINED", 0)
    assert found[3000] == ("QUARANTINED", 1)
    assert max(found) <= 4000
