"""REQUEST: one attempt of a request at an instance that runs the language model.

Theory of operation
-------------------
At a prefill instance it asks for its embeddings, waits for a place in the batch (text-only requests
at once, others when enough of their prompt can be computed), computes its prompt in chunks, waits
where a picture's rows are loading (WAITING_MID_PROMPT: its blocks stay, others pass it), and hands
its KV over: to itself if decode lives here too (a reference, no copy), else through a TRANSFER that
sends what is final while the rest is computed.  At a decode instance it begins by waiting for
remote KV.  Either way it then decodes until a token, or its deadline, ends the answer.

Blocks belong to the request from admission to its end, except after the hand-over, when the transfer
owns them until its outcome is known.  Decoding asks for more as it goes; when there are none, the
youngest gives its blocks up (PREEMPTED), joins the line again at its old place, and computes all of
it once more; its client sees a pause and no other difference.

A step in flight uses the blocks and cannot be interrupted, so an abort meanwhile is the state
ABORTING, which keeps the blocks until the last step has returned (faults F6, F43); so does a
transfer of remote KV, whose end CALLED_OFF awaits.  The step after one may be launched before its
tokens are known.  If one of them ends the request, it is computed once too often: FINISHING keeps
the blocks until that step has returned, and its token is dropped.
An embedding is received once: later chunks use the resident rows (F10).  A request that was for its
prompt alone (another one goes on with it) is HELD afterwards: nobody else uses its blocks, so its
lease may end by time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from epd.fsm.kernel import NULL_JOURNAL, Effect, Event, Journal, Machine, Owned, State


class Do(Effect):
    ACQUIRE_EMBEDDINGS = "want every item's rows"
    RELEASE_EMBEDDINGS = "drop the references to rows"
    ENQUEUE = "join the queue for the batch"
    EXTEND = "the batch may compute up to the next picture that lacks"
    DEQUEUE = "leave the queue or the batch"
    OFFER_KV = "ask the decode instance for blocks"
    WITHDRAW_OFFER = "the decode instance's blocks are not needed"
    PUSH_KV = "let decode have the KV that is final"
    HAND_OVER_KV = "give the blocks to the transfer: its bytes are ready"
    START_DECODING = "join the decode batch"
    RESERVE_BLOCKS = "join the queue for blocks, for remote KV"
    CANCEL_TRANSFER = "stop the transfer of remote KV"
    RELEASE_BLOCKS = "return the blocks to the pool"
    EMIT_TOKENS = "send new tokens to the gateway"
    SEND_FAILURE = "tell the gateway why"
    SEND_ABORTED = "confirm the abort to the gateway"
    ARM_LEASE = "hold the blocks for a while, among others that are held"
    END_LEASE = "hold them no longer"
    ARM_GRACE = "look again later whether the step or transfer has ended"
    REPORT_HANG = "the device does not answer: say so in health and log"
    REPORT_SPANS = "send the story to the gateway, for the timeline"


class Own(Owned):
    QUEUE_PLACE = "a place in the queue for the batch", Do.DEQUEUE
    BATCH_PLACE = "a place in the batch", Do.DEQUEUE
    LEASE = "a place among what is held for others", Do.END_LEASE
    BLOCKS = "KV blocks", Do.RELEASE_BLOCKS, Do.HAND_OVER_KV
    EMBEDDINGS = "references to rows, asked for or here", Do.RELEASE_EMBEDDINGS
    OFFER = "room for its KV at decode, asked for or granted", Do.WITHDRAW_OFFER, Do.HAND_OVER_KV
    REMOTE_KV = "a transfer under way into blocks that are the transfer's"


class S(State):
    ARRIVED = "asks for what it needs first"
    WAITING = "in the queue", Own.QUEUE_PLACE, Own.EMBEDDINGS
    WAITING_FOR_EMBEDDINGS = "its rows are loading", Own.EMBEDDINGS
    RUNNING = (
        "its prompt is being computed",
        *(Own.BATCH_PLACE, Own.BLOCKS, Own.EMBEDDINGS, Own.OFFER),
    )
    WAITING_MID_PROMPT = (
        "computed up to a picture whose rows are loading",
        *(Own.BATCH_PLACE, Own.BLOCKS, Own.EMBEDDINGS, Own.OFFER),
    )
    PREEMPTED = (
        "gave its blocks up for an older request; will be computed again",
        *(Own.QUEUE_PLACE, Own.EMBEDDINGS, Own.OFFER),
    )
    TRANSFERRING = "the KV transfer has the blocks, and goes its own way"
    WAITING_FOR_REMOTE_KV = "its KV is on its way", Own.REMOTE_KV
    DECODING = "one token a step", Own.BATCH_PLACE, Own.BLOCKS
    ABORTING = "ended for the client; a step still uses its memory", Own.BLOCKS, Own.EMBEDDINGS
    CALLED_OFF = "ended for the client; the transfer of its KV still writes", Own.REMOTE_KV
    HELD = "answered; kept for the request that will go on with it", Own.LEASE, Own.BLOCKS
    FINISHING = "its last token is sent; the step launched ahead still runs", Own.BLOCKS
    FINISHED = "over"
    FAILED = "over; the gateway was told why"


@dataclass(slots=True)
class _Failed(Event):
    kind: str
    reason: str
    retryable: bool
    culprit: str = ""  # the instance that failed, if it was another


@dataclass(slots=True)
class EmbeddingsRequired(Event):
    """Arrived with pictures."""


@dataclass(slots=True)
class EmbeddingsPromised(Event):
    """There will be room for all its rows, and all are asked for; some may be here already."""


@dataclass(slots=True)
class EmbeddingReady(Event):
    room: str
    rows: Any


class EmbeddingFailed(_Failed):
    pass


@dataclass(slots=True)
class TextOnly(Event):
    """Arrived without pictures."""


@dataclass(slots=True)
class KvOffered(Event):
    """Arrived at a decode instance: its KV will come from a prefill instance."""


@dataclass(slots=True)
class Scheduled(Event):
    """The batch took it; blocks for all tokens known so far are its own."""

    brings = (Own.BATCH_PLACE, Own.BLOCKS)
    ends = (Own.QUEUE_PLACE,)
    blocks: tuple[int, ...]
    num_cached: int = 0  # tokens whose KV the first blocks hold already


@dataclass(slots=True)
class Grown(Event):
    """It got blocks for its next tokens."""

    blocks: tuple[int, ...]


@dataclass(slots=True)
class ChunkComputed(Event):
    num_tokens: int


@dataclass(slots=True)
class LayersComputed(Event):
    """Of its last chunk, which begins at token `start`: KV of the first layers is final."""

    start: int
    num_layers: int


@dataclass(slots=True)
class FirstTokenSampled(Event):
    """The prompt (after a preemption, and what was generated) is computed; the request goes on."""

    num_tokens: int
    token: Any


@dataclass(slots=True)
class LastTokenSampled(Event):
    """This token ends the request."""

    token: Any
    finish_reason: str
    num_tokens: int = 0
    confirmed: tuple[Any, ...] = ()  # guesses before it that the same step confirmed


@dataclass(slots=True)
class PromptHeld(LastTokenSampled):
    """Likewise, of a request that was for its prompt's KV: another one will go on with it."""


@dataclass(slots=True)
class LeaseEnded(Event):
    """Nobody came for the KV in time."""

    by_time = True


@dataclass(slots=True)
class LeaseRevoked(Event):
    """Too much is held, or the instance leaves; who comes computes it again."""


@dataclass(slots=True)
class TokenSampled(Event):
    token: Any
    confirmed: tuple[Any, ...] = ()  # guesses before it that the same step confirmed


@dataclass(slots=True)
class RemoteKvArrived(Event):
    brings = (Own.BLOCKS,)
    ends = (Own.REMOTE_KV,)
    blocks: tuple[int, ...]
    kv: Any


@dataclass(slots=True)
class KvDelivered(Event):
    pass


class KvFailed(_Failed):
    """The transfer is over, and has its memory or gave it back: an offer, or what was on its way."""

    ends = (Own.OFFER, Own.REMOTE_KV)


@dataclass(slots=True)
class KvWithdrawn(Event):
    """Prefill ended the request itself: nothing to decode."""

    ends = (Own.REMOTE_KV,)


class StepFailed(_Failed):
    """This sequence failed in a step; the step is over."""


@dataclass(slots=True)
class StepReturned(Event):
    """The step that this sequence was in is over (fired only when it changes something)."""


@dataclass(slots=True)
class Preempted(Event):
    """An older request needs its blocks."""


@dataclass(slots=True)
class AbortReceived(Event):
    pass


@dataclass(slots=True)
class DeadlinePassed(Event):
    by_time = True


@dataclass(slots=True)
class GraceEnded(Event):
    """The step or transfer of one that is over for the client has still not ended."""

    by_time = True


ALL_TOKENS = 1 << 60


class Request(Machine):
    """One attempt; `key` is `request_id/attempt`."""

    __slots__ = (
        "block_table",
        "culprit",
        "deadline_s",
        "decode_here",
        "failure",
        "finish_reason",
        "gateway",
        "in_flight",
        "kv_room",
        "lease_s",
        "lookup",
        "message",
        "min_early_tokens",
        "missing",
        "num_cached",
        "num_computed",
        "num_confirmed",
        "num_rejected",
        "num_sent",
        "num_whole",
        "output",
        "prefix",
        "prompt",
        "rank",
        "rope",
        "rope_delta",
        "rows",
        "said",
        "sampling",
    )

    def __init__(
        self, key: str, message: Any, prompt: tuple[int, ...], journal: Journal = NULL_JOURNAL
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
        self.min_early_tokens = 1  # it begins before its pictures if so much can be computed
        self.rows: dict[str, Any] = {}  # room to rows
        self.block_table: tuple[int, ...] = ()
        self.num_computed = 0
        self.num_cached = -1  # of its prompt, when prefill first took it; -1: it has not yet
        self.prefix: Any = None  # the keys of its blocks' contents
        self.rank = 0.0  # its place in every line of this instance
        self.in_flight = 0  # steps under way that use the blocks
        self.output: list[Any] = []  # tokens sampled in this attempt, TokenLogprobs
        # Ids of the answer's tokens, if asked; those of earlier attempts first.
        self.said = array("i")
        self.num_sent = 0
        self.lookup: Any = None  # guesses of what it says next; None: it does not speculate
        self.num_confirmed = self.num_rejected = 0  # of its guesses, since tokens were sent last
        self.rope: Any = None
        self.rope_delta = 0
        self.kv_room = ""
        self.num_whole = -1  # blocks that were sent before the last chunk; -1: it has not begun
        self.finish_reason = ""
        self.failure = ("", "", True)
        self.culprit = ""  # the instance that failed it, if it was another

    @property
    def request_id(self) -> str:
        return str(self.message.request_id)

    @property
    def attempt(self) -> int:
        return int(self.message.attempt)

    @property
    def ended_for_client(self) -> bool:
        """Nobody reads its tokens any more, whatever still owns its memory."""
        return self.terminal or self.state in (S.ABORTING, S.CALLED_OFF, S.FINISHING, S.HELD)

    @property
    def holds_tokens(self) -> bool:
        """Whether its new tokens may wait for more: nobody reads them one by one."""
        num_new = len(self.output) - self.num_sent
        is_few = self.num_sent > 0 and num_new < self.sampling.tokens_per_word
        return is_few and not self.finish_reason

    def num_ready(self, ready_room: str = "") -> int:
        """Tokens up to the first picture that lacks; `ready_room` does not, whatever is noted."""
        lacking = (
            item.offset
            for item in self.message.items
            if item.room in self.missing
            and item.room != ready_room
            and item.end > self.num_computed
        )
        return min(lacking, default=ALL_TOKENS)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt, and what was generated."""
        return len(self.prompt) + len(self.output)

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
        return int(self.message.num_emitted)
