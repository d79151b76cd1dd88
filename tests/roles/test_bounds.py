"""Bounds of one machine behind one timer, and signs of life of many behind one: when each comes."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from epd.config import Timing
from epd.roles.bounds import Bounds
from epd.roles.mailbox import Mailbox
from epd.roles.signs_of_life import SignsOfLife
from epd.roles.timers import Timers
from tests.roles.test_timers import ManualClock


class Planned(Exception):
    """What a test lets a callback raise."""


def breaks(*_: str) -> None:
    raise Planned


class Process:
    """What of an actor has to do with time."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._timers = Timers(self.clock, Mailbox(self._failed))
        self.arm, self.disarm = self._timers.arm, self._timers.disarm
        self.armed = self._timers.__contains__
        self.num_armed = 0
        self.told: list[tuple[float, str]] = []

    def _failed(self, name: str, error: Exception) -> None:
        assert isinstance(error, Planned), (name, error)

    def tell(self, what: str) -> None:
        self.told.append((self.clock.at_s, what))


def bounds_of(process: Any) -> Bounds:
    return Bounds(process, "one")


def test_each_bound_comes_once_and_when_it_is_due() -> None:
    process = Process()
    bounds = bounds_of(process)
    for what, delay_s in (("late", 3.0), ("soon", 1.0), ("middle", 2.0)):
        bounds.put(what, delay_s, partial(process.tell, what))
    assert "soon" in bounds
    process.clock.run_until(10.0)
    assert process.told == [(1.0, "soon"), (2.0, "middle"), (3.0, "late")]
    assert "soon" not in bounds and not process.armed("one")


def test_putting_a_bound_off_asks_nothing_of_the_clock() -> None:
    process = Process()
    bounds = bounds_of(process)
    bounds.put("token", 2.0, partial(process.tell, "token"))
    asked = len(process.clock.handles)
    for _ in range(15):
        process.clock.at_s += 0.1
        bounds.put("token", 2.0, partial(process.tell, "token"))
    assert len(process.clock.handles) == asked
    process.clock.run_until(10.0)
    assert process.told == [(3.5, "token")]


def test_who_is_called_may_put_bounds_and_close_all() -> None:
    process = Process()
    bounds = bounds_of(process)

    def again() -> None:
        process.tell("again")
        bounds.put("next", 0.5, bounds.close)

    bounds.put("first", 1.0, again)
    bounds.put("never", 2.0, partial(process.tell, "never"))
    process.clock.run_until(10.0)
    assert process.told == [(1.0, "again")]
    assert not process.armed("one")


def test_one_bound_puts_off_another_that_is_due_as_well() -> None:
    process = Process()
    bounds = bounds_of(process)
    other = partial(process.tell, "other")
    bounds.put("one", 1.0, lambda: bounds.put("other", 1.0, other))
    bounds.put("other", 1.0, other)
    process.clock.run_until(10.0)
    assert process.told == [(2.0, "other")]


def test_a_bound_that_raises_takes_no_other_along() -> None:
    process = Process()
    bounds = bounds_of(process)
    bounds.put("breaks", 1.0, breaks)
    bounds.put("as soon", 1.0, partial(process.tell, "as soon"))
    bounds.put("deadline", 3.0, partial(process.tell, "deadline"))
    process.clock.run_until(10.0)
    assert process.told == [(1.0, "as soon"), (3.0, "deadline")]


def test_signs_of_life_come_soon_and_then_seldom_and_only_of_what_is_open() -> None:
    process: Any = Process()
    timing = msgspec.structs.replace(
        Timing(), accept_timeout_s=4.0, stall_timeout_s=9.0, token_timeout_s=9.0
    )
    signs = SignsOfLife(process, timing, process.tell)
    signs.opened("long")
    process.clock.run_until(0.5)
    process.clock.at_s = 0.5
    signs.opened("short")
    process.clock.run_until(1.2)
    signs.closed("short")
    process.clock.run_until(8.0)
    assert process.told == [(1.0, "long"), (4.0, "long"), (7.0, "long")]
    process.clock.at_s = 8.0
    signs.opened("between two looks")
    process.clock.run_until(9.9)
    assert process.told[3:] == [(9.0, "between two looks")]
    signs.closed("long")
    signs.closed("between two looks")
    assert not process.armed("request/alive")


def test_a_sign_of_life_that_raises_silences_no_other() -> None:
    process: Any = Process()
    told: list[str] = []

    def tell(key: str) -> None:
        told.append(key)
        if key == "broken":
            breaks()

    signs = SignsOfLife(process, Timing(), tell)
    signs.opened("broken")
    signs.opened("well")
    process.clock.run_until(Timing().accept_timeout_s)
    assert told == ["broken", "well"]
