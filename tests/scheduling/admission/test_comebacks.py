"""Who was refused and comes back when it was told finds a place; idle places are never refused."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.scheduling.admission.comebacks import KEPT_S, Comebacks

pytestmark = pytest.mark.hypothesis

COMES, ENDS = 1, 0
TWO = (0.0, 0.0)  # places, taken now


class Crowd:
    """Clients of a gateway with a few places, each held for a time; they come back when told."""

    def __init__(self, num_places: int, held_s: float) -> None:
        self.comebacks = Comebacks()
        self.num_places = num_places
        self.held_s = held_s
        self.taken_s: list[float] = []
        self.num_refused_again = self.num_events = 0
        self.served: Counter[str] = Counter()
        self.last_s = 0.0
        self._events: list[tuple[float, int, int, str, int]] = []

    def add(self, at_s: float, who: str, tries: int = 0, kind: int = COMES) -> None:
        self.num_events += 1
        heapq.heappush(self._events, (at_s, kind, self.num_events, who, tries))

    def run(self) -> None:
        while self._events:
            now_s, kind, _, who, tries = heapq.heappop(self._events)
            if kind == ENDS:
                del self.taken_s[0]
                self.comebacks.freed(self.held_s)
            elif self.comebacks.admits(who, self.num_places - len(self.taken_s), now_s):
                self.taken_s.append(now_s)
                self.served[who] += 1
                self.last_s = now_s + self.held_s
                self.add(self.last_s, who, kind=ENDS)
                assert len(self.taken_s) <= self.num_places
            else:
                self.num_refused_again += tries > 0
                wait_s = self.comebacks.refused(who, self.taken_s, now_s)
                self.add(now_s + wait_s, who, tries + 1)


TIMES = st.lists(st.sampled_from((1.0, 2.0, 3.0, 4.5, 8.0)), max_size=6).map(sorted)


@given(TIMES, TIMES, st.sampled_from((0.5, 2.0)), st.integers(0, 13))
def test_places_come_back_in_order(
    taken: list[float], promised: list[float], held_s: float, nth: int
) -> None:
    comebacks = Comebacks()
    comebacks._held_s = held_s
    comebacks._promised = [(comes_s, "") for comes_s in promised]
    ends = sorted([*taken, *(comes_s + held_s for comes_s in promised)])
    assert comebacks._end_s(nth, taken, -1.0) == (ends[nth] if nth < len(ends) else -1.0)


def test_places_are_looked_at_once_in_a_moment() -> None:
    """A thousand are refused at once; a place that came back since is seen at once."""
    comebacks, looks = Comebacks(), Counter[str]()

    def taken() -> Iterator[float]:
        looks["at all"] += 1
        yield 0.0

    for _ in range(5):
        comebacks.refused("", taken(), 0.1)
    assert looks["at all"] == 1
    comebacks.freed(1.0)
    comebacks.refused("", taken(), 0.1)
    comebacks.refused("", taken(), 0.2)
    assert looks["at all"] == 3


@given(st.integers(1, 30), st.floats(0.05, 3.0), st.integers(1, 90))
def test_a_crowd_that_comes_back_is_admitted(num_places: int, held_s: float, count: int) -> None:
    """Once the time that a place is held is known; and all are served as fast as that goes."""
    crowd = Crowd(num_places, held_s)
    crowd.comebacks._held_s = held_s
    for _ in range(num_places + count):
        crowd.add(0.0, "a")
    crowd.run()
    assert crowd.served["a"] == num_places + count
    assert crowd.num_refused_again == 0
    rounds = math.ceil(count / num_places)
    assert crowd.last_s <= (rounds + 1) * math.ceil(held_s) + held_s + 1


@given(st.integers(2, 16), st.floats(0.05, 2.0))
def test_what_is_measured_is_learnt(num_places: int, held_s: float) -> None:
    """Those who come for the first time meanwhile take places, too, as they are of the same key."""
    crowd = Crowd(num_places, held_s)
    for n in range(40 * num_places):
        crowd.add(0.01 * n, "a")
    crowd.run()
    assert crowd.served["a"] == 40 * num_places
    assert abs(crowd.comebacks._held_s - held_s) < 0.1
    assert crowd.num_refused_again <= 0.5 * crowd.served["a"]


def test_a_newcomer_does_not_stand_behind_all_that_another_key_was_refused() -> None:
    comebacks = Comebacks()
    many = [comebacks.refused("a", TWO, 0.0) for _ in range(100)]
    assert many[-1] >= 90 and comebacks.refused("b", TWO, 0.0) <= 2


def test_a_promised_place_is_kept_from_others_for_a_moment() -> None:
    comebacks = Comebacks()
    wait_s = comebacks.refused("a", TWO, 0.0)
    assert not comebacks.admits("b", 1, wait_s)
    assert comebacks.admits("a", 1, wait_s)
    assert comebacks.admits("b", 1, wait_s)
    wait_s = comebacks.refused("a", TWO, 9.0)
    assert not comebacks.admits("b", 1, 9.0 + wait_s + KEPT_S - 0.1)
    assert comebacks.admits("b", 1, 9.0 + wait_s + KEPT_S + 0.1)  # it did not come back


@given(st.integers(0, 300), st.integers(1, 64))
def test_places_are_not_kept_for_those_who_are_far_away(count: int, num_places: int) -> None:
    """All have ended, and of those who were refused few come while a newcomer would be there."""
    comebacks = Comebacks()
    comebacks._held_s = 0.1
    for _ in range(count):
        comebacks.refused("a", TWO, 0.0)
    assert comebacks.admits("b", num_places, 0.5)


@pytest.mark.parametrize("bug", ["constant", "nothing_is_promised"])
def test_a_bug_put_back_is_noticed(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    if bug == "constant":
        monkeypatch.setattr(Comebacks, "refused", lambda *_: 1)
    else:
        monkeypatch.setattr("epd.scheduling.admission.comebacks.insort", lambda *_: None)
    crowd = Crowd(3, 2.0)
    for _ in range(30):
        crowd.add(0.0, "a")
    crowd.run()
    assert crowd.num_refused_again > 10
