"""The prompt in an answer: the text in front of it, and log-probabilities of its tokens.

The first token of a prompt has none.  Both APIs write that as null, which is what NaN is in JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epd.frontend import JsonObject
from epd.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """Of one prompt, to be put in front of an answer; `alone`: the answer has no tokens."""

    text: str
    first_token_id: int
    alone: bool

    def entries(self, prompt: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of all its tokens, if they were scored; `prompt`: from its second."""
        return [TokenLogprobs(self.first_token_id, math.nan), *prompt]


def prompt_logprobs(
    prompt: Sequence[TokenLogprobs], num_top: int, token_text: Callable[[int], tuple[str, bytes]]
) -> list[JsonObject | None]:
    """In vLLM's form: of each token a dictionary by id, its own and the likeliest ones."""

    def told(token_id: int, logprob: float, rank: int) -> JsonObject:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_text(token_id)[0]}

    positions: list[JsonObject | None] = [None]
    for entry in prompt:
        found: JsonObject = {str(entry.token_id): told(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1):
            found.setdefault(str(token_id), told(token_id, logprob, rank))
        positions.append(found)
    return positions
