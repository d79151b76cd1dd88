"""How far an encoder runs ahead: in order, within the device tier, grants first."""

from __future__ import annotations

import asyncio
from collections import Counter

from epd.roles.run_ahead import RunAhead


def begin(ahead: RunAhead, *wishes: tuple[str, int]) -> dict[str, asyncio.Task[bool]]:
    return {key: asyncio.ensure_future(ahead.begin(key, nbytes)) for key, nbytes in wishes}


async def begun(tasks: dict[str, asyncio.Task[bool]]) -> list[str]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [key for key, task in tasks.items() if task.done()]


async def test_what_does_not_fit_waits_and_is_not_overtaken() -> None:
    counters: Counter[str] = Counter()
    ahead = RunAhead(10, lambda key: False, counters)
    tasks = begin(ahead, ("a", 6), ("b", 6), ("c", 1))
    assert await begun(tasks) == ["a"]
    assert counters["encodes_deferred"] == 2
    ahead.leave("a")
    assert await begun(tasks) == ["a", "b", "c"]
    assert ahead.used == 7


async def test_one_that_is_larger_than_all_goes_alone() -> None:
    ahead = RunAhead(10, lambda key: False, Counter())
    tasks = begin(ahead, ("huge", 100), ("a", 1))
    assert await begun(tasks) == ["huge"]
    ahead.leave("huge")
    assert await begun(tasks) == ["huge", "a"]


async def test_who_has_a_grant_overtakes() -> None:
    granted: set[str] = set()
    ahead = RunAhead(10, granted.__contains__, Counter())
    tasks = begin(ahead, ("a", 10), ("b", 10), ("c", 10))
    assert await begun(tasks) == ["a"]
    granted.add("c")
    ahead.pump()
    assert await begun(tasks) == ["a", "c"]


async def test_who_is_not_wanted_leaves_the_queue() -> None:
    ahead = RunAhead(10, lambda key: False, Counter())
    tasks = begin(ahead, ("a", 10), ("b", 10))
    assert await begun(tasks) == ["a"]
    ahead.leave("b")
    assert await tasks["b"] is False
    ahead.leave("a")
    assert (ahead.used, len(ahead)) == (0, 0)


async def test_who_left_when_its_turn_had_come_stands_in_line_again() -> None:
    """It is wanted again before it could begin: what nobody counts would be begun."""
    ahead = RunAhead(10, lambda key: False, Counter())
    tasks = begin(ahead, ("a", 10), ("b", 10))
    assert await begun(tasks) == ["a"]
    ahead.leave("a")  # it is the turn of b, which does not know yet
    ahead.leave("b")
    assert await tasks["b"] is False
    assert ahead.used == 0
