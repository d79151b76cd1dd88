"""What a step costs, measured, and how many prompt tokens it may carry beside decodes.

A token stream waits for the whole step that its next token is in, so what prompts add to a step is
added to every stream's inter-token latency.  The model is a line: a step of decodes only takes
`decode_s`, each prompt token adds `token_s`; both are followed with a forgetting mean, since they
drift with the number of streams and the length of contexts.

Two bounds, either or both: with `max_itl_impact` = 1.5, prompts may add half of `decode_s`; with
`max_quantum_s` = 0.01, the step is to end within 10 ms.  A step may have `min_step_tokens`, and
prompts MIN_PROMPT_TOKENS of it, whatever it costs: a bound that stops prompts for good would only
move the wait from one client to another, and a device that computes tokens in tiles is used to its
end by steps of a size that it likes, decodes included.

`Rate` and `Line` are what placement is told (`StageCosts`): there the sum of many steps counts.
"""

from __future__ import annotations

import math

MEMORY = 0.1  # weight of the newest measurement
MIN_VARIANCE = 0.25  # of a count, below which nothing follows from it
KEPT = 0.99  # of what was measured before, each time
UNBOUNDED = 1 << 60
MIN_PROMPT_TOKENS = 16


class Rate:
    """Seconds per unit, over what was done of late; 0: nothing was."""

    def __init__(self) -> None:
        self._units = self._elapsed_s = 0.0

    def observe(self, units: int, elapsed_s: float) -> None:
        self._units = KEPT * self._units + units
        self._elapsed_s = KEPT * self._elapsed_s + elapsed_s

    @property
    def unit_s(self) -> float:
        return self._elapsed_s / self._units if self._units else 0.0


class Line:
    """Seconds by a count: the line of least squares through what was seen of late."""

    def __init__(self) -> None:
        self._sums: tuple[float, ...] = (0.0,) * 5  # of 1, x, y, x * x, x * y

    def observe(self, count: int, elapsed_s: float) -> None:
        seen = (1.0, count, elapsed_s, count * count, count * elapsed_s)
        self._sums = tuple(KEPT * a + b for a, b in zip(self._sums, seen, strict=True))

    def fitted(self) -> tuple[float, float]:
        """At a count of zero, and what each adds; 0: not known, as counts did not differ."""
        n, x, y, xx, xy = self._sums
        if not n:
            return 0.0, 0.0
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > n * n * MIN_VARIANCE else 0.0
        return max(0.0, (y - slope * x) / n), slope


class StepCost:
    """A line through measured steps; seconds."""

    def __init__(
        self, max_itl_impact: float = 0.0, max_quantum_s: float = 0.0, min_step_tokens: int = 0
    ) -> None:
        """`max_itl_impact`: how many times as long as a step without prompts a step may take;
        `max_quantum_s`: how long; 0: no bound."""
        self._impact = max_itl_impact
        self._quantum_s = max_quantum_s
        self._min_step_tokens = min_step_tokens
        self.decode_s = 0.0
        self.token_s = 0.0
        self.decodes = Line()
        self.prompts = Rate()

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

    def max_prompt_tokens(self, num_decodes: int) -> int:
        """Prompt tokens that a step with so many decodes may carry."""
        # Where prompts have never let decodes alone, a token of theirs costs what whole steps did.
        token_s = self.token_s or self.prompts.unit_s
        if not token_s:
            return UNBOUNDED  # nothing is known yet
        allowed_s = math.inf
        if self._impact and self.token_s:
            allowed_s = (self._impact - 1) * self.decode_s
        if self._quantum_s:
            allowed_s = min(allowed_s, self._quantum_s - self.decode_s)
        if allowed_s == math.inf:
            return UNBOUNDED
        least = max(MIN_PROMPT_TOKENS, self._min_step_tokens - num_decodes)
        return max(least, int(allowed_s / token_s))


def _follow(mean: float, value: float) -> float:
    return value if not mean else mean + MEMORY * (value - mean)
