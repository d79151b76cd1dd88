"""The context of REQUEST: the one record of an attempt at an instance.

The scheduler asks it (`scheduling/batching.Schedulable`), a step is told of it
(`engine.base.StepSequence`), and neither keeps anything of its own.  Tokens count as computed when
their step has returned, and for the scheduler from its launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from epd.failure import Failure
from epd.fsm.kernel import NULL_JOURNAL, Journal, Machine
from epd.fsm.request.states import S
from epd.messages import KvOffer, PrefillRequest
from epd.records import TokenLogprobs


class Keys(Protocol):
    """The keys of its blocks' contents, made as it grows."""

    def extend(
        self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int
    ) -> Sequence[bytes]: ...


class Lookup(Protocol):
    """Drafts of what it says next."""

    def draft(
        self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int, limit: int
    ) -> Sequence[int]: ...


class Context(Machine):
    """What guards and actions read and write, and all else that is known of the attempt here."""

    __slots__ = (
        "awaits_token",
        "block_table",
        "deadline_s",
        "decode_here",
        "failure",
        "finish_reason",
        "gateway",
        "drafts",
        "in_flight",
        "kv_room",
        "lease_s",
        "lookup",
        "message",
        "min_early_tokens",
        "missing",
        "num_cached",
        "num_coming",
        "num_computed",
        "num_accepted",
        "num_published",
        "num_found",
        "num_rejected",
        "num_sent",
        "num_under_way",
        "num_whole",
        "output",
        "positions",
        "prefix",
        "prompt",
        "rank",
        "rope_delta",
        "rows",
        "said",
        "sampling",
        "states_found",
        "states_kept",
    )

    def __init__(
        self,
        key: str,
        message: PrefillRequest | KvOffer,
        prompt: tuple[int, ...],
        journal: Journal = NULL_JOURNAL,
    ) -> None:
        super().__init__(key, journal)
        self.message = message  # PrefillRequest or KvOffer
        self.prompt = prompt  # token ids; after a migration they end with those already sent
        self.sampling = message.sampling
        self.gateway = message.gateway
        self.deadline_s = message.deadline_s
        self.decode_here = False
        self.lease_s = 0.0  # how long its blocks are held for a request that goes on; 0: not
        self.missing: set[str] = set()  # rooms whose rows are not resident yet
        self.min_early_tokens = 1  # it begins before its images if so much can be computed
        self.rows: dict[str, object] = {}  # room to rows
        self.block_table: tuple[int, ...] = ()
        # Of a family with states: the blocks of the state behind the first `num_found` tokens, which
        # it begins with a copy of, and those that get a copy of its own, by the tokens before it.
        self.num_found = 0
        self.states_found: tuple[int, ...] = ()
        self.states_kept: Mapping[int, tuple[int, ...]] = {}
        self.num_computed = 0
        self.num_cached: int | None = None  # of its prompt, when prefill first took it
        self.prefix: Keys | None = None  # the keys of its blocks' contents
        self.rank = 0.0  # its place in every queue of this instance
        self.num_published = 0  # of its blocks, that others can find
        self.in_flight = 0  # steps under way that use the blocks
        self.num_under_way = 0  # tokens that they compute
        self.num_coming = 0  # tokens that they sample, and that a step behind them may take
        self.drafts: Sequence[int] = ()  # draft tokens for its next step
        self.awaits_token = False  # its next step waits until its last token is known
        self.output: list[TokenLogprobs] = []  # tokens sampled in this attempt
        # Ids of the answer's tokens, if asked; those of earlier attempts first.
        self.said = array("i")
        self.num_sent = 0
        self.lookup: Lookup | None = (
            None  # drafts of what it says next; None: it does not speculate
        )
        self.num_accepted = self.num_rejected = 0  # of its drafts, since tokens were sent last
        self.positions: Sequence[Sequence[int]] | None = None  # of its prompt, if not linear
        self.rope_delta = 0
        self.kv_room = ""
        self.num_whole: int | None = None  # blocks that were sent before the last chunk began
        self.finish_reason = ""
        self.failure: Failure | None = None

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def attempt(self) -> int:
        return self.message.attempt

    @property
    def ended_for_client(self) -> bool:
        """Nobody reads its tokens any more, whatever still owns its memory."""
        return self.terminal or self.state in (S.ABORTING, S.CALLED_OFF, S.FINISHING, S.HELD)

    @property
    def is_due(self) -> bool:
        """Whether a step could compute it, and all of it is here."""
        return bool(self.block_table) and self.num_left > 0 and not self.lacks_rows

    @property
    def has_yielded(self) -> bool:
        """Whether a token of it was computed at this instance."""
        return len(self.output) > isinstance(self.message, KvOffer)

    @property
    def holds_tokens(self) -> bool:
        """Whether its new tokens may wait for more: nobody reads them one by one."""
        num_new = len(self.output) - self.num_sent
        is_few = self.num_sent > 0 and num_new < self.sampling.tokens_per_word
        return is_few and not self.finish_reason

    def num_ready(self, ready_room: str = "") -> int | None:
        """Tokens up to the first image that lacks, if one does; `ready_room` does not, whatever
        is noted."""
        lacking = (
            item.offset
            for item in self.message.items
            if item.room in self.missing
            and item.room != ready_room
            and item.end > self.num_computed
        )
        return min(lacking, default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt, and what was generated."""
        return len(self.prompt) + len(self.output)

    @property
    def num_expected(self) -> int:
        """Tokens that are known, or on their way."""
        return len(self.prompt) + len(self.output) + self.num_coming

    @property
    def num_left(self) -> int:
        """Tokens that a further step could compute now; a chunk ends where a state is kept."""
        stop = len(self.prompt) + len(self.output)
        if not self.awaits_token:
            stop += self.num_coming
        if self.missing and (num_ready := self.num_ready()) is not None:
            stop = min(stop, num_ready)
        start = self.num_computed + self.num_under_way
        stop = min((n for n in self.states_kept if start < n < stop), default=stop)
        return stop - start

    @property
    def lacks_rows(self) -> bool:
        num_ready = self.num_ready()
        return num_ready is not None and num_ready < self.num_tokens

    @property
    def recomputable(self) -> bool:
        """Of one with images the rows are gone, once its prompt is computed."""
        return not self.message.items

    @property
    def num_promised(self) -> int:
        """Tokens that it must have blocks for from the start: with images, all that it can need,
        since it cannot give way.  The last token of an answer is never computed.  No more than
        `_refusal` of the roles compares with the pool, or it would wait for ever.
        """
        if self.recomputable or not self.decode_here:
            return 0
        return len(self.prompt) + self.sampling.max_tokens - self.num_emitted - 1

    def launched(self, count: int, *, ahead: bool) -> None:
        """A step with its next `count` tokens is under way; `ahead`: the next step may take the
        token that this one samples, before it is known here."""
        self.in_flight += 1
        self.num_under_way += count
        self.num_coming += ahead

    def returned(self, count: int, *, ahead: bool) -> None:
        """That step is over; what it has computed is told by an event."""
        self.in_flight -= 1
        self.num_under_way -= count
        self.num_coming -= ahead

    def tokens(self, start: int, stop: int) -> list[int]:
        """Their ids `[start, stop)`."""
        num_prompt = len(self.prompt)
        chunk = list(self.prompt[start:stop])
        if stop > num_prompt:
            output = self.output[max(0, start - num_prompt) : stop - num_prompt]
            chunk += [token.token_id for token in output]
        return chunk

    @property
    def num_emitted(self) -> int:
        """Output tokens of earlier attempts, at the end of `prompt`."""
        return self.message.num_emitted
