"""What a step costs, measured, and how many prompt tokens it may carry beside decodes.

A token stream waits for the whole step that its next token is in, so what prompts add to a step is
added to every stream's inter-token latency.  The model is a line: a step of decodes only takes
`decode_s`, each prompt token adds `token_s`; both are followed with a forgetting mean, since they
drift with the number of streams and the length of contexts.  With `max_itl_impact` = 1.5, prompts
may add half of `decode_s`.

A prompt gets at least `MIN_PROMPT_TOKENS` of each step, whatever it costs: a ceiling that stops
prompts for good would only move the wait from one client to another.
"""

from __future__ import annotations

MIN_PROMPT_TOKENS = 16
MEMORY = 0.1  # weight of the newest measurement
UNBOUNDED = 1 << 60


class StepCost:
    """A line through measured steps; seconds."""

    def __init__(self, max_itl_impact: float) -> None:
        """`max_itl_impact`: how many times as long as a step without prompts a step may take."""
        self._impact = max_itl_impact
        self.decode_s = 0.0
        self.token_s = 0.0

    def observe(self, num_decodes: int, num_prompt_tokens: int, elapsed_s: float) -> None:
        """A step took so long."""
        if num_decodes and not num_prompt_tokens:
            self.decode_s = _follow(self.decode_s, elapsed_s)
        elif num_decodes and self.decode_s:
            added_s = max(0.0, elapsed_s - self.decode_s) / num_prompt_tokens
            self.token_s = _follow(self.token_s, added_s)

    def max_prompt_tokens(self) -> int:
        """Prompt tokens that a step with decodes may carry."""
        if not self.decode_s or not self.token_s:
            return UNBOUNDED  # nothing is known yet
        allowed_s = (self._impact - 1) * self.decode_s
        return max(MIN_PROMPT_TOKENS, int(allowed_s / self.token_s))


def _follow(mean: float, value: float) -> float:
    return value if not mean else mean + MEMORY * (value - mean)
