"""Drafts of the requests of one instance: which request may draft what, and the result.

Where steps run ahead of their results, the last token of a text is not here while the next step is
planned, and drafts need it.  So a text that repeats itself already, and will have more than one
draft, waits a step for it; the others run ahead.  A request that waited in vain has lost one step.
The tokens after a sequence with drafts come only when the drafts are verified.  Drafts of the
model's own layer come with a step's tokens, so a request with drafts waits for each of its steps.
Nobody drafts while that does not pay (`scheduling/drafting/worth.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from epd.config import SpeculativeConfig
from epd.fsm.request import Request
from epd.later import later
from epd.messages import TokenLogprobs
from epd.roles.steps.record import Record
from epd.scheduling.batching import BatchScheduler

if TYPE_CHECKING:
    from epd.scheduling.drafting.worth import DraftWorth

_lookup = later("epd.scheduling.speculation:PromptLookup")
_worth = later("epd.scheduling.drafting.worth:DraftWorth")


class Speculation:
    """Fills the drafts of requests that decode, and counts what they were worth."""

    def __init__(
        self,
        config: SpeculativeConfig,
        totals: Counter[str],
        records: dict[str, Record],
        now_s: Callable[[], float],
    ) -> None:
        """`records`: of all requests, by key."""
        self._now_s = now_s
        self._worth: DraftWorth | None = None  # until somebody may draft
        self._pays = True  # in the next step
        self.is_kept = True  # by the layer that drafts, rows of the next step
        self._num_said = 0  # tokens since it was measured last
        self._since_s = math.inf
        self._config = config
        self._records = records
        self._totals = totals

    @property
    def is_on(self) -> bool:
        return bool(self._config.method)

    def drafts_of(self, request: Request) -> Sequence[int]:
        return self._records[request.key].drafts

    def draft_all(self, batch: BatchScheduler[Request]) -> list[str]:
        """Drafts of all requests that decode, before each step is planned.  Returns keys of those
        that wait for their last token: none, if steps have no room for drafts."""
        if not self.is_on:
            return []
        self._worth = self._worth or _worth()
        lacking = sum(not self._records[request.key].is_followed for request in batch.decoding)
        self._measure(self._worth, batch.num_running, lacking)
        has_room, waiting = batch.has_spare_places, []
        for request in batch.decoding:
            batch.at_hand = request
            if self.draft(request, self._records[request.key], has_room=has_room):
                waiting.append(request.key)
        return waiting

    def draft(self, request: Request, record: Record, *, has_room: bool) -> bool:
        """Its drafts, fewer than the tokens it has left: one of the model's own follows the last.

        True: its next step waits until its last token is here.
        """
        if request.num_left < 0:  # its drafts are under way
            return False
        if not (self._pays and record.is_followed):
            record.drafts = ()
            return False
        if self._config.has_layer:
            return self._proposed(request, record) and has_room
        if record.lookup is None:
            placeholders = {request.prompt[item.offset] for item in request.message.items}
            shortest, longest = self._config.prompt_lookup_min, self._config.prompt_lookup_max
            record.lookup = _lookup(shortest, longest, placeholders)
        left = int(request.sampling.max_tokens) - request.num_emitted - len(request.output)
        on_its_way = request.num_coming
        limit = min(self._config.num_speculative_tokens + on_its_way, left - 1)
        drafts = record.lookup.draft(request.tokens, request.num_tokens, limit)
        record.drafts = () if on_its_way else drafts
        return bool(on_its_way) and has_room and len(drafts) > 1

    def said(self, count: int) -> None:
        """A request that decodes has got so many tokens."""
        self._num_said += count

    def _measure(self, worth: DraftWorth, num_running: int, num_lacking: int) -> None:
        """From one planned step to the next: the tokens of the time between."""
        now_s = self._now_s()
        if self._num_said or not num_running:
            if self._num_said and now_s > self._since_s:
                worth.observe(num_running, self._num_said, now_s - self._since_s)
            self._num_said, self._since_s = 0, now_s if num_running else math.inf
        self._since_s = min(self._since_s, now_s)
        self._pays = worth.pays(num_running, num_running - num_lacking)
        self.is_kept = self._pays or worth.is_kept or not self._config.has_layer

    def wanted(self, request: Request, record: Record) -> int:
        """Drafts that its next step is to make, for the one behind it."""
        drafts = self._config.has_layer and self._pays and record.is_followed
        if not (drafts and request.decode_here):
            return 0
        left = int(request.sampling.max_tokens) - request.num_emitted - len(request.output)
        return max(0, min(self._config.num_speculative_tokens, left - 2))

    def _proposed(self, request: Request, record: Record) -> bool:
        """Those that came with its last token are its drafts; True: they are under way."""
        behind, drafts = record.proposed
        record.drafts = () if behind != request.num_tokens or request.num_coming else drafts
        return bool(request.num_coming and self.wanted(request, record))

    def verified(self, record: Record, count: int, said: Sequence[TokenLogprobs]) -> None:
        """A step has computed the first `count` drafts, and sampled the tokens `said`."""
        drafts = record.drafts[:count]
        right = zip(drafts, said, strict=False)
        accepted = sum(draft == token.token_id for draft, token in right)
        record.num_accepted += accepted
        record.num_rejected += count - accepted
        self._totals["spec_decode_num_drafts"] += 1
        self._totals["spec_decode_num_draft_tokens"] += count
        self._totals["spec_decode_num_accepted_tokens"] += accepted
