"""Whether drafts pay: tokens per second with them and without, as measured, by load.

Theory of operation
-------------------
A step with drafts samples more tokens and takes longer.  How much longer depends on how many
decode: for one user the device reads weights anyway, for many it computes.  How many more depends
on the texts.  So neither is assumed.  Turns of an instance are measured, from one planned step to
the next, so that the host's time and steps that were sat out count, too.

Each power of two of sequences that decode has a record of both ways.  One way is in use.  Now and
then the other one is tried for TRIAL turns; what is faster then is in use.  As long as trials
confirm it they come half as often, down to one in MOST turns: a trial costs what it loses.  The
first turns behind a change count for nothing, since steps under way are of the way before.

A speed is the mean of tokens by the median of times: one step that was held up changes no choice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import fmean, median

TRIAL = 8  # turns
FIRST, MOST = 32, 4096  # turns between two trials
UNCOUNTED = 2  # turns behind a change
SEEN = 32  # turns that are remembered, of each way


class _Load:
    """Of about so many sequences."""

    def __init__(self) -> None:
        self.uses = True  # drafts, as the way in use
        self.is_trial = False
        self._left = self._between = FIRST
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
                self._between = min(2 * self._between, MOST)
            self.is_trial, self._left = False, self._between
        else:
            self.is_trial, self._left = True, TRIAL
            self._turns[self.drafts].clear()

    def _speed(self, way: bool) -> float:
        turns = self._turns[way]
        mean = fmean(tokens for tokens, _ in turns)
        return mean / max(median(elapsed_s for _, elapsed_s in turns), 1e-9)


class DraftWorth:
    """The choice of one instance."""

    def __init__(self) -> None:
        self._loads = defaultdict[int, _Load](_Load)
        self._last = 0, True
        self._uncounted = 0

    def pays(self, num_decoding: int) -> bool:
        """Whether the next step of so many sequences has drafts."""
        return self._loads[num_decoding.bit_length()].drafts

    def observe(self, num_decoding: int, num_tokens: int, elapsed_s: float) -> None:
        """In a turn of the instance so many sequences have got so many tokens."""
        load = self._loads[size := num_decoding.bit_length()]
        if self._last != (size, load.drafts):
            self._last, self._uncounted = (size, load.drafts), UNCOUNTED
        if self._uncounted:
            self._uncounted -= 1
        else:
            load.observe(num_tokens, elapsed_s)
