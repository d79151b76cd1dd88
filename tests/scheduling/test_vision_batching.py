"""Which images go into a vision batch."""

from __future__ import annotations

from epd.scheduling.vision_batching import next_batch


def line(*patches: int) -> list[tuple[int, str, int]]:
    return [(arrival, chr(ord("a") + arrival), count) for arrival, count in enumerate(patches)]


def test_the_oldest_go_under_the_budget() -> None:
    assert next_batch(line(40, 30, 40, 10)[::-1], 100) == ["a", "b"]
    assert next_batch(line(400, 30), 100) == ["a"]
    assert next_batch(line(), 100) == []


def test_behind_another_goes_only_what_is_half_full() -> None:
    for patches, expected in (
        ((49,), []),
        ((50,), ["a"]),
        ((20, 20), []),
        ((20, 20, 20), ["a", "b", "c"]),
        ((30, 80), []),  # the second does not fit, and goes first in the next
        ((400,), ["a"]),
        ((), []),
    ):
        assert next_batch(line(*patches), 100, is_behind=True) == expected, patches
        assert next_batch(line(*patches), 100) or not patches
