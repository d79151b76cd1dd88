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
"""

from __future__ import annotations

import math

MEMORY = 0.1  # weight of the newest measurement
UNBOUNDED = 1 << 60
MIN_PROMPT_TOKENS = 16


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

    def observe(self, num_decodes: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """A step took so long."""
        if num_decodes and not num_prompt_tokens:
            self.decode_s = _follow(self.decode_s, elapsed_s)
        elif num_decodes and self.decode_s:
            added_s = max(0.0, elapsed_s - self.decode_s) / num_prompt_tokens
            self.token_s = _follow(self.token_s, added_s)

    def max_prompt_tokens(self, num_decodes: int) -> int:
        """Prompt tokens that a step with so many decodes may carry."""
        if not self.token_s:
            return UNBOUNDED  # nothing is known yet
        allowed_s = math.inf
        if self._impact:
            allowed_s = (self._impact - 1) * self.decode_s
        if self._quantum_s:
            allowed_s = min(allowed_s, self._quantum_s - self.decode_s)
        if allowed_s == math.inf:
            return UNBOUNDED
        least = max(MIN_PROMPT_TOKENS, self._min_step_tokens - num_decodes)
        return max(least, int(allowed_s / self.token_s))


def _follow(mean: float, value: float) -> float:
    return value if not mean else mean + MEMORY * (value - mean)
