"""Log-probabilities of a prompt's tokens: computed per chunk, kept until the first token.

They are sent with that token, so they arrive whenever it does, over any hop; they need no message
and no state of their own. An attempt that continues another one has none: the client has them
already. A prompt that is computed again is scored again.
"""

from __future__ import annotations

from epd.engine.base import ChunkScores, Outcome, Scoring, Settled
from epd.fsm.request import Request
from epd.messages import TokenLogprobs


def scoring_of(request: Request, start: int, stop: int) -> Scoring | None:
    """What a step is asked about its tokens `[start, stop)`: the prompt's tokens behind them."""
    num_logprobs = request.sampling.num_prompt_logprobs
    if not is_scored(request):
        return None
    targets = request.tokens(start + 1, min(stop + 1, len(request.prompt)))
    return Scoring(targets, num_logprobs) if targets else None


def is_scored(request: Request) -> bool:
    """Whether its client waits for them.  Then every token of the prompt must be computed: blocks
    that were computed for others have no logits."""
    is_told = bool(request.output) or request.num_emitted > 0
    return request.sampling.num_prompt_logprobs >= 0 and not is_told


class PromptScores:
    """Of the requests of an instance whose prompts are being computed."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[TokenLogprobs, ...]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def forget(self, key: str) -> None:
        self._of.pop(key, None)

    def take(self, request: Request, outcome: Outcome) -> Settled:
        """The outcome without what is kept of it, or with all that was kept before it."""
        if isinstance(outcome, ChunkScores):
            before = self._of.get(request.key, ())[: request.num_computed]
            self._of[request.key] = before + outcome.prompt
            return None
        if isinstance(outcome, TokenLogprobs) and request.key in self._of:
            before = self._of.pop(request.key)[: request.num_computed]
            return outcome.with_prompt(before + outcome.prompt)
        return outcome
