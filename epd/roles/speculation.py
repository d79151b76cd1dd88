"""Drafts of the requests of one instance: which request may draft what, and the result.

Where steps run ahead of their results, the last token of a text is not known while the next step is
planned, and drafts need it. So a text that repeats itself already, and will have more than one
draft, waits a step for it; the others run ahead. A request that waited in vain has lost one step.
The tokens after a sequence with drafts are not known before the drafts are verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from epd.config import SpeculativeConfig
from epd.fsm.request import Request
from epd.messages import TokenLogprobs
from epd.scheduling.speculation import PromptLookup


class Speculation:
    """Fills the drafts of requests that decode, and counts what they were worth."""

    def __init__(self, config: SpeculativeConfig, totals: Counter[str]) -> None:
        self._config = config
        self._totals = totals

    def draft(self, request: Request, *, has_room: bool) -> None:
        """What it may say next; asked before each step is planned.  Without room for drafts in
        steps, nobody waits for them.

        Fewer than it may still say: a token of the model's own follows the last draft.
        """
        if not self._config.method or request.num_left < 0:  # its drafts are under way
            return
        if request.lookup is None:
            placeholders = {request.prompt[item.offset] for item in request.message.items}
            shortest, longest = self._config.prompt_lookup_min, self._config.prompt_lookup_max
            request.lookup = PromptLookup(shortest, longest, placeholders)
        left = int(request.sampling.max_tokens) - request.num_emitted - len(request.output)
        on_its_way = request.num_coming
        limit = min(self._config.num_speculative_tokens + on_its_way, left - 1)
        drafts = request.lookup.draft(request.tokens, request.num_tokens, limit)
        request.awaits_token = bool(on_its_way) and has_room and len(drafts) > 1
        request.drafts = () if on_its_way else drafts

    def verified(self, request: Request, count: int, said: Sequence[TokenLogprobs]) -> None:
        """A step has computed the first `count` drafts, and this is what the request says."""
        drafts = request.drafts[:count]
        right = zip(drafts, said, strict=False)
        accepted = sum(draft == token.token_id for draft, token in right)
        request.num_accepted += accepted
        request.num_rejected += count - accepted
        self._totals["spec_decode_num_drafts"] += 1
        self._totals["spec_decode_num_draft_tokens"] += count
        self._totals["spec_decode_num_accepted_tokens"] += accepted
