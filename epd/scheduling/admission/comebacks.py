"""When a place will be there for one who is refused: the time that Retry-After has.

Theory of operation
-------------------
How long places are held is measured.  From that follows about when each comes back, and when again,
as each of those who were refused takes one.  A refusal promises the first that was promised to
nobody before, so that not all who are refused together come back together.  Who holds a place for
longer than usual is expected to hold it for a quarter of that time more.  Keys take turns: a
newcomer does not stand behind the thousand refusals of another key.

Retry-After has whole seconds, so a place waits for who will come for it.  It is kept for its key.
Who comes without a promise gets a place only if enough are left for those who come while it would
hold it.  A promise lapses soon after its time, as many clients never come back.

A thousand are refused in a moment.  So what all of them ask for is kept for a moment: when the
places that are taken come back.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Hashable, Iterable

FIRST_HELD_S = 2.0  # until it is measured
SHARE = 1 / 16  # of the mean that one more place makes
LONGER = 0.25
KEPT_S = 0.5  # a client takes a moment
LOOK_S = 0.05
MAX_PROMISES = 1024  # beyond them all are given about the last one's time


class Comebacks:
    """Of the places of one gateway, or of one key."""

    def __init__(self) -> None:
        self._held_s = FIRST_HELD_S
        self._promised: list[tuple[float, Hashable]] = []  # when each comes, in order; whose it is
        self._counts = Counter[Hashable]()  # of them, by key
        self._ends_s: list[float] = []  # of places that are taken, in order, as of the last look
        self._looked_s = -math.inf

    @property
    def num_promised(self) -> int:
        return len(self._promised)

    def freed(self, held_s: float) -> None:
        """A place came back."""
        self._held_s += SHARE * (held_s - self._held_s)
        self._looked_s = -math.inf

    def admits(self, who: Hashable, num_free: int, now_s: float) -> bool:
        """Whether one of the free places is for who comes now."""
        self._lapse(now_s - KEPT_S)
        if num_free <= 0:
            return False
        self._looked_s = -math.inf
        for n, (comes_s, other) in enumerate(self._promised):
            if comes_s > now_s:
                break
            if other == who:
                self._drop(n)
                return True
        until_s = now_s + self._held_s
        return num_free > sum(comes_s < until_s for comes_s, _ in self._promised)

    def refused(
        self, who: Hashable, taken_s: Iterable[float], now_s: float, at_least_s: float = 0.0
    ) -> int:
        """In how many seconds there is a place for it; `taken_s`: when each was taken that is."""
        self._lapse(now_s - KEPT_S)
        turn = 1 + self._counts[who]
        before = turn - 1 + sum(min(n, turn) for key, n in self._counts.items() if key != who)
        due_s = self._end_s(before, self._taken_ends_s(taken_s, now_s), now_s)
        wait_s = max(1, math.ceil(max(due_s - now_s, at_least_s)))
        if len(self._promised) < MAX_PROMISES:
            insort(self._promised, (now_s + wait_s, who))
            self._counts[who] += 1
        return wait_s

    def _taken_ends_s(self, taken_s: Iterable[float], now_s: float) -> list[float]:
        """Ends of the places that are taken, in order; `taken_s` is read at a look only."""
        if taken_s == ():
            return []
        if now_s - self._looked_s > LOOK_S:
            held_s, self._looked_s = self._held_s, now_s
            self._ends_s = sorted(max(s + held_s, now_s + LONGER * (now_s - s)) for s in taken_s)
        return self._ends_s

    def _end_s(self, nth: int, taken: list[float], now_s: float) -> float:
        """When the `nth` place comes back, of those that are taken and those that are promised."""
        held_s, promised = self._held_s, self._promised
        if nth >= len(taken) + len(promised):
            return now_s
        low, high = max(0, nth - len(promised)), min(nth, len(taken))
        while low < high:  # how many of the taken ones come back before it
            middle = (low + high) // 2
            if promised[nth - middle - 1][0] + held_s > taken[middle]:
                low = middle + 1
            else:
                high = middle
        rest = [taken[low]] if low < len(taken) else []
        if nth - low < len(promised):
            rest.append(promised[nth - low][0] + held_s)
        return min(rest)

    def _lapse(self, before_s: float) -> None:
        while self._promised and self._promised[0][0] < before_s:
            self._drop(0)

    def _drop(self, n: int) -> None:
        _, who = self._promised.pop(n)
        self._counts[who] -= 1
        if not self._counts[who]:
            del self._counts[who]
