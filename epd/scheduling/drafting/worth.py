"""Whether drafts pay: tokens per second with them and without, as measured, by load.

Theory of operation
-------------------
A step with drafts samples more tokens and takes longer.  How much longer depends on how many
decode: for one user the device reads weights anyway, for many it computes.  How many more depends
on the texts.  So neither is assumed.  Turns of an instance are measured, from one planned step to
the next, so that the host's time and steps that were sat out count, too.

Sequences that decode up to a power of two have a record of both ways.  One way is in use.  Now and
then the other one is tried, until SAMPLES sequences had a turn.  What is faster then is in use.  As
long as trials confirm it they come a quarter as often, down to one in MOST turns: a trial costs
what it loses.  The first turns behind a change count for nothing, since steps under way are of the
way before.

A layer that drafts must have followed a request from its beginning, and that costs time, too.  So
where drafts are not in use, it stops after LINGER turns (`is_kept`).  Requests that ran without it
have no drafts to their end.  A trial then waits until half of those that decode have been followed.
Of all turns, one in SHARE may be spent on that.  Where answers are too long for it, the next trial
may wait twice as long.

A speed is the mean of tokens by the median of times: one step that was held up changes no choice.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

SAMPLES = 64  # turns of sequences in a trial
FEWEST, MOST_TURNS = 3, 16  # turns of a trial
FIRST, MOST = 32, 4096  # turns between two trials
UNCOUNTED = 2  # turns behind a change
SEEN = 32  # turns that are remembered, of each way
LINGER = 64  # turns without drafts, in which the layer goes on
SHARE = 16  # turns without drafts, one of which the layer may follow for a trial
WAITS = 256  # turns that a trial may wait for requests that were followed


class _Load:
    """Of sequences up to two to the power of `size`."""

    def __init__(self, size: int) -> None:
        self.uses = True  # drafts, as the way in use
        self.is_trial = False
        samples = SAMPLES >> size
        self._trial = min(max(samples, FEWEST), MOST_TURNS)
        self._left, self._between = self._trial, FIRST
        self._turns = {way: deque[tuple[int, float]](maxlen=SEEN) for way in (True, False)}

    @property
    def drafts(self) -> bool:
        """Now."""
        return self.uses != self.is_trial

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        self._turns[self.drafts].append((num_tokens, elapsed_s))
        self._left -= 1
        if self._left:
            return
        if self.is_trial:
            if self._speed(self.drafts) > self._speed(self.uses):
                self.uses, self._between = self.drafts, FIRST
            else:
                self._between = min(4 * self._between, MOST)
            self.is_trial, self._left = False, self._between
        else:
            self.is_trial, self._left = True, self._trial
            self._turns[self.drafts].clear()

    def _speed(self, way: bool) -> float:
        turns = self._turns[way]
        mean = fmean(tokens for tokens, _ in turns)
        return mean / max(median(elapsed_s for _, elapsed_s in turns), 1e-9)


class DraftWorth:
    """The choice of one instance."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._last = True  # the way of the last turn
        self._uncounted = UNCOUNTED
        self._waits = False  # a trial, for requests that were followed
        self._lingers = LINGER
        self._spare = float(WAITS)  # turns that may be followed for a trial
        self._wait = WAITS
        self._is_open = False  # these are followed now

    def pays(self, num_decoding: int, num_followed: int) -> bool:
        """Whether the next step of so many sequences has drafts; so many could."""
        load = self._load(num_decoding)
        self._waits = load.drafts and not load.uses and 2 * num_followed < num_decoding
        return load.drafts and not self._waits

    @property
    def is_kept(self) -> bool:
        """Whether the layer follows the next step."""
        return self._lingers > 0 or self._is_open

    def observe(self, num_decoding: int, num_tokens: int, elapsed_s: float) -> None:
        """In a turn of the instance so many sequences have got so many tokens."""
        load = self._load(num_decoding)
        way = load.drafts and not self._waits
        self._follow(way)
        if self._last != way:
            self._last, self._uncounted = way, UNCOUNTED
        if self._uncounted:
            self._uncounted -= 1
        elif not self._waits:
            load.observe(num_tokens, elapsed_s)

    def _load(self, num_decoding: int) -> _Load:
        """Up to 64 are one, since 64 are often asked for."""
        size = max(num_decoding - 1, 0).bit_length()
        if size not in self._loads:
            self._loads[size] = _Load(size)
        return self._loads[size]

    def _follow(self, drafts: bool) -> None:
        """Behind a turn with drafts or without."""
        self._lingers = LINGER if drafts else max(self._lingers - 1, 0)
        if drafts:
            self._is_open, self._wait = False, WAITS
        elif self._is_open:
            self._spare -= 1
            if self._spare < 1:
                self._is_open, self._wait = False, min(2 * self._wait, MOST)
        else:
            self._spare = min(self._spare + 1 / SHARE, self._wait)
            self._is_open = self._waits and self._lingers == 0 and self._spare >= self._wait
