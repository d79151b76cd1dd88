"""Guesses of the requests of one instance: who may guess what, and what came of it.

A step that was launched before its forerunner's tokens are known has nothing to guess from, and
what follows a sequence with guesses is not known before they are verified.  So an instance that
speculates never runs ahead of its results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from epd.config import SpeculativeConfig
from epd.fsm.request import Request
from epd.messages import TokenLogprobs
from epd.scheduling.batching import Entry
from epd.scheduling.speculation import PromptLookup


class Speculation:
    """Fills the guesses of entries that decode, and counts what they were worth."""

    def __init__(self, config: SpeculativeConfig, totals: Counter[str]) -> None:
        self._config = config
        self._totals = totals

    def guess(self, request: Request, entry: Entry) -> None:
        """What it may say next; its last token must be known.

        Fewer than it may still say: a token of the model's own follows the last guess.
        """
        if not self._config.method:
            return
        if request.lookup is None:
            placeholders = {request.prompt[item.offset] for item in request.message.items}
            shortest, longest = self._config.prompt_lookup_min, self._config.prompt_lookup_max
            request.lookup = PromptLookup(shortest, longest, placeholders)
        left = int(request.sampling.max_tokens) - request.num_emitted - len(request.output)
        limit = min(self._config.num_speculative_tokens, left - 1)
        entry.guesses = request.lookup.guess(request.tokens, request.num_tokens, limit)

    def verified(
        self, request: Request, entry: Entry, count: int, said: Sequence[TokenLogprobs]
    ) -> None:
        """A step has computed the first `count` guesses, and this is what the request says."""
        guesses = entry.guesses[:count]
        right = zip(guesses, said, strict=False)
        confirmed = sum(guess == token.token_id for guess, token in right)
        entry.num_computed -= count + 1 - len(said)
        request.num_confirmed += confirmed
        request.num_rejected += count - confirmed
        self._totals["spec_decode_num_drafts"] += 1
        self._totals["spec_decode_num_draft_tokens"] += count
        self._totals["spec_decode_num_accepted_tokens"] += confirmed
