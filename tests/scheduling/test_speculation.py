"""Prompt lookup: an index that grows with the text drafts what a scan of the whole text would."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.speculation import MAX_READ, PromptLookup

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def scan(text: Sequence[int], shortest: int, longest: int, limit: int) -> tuple[int, ...]:
    """The definition: the longest suffix that stands earlier, its most recent place, what follows
    there, going on with the copy where the text ends."""
    for size in range(longest, shortest - 1, -1):
        for at in range(len(text) - 1, size - 1, -1):
            if size < len(text) and list(text[at - size : at]) == list(text[-size:]):
                copy = list(text)
                for place in range(at, at + limit):
                    copy.append(copy[place])
                return tuple(copy[len(text) :])
    return ()


def draft(lookup: PromptLookup, text: Sequence[int], limit: int) -> tuple[int, ...]:
    return lookup.draft(lambda start, stop: text[start:stop], len(text), limit)


@given(TEXTS, st.integers(1, 3), st.integers(0, 2), st.integers(0, 8), st.data())
def test_the_index_drafts_what_a_scan_finds(
    text: list[int], shortest: int, more: int, limit: int, data: st.DataObject
) -> None:
    """However the text grows: token by token, or several at once."""
    lookup = PromptLookup(shortest, shortest + more)
    known = 0
    while known < len(text):
        known = data.draw(st.integers(known + 1, len(text)))
        found = draft(lookup, text[:known], limit)
        assert found == scan(text[:known], shortest, shortest + more, limit)


@given(TEXTS, st.integers(0, 8))
def test_placeholders_are_never_drafted(text: list[int], limit: int) -> None:
    """What stands before one is."""
    free = scan(text, 1, 3, limit)
    expected = free[: free.index(0)] if 0 in free else free
    assert draft(PromptLookup(1, 3, {0}), text, limit) == expected


def test_a_period_is_drafted_to_any_length() -> None:
    assert draft(PromptLookup(2, 4), [9, 1, 2, 1, 2, 1, 2], 7) == (1, 2, 1, 2, 1, 2, 1)


def test_each_token_is_noted_once_for_each_length() -> None:
    lookup = PromptLookup(2, 3)
    assert draft(lookup, range(10), 4) == ()
    assert len(lookup._after) == (10 - 2) + (10 - 3)


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert draft(PromptLookup(1, 3), [1, 2, 3, 4, 9, 3, 5, 1, 2, 3], 1) == (4,)


def test_a_long_prompt_is_read_in_parts() -> None:
    """No call takes in more than `MAX_READ` tokens, and nothing is drafted before the last."""
    text = [*range(MAX_READ * 2), 0, 1]
    lookup = PromptLookup(2, 2)
    assert [draft(lookup, text, 2) for _ in range(3)] == [(), (), (2, 3)]


def test_a_token_costs_the_same_in_a_long_text() -> None:
    lookup = PromptLookup(2, 4)
    text = [n * n % 1000 for n in range(100_000)]
    while not lookup.draft(lambda start, stop: text[start:stop], len(text), 4):
        pass
    started = time.thread_time()
    for n in range(1000):
        text.append(n % 7)
        draft_now = lookup.draft(lambda start, stop: text[start:stop], len(text), 4)
    assert draft_now
    assert time.thread_time() - started < 1.0
