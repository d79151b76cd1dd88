"""Recordings: every reader gets all of it, whenever it comes; the slowest holds up its maker."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.api.http.exchange import AsgiMessage
from epd.api.http.recording import MAX_UNREAD, Recording

STEPS = st.sampled_from(["write", "join", "leave", "forget", *["take"] * 6])


def message(n: int) -> AsgiMessage:
    return {"type": "http.response.body", "body": b"%d" % n, "more_body": True}


class Story:
    """Plays steps, and knows what each reader has to have."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.written: list[AsgiMessage] = []
        self.had: dict[int, list[AsgiMessage]] = {}

    def take(self, reader: int) -> None:
        if (one := self.recording.take(reader)) is not None:
            self.had[reader].append(one)

    def play(self, step: str, reader: int) -> None:
        recording = self.recording
        if step == "write":
            self.written.append(message(len(self.written)))
            recording.append(self.written[-1])
        elif step == "join" and recording.is_kept:
            self.had[recording.join()] = []
        elif step == "forget":
            recording.forget()
        elif step == "take" and self.had:
            self.take([*self.had][reader % len(self.had)])
        elif step == "leave" and self.had:
            gone = [*self.had][reader % len(self.had)]
            recording.leave(gone)
            del self.had[gone]


@given(st.lists(st.tuples(STEPS, st.integers(0, 7)), max_size=60))
def test_every_reader_gets_the_whole_whenever_it_comes(steps: list[tuple[str, int]]) -> None:
    holds(steps)


def holds(steps: list[tuple[str, int]]) -> None:
    story = Story()
    for step, reader in steps:
        story.play(step, reader)
    for reader, had in story.had.items():
        for _ in story.written[len(had) :]:
            story.take(reader)
        assert had == story.written and story.recording.take(reader) is None
    assert story.recording.has_readers == bool(story.had)


def test_a_reader_that_comes_late_and_misses_the_first_part_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def join_at_the_end(self: Recording) -> int:
        self._unread[7] = deque()
        return 7

    monkeypatch.setattr(Recording, "join", join_at_the_end)
    with pytest.raises(AssertionError):
        holds([("write", 0), ("join", 0)])


def test_only_a_forgotten_one_has_its_maker_wait() -> None:
    recording = Recording()
    reader = recording.join()
    for n in range(MAX_UNREAD + 1):
        recording.append(message(n))
    assert not recording.is_full and recording.nbytes > MAX_UNREAD
    recording.forget()
    assert recording.is_full
    recording.take(reader)
    assert not recording.is_full
    recording.append(message(-1))
    assert recording.is_full
    recording.leave(reader)
    assert not recording.is_full
