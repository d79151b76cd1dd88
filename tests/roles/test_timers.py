"""Timers: one timer of the loop serves them all, and none goes off early, late or twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from epd.fsm.kernel import NULL_JOURNAL
from epd.fsm.link import EchoMissed, Link, RetryDue
from epd.roles.timers import MIN_MARKED, Timers
from tests.fsm.tables import PEER, make_link
from tests.roles.turns import AtOnce


class Handle:
    def __init__(self, when_s: float, callback: Callable[[], None]) -> None:
        self.when_s = when_s
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Time that a test moves; counts what it was asked for."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.handles: list[Handle] = []

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Handle:
        self.handles.append(Handle(when_s, callback))
        return self.handles[-1]

    def run_until(self, until_s: float) -> None:
        while due := [h for h in self.handles if h.callback is not None and h.when_s <= until_s]:
            handle = min(due, key=lambda h: h.when_s)
            self.at_s = max(self.at_s, handle.when_s)
            callback = handle.callback
            handle.cancel()
            assert callback is not None
            callback()
        self.at_s = until_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def errors() -> list[str]:
    return []


@pytest.fixture
def timers(clock: ManualClock, errors: list[str]) -> Timers:
    return Timers(clock, AtOnce(lambda name, error: errors.append(f"{name}: {error}")))


def call(seen: list[str], name: str) -> Callable[[], None]:
    return lambda: seen.append(name)


def test_they_go_off_at_their_times_and_equal_times_in_order(
    clock: ManualClock, timers: Timers
) -> None:
    seen: list[tuple[str, float]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append((name, clock.at_s))

    for name, delay_s in (("late", 3.0), ("b", 1.0), ("a", 1.0), ("now", 0.0)):
        timers.call_later(delay_s, note(name))
    clock.run_until(5.0)
    assert seen == [("now", 0.0), ("b", 1.0), ("a", 1.0), ("late", 3.0)]
    assert list(timers) == []


def test_one_that_is_put_off_or_brought_forward_goes_off_once(
    clock: ManualClock, timers: Timers
) -> None:
    seen: list[float] = []
    link = make_link()

    def note() -> None:
        seen.append(clock.at_s)

    timers.arm(link, RetryDue, 1.0, lambda: seen.append(-1.0))
    clock.run_until(0.5)
    timers.arm(link, RetryDue, 1.0, note)
    clock.run_until(1.4)
    assert seen == []
    clock.run_until(2.0)
    assert seen == [1.5] and not timers.runs(link, RetryDue)
    timers.call_later(5.0, note)
    timers.call_later(1.0, note)
    clock.run_until(9.0)
    assert seen == [1.5, 3.0]


def test_a_machine_has_one_of_each_event_until_it_enters_a_state_without_it(
    clock: ManualClock, timers: Timers
) -> None:
    seen: list[str] = []
    one, other = make_link(), make_link()
    for name, link in (("one", one), ("other", other)):
        timers.arm(link, RetryDue, 1.0, call(seen, f"{name} retry"))
        timers.arm(link, EchoMissed, 2.0, call(seen, f"{name} echo"))
    key = one.key
    assert [*timers] == [f"LINK {key} RetryDue", f"LINK {key} EchoMissed"] * 2
    timers.keep(one, {EchoMissed})
    assert [timers.runs(one, event) for event in (RetryDue, EchoMissed)] == [False, True]
    timers.keep(other, ())
    assert len([*timers]) == 1
    clock.run_until(9.0)
    assert seen == ["one echo"] and not [*timers]


def test_what_is_cancelled_or_closed_never_goes_off(clock: ManualClock, timers: Timers) -> None:
    seen: list[str] = []
    a, c = call(seen, "a"), call(seen, "c")
    timers.call_later(1.0, a)
    timers.call_later(1.0, lambda: timers.cancel_call(c))
    timers.call_later(1.0, c)
    assert timers.will_call(a)
    timers.cancel_call(a)
    clock.run_until(2.0)
    timers.call_later(1.0, call(seen, "d"))
    timers.close()
    timers.call_later(1.0, call(seen, "e"))
    clock.run_until(9.0)
    assert seen == []


def test_a_timer_that_arms_itself_again_does_not_hold_the_loop(
    clock: ManualClock, timers: Timers
) -> None:
    seen: list[float] = []

    def again() -> None:
        seen.append(clock.at_s)
        if len(seen) < 3:
            timers.call_later(0.0, again)

    timers.call_later(0.0, again)
    handle = clock.handles[-1]
    assert handle.callback is not None
    handle.callback()
    assert len(seen) == 1, "the others must get their turn"
    clock.run_until(1.0)
    assert len(seen) == 3


def test_an_exception_stays_with_its_timer(
    clock: ManualClock, timers: Timers, errors: list[str]
) -> None:
    seen: list[str] = []
    link = make_link()

    def fail() -> None:
        raise ValueError("broken")

    timers.arm(link, RetryDue, 1.0, fail)
    timers.call_later(1.0, call(seen, "good"))
    clock.run_until(2.0)
    assert (errors, seen) == ([f"LINK {link.key} RetryDue: broken"], ["good"])


def test_the_loop_has_one_timer_and_what_is_dropped_is_swept(
    clock: ManualClock, timers: Timers
) -> None:
    timers.call_later(1.0, lambda: None)
    dropped = weakref.WeakSet[Callable[[], None]]()
    for number in range(50 * MIN_MARKED):
        one = call([], "dropped")
        dropped.add(one)
        timers.call_later(100.0 + number, one)
        timers.cancel_call(one)
    assert len([h for h in clock.handles if h.callback is not None]) == 1
    assert len(dropped) <= 2 * MIN_MARKED + 2


def test_what_is_dropped_holds_nothing_of_its_machine(timers: Timers) -> None:
    """It stays in the heap for a while, and a request has images of megabytes."""

    class Watched(Link):
        """A machine with a weak reference."""

    link, again = Watched(PEER, NULL_JOURNAL), Watched(PEER, NULL_JOURNAL)
    kept = weakref.ref(link), weakref.ref(again)
    timers.arm(link, RetryDue, 100.0, partial(str, link))
    timers.keep(link, ())
    timers.arm(again, RetryDue, 100.0, partial(str, again))
    timers.arm(again, RetryDue, 1.0, partial(str, again))  # its entry is in the wrong place now
    timers.keep(again, ())
    del link, again
    gc.collect()
    assert [machine() for machine in kept] == [None, None]


def test_nothing_is_armed_behind_the_end(clock: ManualClock, timers: Timers) -> None:
    seen: list[str] = []
    timers.call_later(1.0, call(seen, "before"))
    timers.close()
    timers.call_later(0.5, call(seen, "behind"))
    assert [handle for handle in clock.handles if handle.callback is not None] == []
    clock.run_until(5.0)
    assert seen == []
