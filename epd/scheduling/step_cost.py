"""What a step costs, measured, and how many prompt tokens it may carry beside decodes.

A token stream waits for the whole step that its next token is in, so what prompts add to a step is
added to every stream's inter-token latency.  The model is a line: a step of decodes only takes
`decode_s`, each prompt token adds `token_s`.  Both are forgetting means, since they drift with the
number of streams and the length of contexts.

Two bounds, either or both: with `max_itl_impact` = 1.5, prompts may add half of `decode_s`; with
`max_quantum_s` = 0.01, the step is to end within 10 ms.  Prompts may have MIN_PROMPT_TOKENS of it,
whatever they cost: a bound that stops them for good would only move the wait from one client to
another.  The quantum, which is on by default, bounds no step of `min_step_tokens` tokens either,
decodes included: tiles of that many use the device fully.  `max_itl_impact` has no such floor: it
is set for even streams, whatever that costs.

`Rate` and `Line` go to placement (`StageCosts`): there the sum of many steps counts.

A step that takes far longer than others was held up by the host or the driver; the next one need
not be.  It counts as no more than STALL times what was expected.  Else one lost second would make
an instance look so slow that nothing is placed, and so nothing measured, there again.  For the same
reason few measurements are not sure (`is_sure`), as first ones are often held up; nor are old ones,
which the next one replaces.  So an instance that was slow for a while gets work again, and is
measured by it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

MEMORY = 0.1  # weight of the newest measurement
MIN_VARIANCE = 0.25  # of a count, below which nothing follows from it
KEPT = 0.99  # of what was measured before, each time
STALL = 5.0  # times as long as expected
MIN_SEEN = 10.0  # measurements, before which nothing is sure
RECENT_S = 30.0  # a measurement is, for so long
MIN_PROMPT_TOKENS = 16
NOTHING_SEEN = (0.0,) * 5


class Measured(ABC):
    """Sums over what was seen of late: counts, and the seconds that they took."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._seen_at_s = -math.inf
        self._sums: tuple[float, ...] = NOTHING_SEEN  # of 1, x, y, x * x, x * y

    def observe(self, count: int, elapsed_s: float) -> None:
        if self._is_old():
            self._sums = NOTHING_SEEN
        num_seen, x, total_s, xx, xy = self._sums
        if num_seen:
            usual_s = (self.expected_s(count), total_s / num_seen)
            if num_seen > MIN_SEEN:
                elapsed_s = min(elapsed_s, STALL * max(usual_s))
            elif 0.0 < STALL * elapsed_s < min(usual_s):
                # they were held up: something was loaded, or compiled
                num_seen = x = total_s = xx = xy = 0.0
        self._sums = (
            KEPT * num_seen + 1.0,
            KEPT * x + count,
            KEPT * total_s + elapsed_s,
            KEPT * xx + count * count,
            KEPT * xy + count * elapsed_s,
        )
        self._seen_at_s = self._now_s()

    def _is_old(self) -> bool:
        return self._now_s() - self._seen_at_s > RECENT_S

    @property
    def is_sure(self) -> bool:
        """It was measured of late, and often."""
        return self._sums[0] > MIN_SEEN and not self._is_old()

    @property
    def is_known(self) -> bool:
        return self._sums[0] > 0

    @abstractmethod
    def expected_s(self, count: int) -> float:
        """What so many would take."""


class Rate(Measured):
    """Seconds per unit, over what was done of late; 0: nothing was."""

    @property
    def unit_s(self) -> float:
        _, units, elapsed_s, _, _ = self._sums
        return elapsed_s / units if units else 0.0

    def expected_s(self, count: int) -> float:
        return self.unit_s * count


class Line(Measured):
    """Seconds by a count: the line of least squares through what was seen of late."""

    def fitted(self) -> tuple[float, float]:
        """At a count of zero, and what each adds; 0: not measured, as counts did not differ."""
        n, x, y, xx, xy = self._sums
        if not n:
            return 0.0, 0.0
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > n * n * MIN_VARIANCE else 0.0
        return max(0.0, (y - slope * x) / n), slope

    def expected_s(self, count: int) -> float:
        at_zero_s, each_s = self.fitted()
        return at_zero_s + each_s * count


class StepCost:
    """A line through measured steps; seconds."""

    def __init__(
        self,
        now_s: Callable[[], float],
        max_itl_impact: float = 0.0,
        max_quantum_s: float = 0.0,
        min_step_tokens: int = 0,
    ) -> None:
        """`max_itl_impact`: how many times as long as a step without prompts a step may take;
        `max_quantum_s`: how long; 0: no bound."""
        self._impact = max_itl_impact
        self._quantum_s = max_quantum_s
        self._min_step_tokens = min_step_tokens
        self.decode_s = 0.0
        self.token_s = 0.0
        self.decodes = Line(now_s)
        self.prompts = Rate(now_s)

    def observe(self, num_decodes: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """A step took so long."""
        if num_prompt_tokens:
            decode_s = self.decode_s if num_decodes else 0.0
            self.prompts.observe(num_prompt_tokens, max(0.0, elapsed_s - decode_s))
        if num_decodes and not num_prompt_tokens:
            self.decodes.observe(num_decodes, elapsed_s)
            self.decode_s = _follow(self.decode_s, elapsed_s)
        elif num_decodes and self.decode_s:
            added_s = max(0.0, elapsed_s - self.decode_s) / num_prompt_tokens
            self.token_s = _follow(self.token_s, added_s)

    def expected_s(self, num_decodes: int, num_prompt_tokens: int) -> float | None:
        """What such a step would take; None: what is in it was never measured."""
        expected_s = 0.0
        for cost, count in ((self.decodes, num_decodes), (self.prompts, num_prompt_tokens)):
            if count:
                if not cost.is_known:
                    return None
                expected_s += cost.expected_s(count)
        return expected_s

    def max_prompt_tokens(self, num_decodes: int) -> int | None:
        """Prompt tokens that a step with so many decodes may carry; None: nothing bounds them
        yet."""
        # Where prompts have never let decodes alone, a token of theirs costs what whole steps did.
        token_s = self.token_s or self.prompts.unit_s
        most: int | None = None
        if self._quantum_s and token_s:
            least = max(MIN_PROMPT_TOKENS, self._min_step_tokens - num_decodes)
            most = max(least, int((self._quantum_s - self.decode_s) / token_s))
        if self._impact and self.token_s:
            added = int((self._impact - 1) * self.decode_s / self.token_s)
            added = max(MIN_PROMPT_TOKENS, added)
            most = added if most is None else min(most, added)
        return most


def _follow(mean: float, value: float) -> float:
    return value if not mean else mean + MEMORY * (min(value, STALL * mean) - mean)
