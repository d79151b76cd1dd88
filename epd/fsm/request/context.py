"""The context of REQUEST: what guards and the scheduler read of an attempt at an instance.

The scheduler asks it (`epd.scheduling.waiting.Schedulable`) and keeps nothing of its own.  What only
the roles need is in their record of the attempt (`roles/steps/record.py`).  Tokens count as computed when
their step has returned, and for the scheduler from its launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from epd.failure import Failure
from epd.fsm.kernel import NULL_JOURNAL, Journal, Machine
from epd.fsm.request.states import Own, S
from epd.keys import RoomKey
from epd.layouts import owned
from epd.messages import KvOffer, MoveRequest, PrefillRequest
from epd.records import TokenLogprobs


class Launched(NamedTuple):
    """A step under way: it computes the next `num_tokens`.  `ahead`: the step behind it may take
    the token that it samples, before that arrives here."""

    num_tokens: int
    ahead: bool


class Context(Machine):
    """What guards and actions read, and actions alone write."""

    __slots__ = (
        "block_table",
        "blocks_ahead",
        "deadline_s",
        "decode_here",
        "failure",
        "finish_reason",
        "gateway",
        "kv_room",
        "lease_s",
        "message",
        "min_early_tokens",
        "missing",
        "move",
        "num_cached",
        "num_coming",
        "num_computed",
        "num_found",
        "num_passed",
        "num_under_way",
        "output",
        "prompt",
        "rank",
        "rope_delta",
        "sampling",
        "states_found",
        "states_kept",
        "steps",
    )

    def __init__(
        self,
        key: str,
        message: PrefillRequest | KvOffer,
        prompt: tuple[int, ...],
        journal: Journal = NULL_JOURNAL,
        *,
        decode_here: bool = False,
        lease_s: float = 0.0,
        min_early_tokens: int = 1,
        rank: float = 0.0,
        rope_delta: int = 0,
    ) -> None:
        super().__init__(key, journal)
        self.message = message  # PrefillRequest or KvOffer
        self.prompt = prompt  # token ids; after a migration they end with those already sent
        self.sampling = message.sampling
        self.gateway = message.gateway
        self.deadline_s = message.deadline_s
        self.decode_here = decode_here
        self.lease_s = lease_s  # how long its blocks are held for a request that goes on; 0: not
        self.missing: set[str] = set()  # rooms whose rows are not resident yet
        self.min_early_tokens = min_early_tokens  # that begin before its images
        self.block_table: tuple[int, ...] = ()
        self.num_passed = 0  # of them: blocks behind the window, which are not its own any more
        self.blocks_ahead: tuple[int, ...] = ()  # its own, for later places
        # Of a family with states: the blocks of the state behind the first `num_found` tokens, which
        # it begins with a copy of, and those that get a copy of its own, by the tokens before it.
        self.num_found = 0
        self.states_found: tuple[int, ...] = ()
        self.states_kept: Mapping[int, tuple[int, ...]] = {}
        self.num_computed = 0
        self.num_cached: int | None = None  # of its prompt, when prefill first took it
        self.rank = rank  # its place in every queue of this instance
        self.steps: tuple[Launched, ...] = ()  # under way, in order: they use the blocks
        self.num_under_way = 0  # tokens that they compute
        self.num_coming = 0  # tokens that they sample, and that a step behind them may take
        self.output: list[TokenLogprobs] = []  # tokens sampled in this attempt
        self.rope_delta = rope_delta
        # Of the transfer of its KV, if there is one.
        self.kv_room = str(RoomKey(message.request_id, message.attempt))
        self.finish_reason = ""
        self.failure: Failure | None = None
        self.move: MoveRequest | None = None  # by which another attempt goes on elsewhere

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
    def has_blocks(self) -> bool:
        """Whether the blocks of its table are its own: it may have given them up."""
        return Own.BLOCKS in self.state.owns

    @property
    def blocks(self) -> tuple[int, ...]:
        """All that are its own."""
        table = owned(self.block_table) if self.num_passed else self.block_table
        return table + self.blocks_ahead

    @property
    def num_settled(self) -> int:
        return self.num_computed

    @property
    def num_launched(self) -> int:
        return self.num_computed + self.num_under_way

    @property
    def is_due(self) -> bool:
        """Whether a step could compute it, and all of it is here."""
        return self.has_blocks and self.num_left > 0 and not self.lacks_rows

    @property
    def has_yielded(self) -> bool:
        """Whether a token of it was computed at this instance."""
        return len(self.output) > isinstance(self.message, KvOffer)

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
        """The prompt, and the output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def num_expected(self) -> int:
        """With the tokens on their way."""
        return len(self.prompt) + len(self.output) + self.num_coming

    @property
    def num_left(self) -> int:
        """Tokens that a further step could compute now; a chunk ends where a state is kept."""
        stop = len(self.prompt) + len(self.output) + self.num_coming
        if self.missing and (num_ready := self.num_ready()) is not None:
            stop = min(stop, num_ready)
        start = self.num_computed + self.num_under_way
        if self.states_kept:
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
