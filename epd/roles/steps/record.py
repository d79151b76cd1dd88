"""What the roles of an instance keep of a request, beside its machine: nothing here decides a row.

One record per request at work, made with its machine and dropped with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd.fsm.request import Request
from epd.messages import KvOffer, PrefillRequest
from epd.scheduling.block_pool import Key
from epd.scheduling.prefix_keys import PrefixKeys

if TYPE_CHECKING:
    from epd.scheduling.speculation import PromptLookup

PRIORITY_S = 10.0  # that a step of priority is worth
TOKEN_S = 0.00025  # that a token of a prompt costs: who needs little passes who needs much

Positions = Sequence[Sequence[int]] | None


def rank_of(message: PrefillRequest | KvOffer, now_s: float) -> float:
    """Its place in every queue of an instance that it came to now."""
    priority_s = PRIORITY_S * message.sampling.priority
    return now_s + (priority_s + TOKEN_S * len(message.token_ids))


@dataclass(slots=True)
class Record:
    keys: PrefixKeys  # of its blocks' contents, made as it grows
    positions: Positions = None  # of its prompt, if not linear
    rows: dict[str, object] = field(default_factory=dict)  # by room
    num_published: int = 0  # of its blocks, that others can find
    unproven: list[tuple[int, Key]] = field(default_factory=list)  # passed before that could be
    states: list[tuple[int, ...]] = field(default_factory=list)  # read, or to be published
    lookup: PromptLookup | None = None  # None: it has not speculated
    drafts: Sequence[int] = ()  # for its next step, or of the step under way
    proposed: tuple[int, Sequence[int]] = 0, ()  # by the model, behind so many tokens
    is_followed: bool = True  # from its beginning here, by the layer that drafts
    num_accepted: int = 0  # of its drafts, since tokens were sent last
    num_rejected: int = 0
    num_sent: int = 0  # of its output tokens
    num_whole: int | None = None  # blocks of its KV that were sent before the last chunk began
    said: array[int] = field(default_factory=lambda: array("i"))
    """Ids of the answer's tokens, if steps ask; those of earlier attempts first."""
    asked: array[int] | None = None  # the prompt without these, if steps ask

    def asked_of(self, request: Request) -> Sequence[int]:
        """Made once, and gone with it; the device's thread reads it as numbers without a copy of
        each."""
        if self.asked is None:
            num_asked = len(request.prompt) - request.num_emitted
            self.asked = array("q", request.prompt[:num_asked])
        return self.asked

    def said_of(self, request: Request) -> Sequence[int]:
        """A copy of the ids of the answer's tokens so far; `said` grows by the new ones alone."""
        said, output = self.said, request.output
        if not said:
            said.extend(request.prompt[len(request.prompt) - request.num_emitted :])
        said.extend(t.token_id for t in output[len(said) - request.num_emitted :])
        return said[:]

    def holds_tokens(self, request: Request) -> bool:
        """Whether its new tokens may wait for more: nobody reads them one by one."""
        num_new = len(request.output) - self.num_sent
        is_few = self.num_sent > 0 and num_new < request.sampling.tokens_per_word
        return is_few and not request.finish_reason
