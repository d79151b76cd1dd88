"""REQUEST: one attempt of a request at an instance that runs the language model.

Theory of operation
-------------------
At a prefill instance it waits for its embeddings (text-only requests never do), then for a place in
the batch, computes its prompt in chunks, and hands its KV over: to itself if decode lives here too
(a reference, no copy), else through a TRANSFER.  At a decode instance it begins by waiting for
remote KV.  Either way it then decodes until a token ends it.

Blocks belong to the request from admission to its end, except after the hand-over, when the transfer
owns them until its outcome is known.  A step in flight reads and writes the blocks and cannot be
interrupted, so an abort meanwhile is the state ABORTING, which keeps the blocks until the step has
returned (faults F6, F43).  An embedding is received once: later chunks use the resident rows (F10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Row,
    State,
    Table,
    unless,
)


class S(State):
    WAITING = "in the queue; owns no blocks"
    WAITING_FOR_EMBEDDINGS = "holds references to rows that are loading"
    RUNNING = "owns blocks; its prompt is being computed"
    PREEMPTED = "gave its blocks up for an older request; will be computed again"
    TRANSFERRING = "the KV transfer owns the blocks"
    WAITING_FOR_REMOTE_KV = "blocks are asked for or granted; the KV is on its way"
    DECODING = "owns blocks; one token a step"
    ABORTING = "ended for the client; blocks stay until the step or the transfer has ended"
    FINISHED = "owns nothing"
    FAILED = "owns nothing; the gateway was told why"


class Do(Effect):
    ACQUIRE_EMBEDDINGS = "want every item's rows"
    RELEASE_EMBEDDINGS = "drop the references to rows"
    ENQUEUE = "join the queue for the batch"
    DEQUEUE = "leave the queue or the batch"
    OFFER_KV = "ask the decode instance for blocks"
    WITHDRAW_OFFER = "the decode instance's blocks are not needed"
    HAND_OVER_KV = "give the blocks to the transfer: its bytes are ready"
    START_DECODING = "join the decode batch"
    RESERVE_BLOCKS = "join the queue for blocks, for remote KV"
    CANCEL_TRANSFER = "stop the transfer of remote KV"
    RELEASE_BLOCKS = "return the blocks to the pool"
    EMIT_TOKENS = "send new tokens to the gateway"
    SEND_FAILURE = "tell the gateway why"
    SEND_ABORTED = "confirm the abort to the gateway"
    ARM_GRACE = "look again later whether the step or transfer has ended"
    REPORT_HANG = "the device does not answer: say so in health and log"
    REPORT_SPANS = "send the story to the gateway, for the timeline"


@dataclass(slots=True)
class EmbeddingsRequired(Event):
    """Arrived with pictures."""


@dataclass(slots=True)
class EmbeddingReady(Event):
    room: str
    rows: Any


@dataclass(slots=True)
class EmbeddingFailed(Event):
    kind: str
    reason: str
    retryable: bool


@dataclass(slots=True)
class TextOnly(Event):
    """Arrived without pictures."""


@dataclass(slots=True)
class KvOffered(Event):
    """Arrived at a decode instance: its KV will come from a prefill instance."""


@dataclass(slots=True)
class Scheduled(Event):
    """The batch took it; its blocks are reserved."""

    blocks: tuple[int, ...]


@dataclass(slots=True)
class ChunkComputed(Event):
    num_tokens: int


@dataclass(slots=True)
class FirstTokenSampled(Event):
    """The prompt is computed; the request goes on."""

    num_tokens: int
    token: Any


@dataclass(slots=True)
class LastTokenSampled(Event):
    """This token ends the request."""

    token: Any
    finish_reason: str
    num_tokens: int = 0


@dataclass(slots=True)
class TokenSampled(Event):
    token: Any


@dataclass(slots=True)
class RemoteKvArrived(Event):
    blocks: tuple[int, ...]
    kv: Any


@dataclass(slots=True)
class KvDelivered(Event):
    pass


@dataclass(slots=True)
class KvFailed(Event):
    kind: str
    reason: str
    retryable: bool


@dataclass(slots=True)
class KvWithdrawn(Event):
    """Prefill ended the request itself: nothing to decode."""


@dataclass(slots=True)
class StepFailed(Event):
    """This sequence failed in a step; the step is over."""

    kind: str
    reason: str
    retryable: bool


@dataclass(slots=True)
class StepReturned(Event):
    """The step that this sequence was in is over (fired only when it changes something)."""


@dataclass(slots=True)
class Preempted(Event):
    pass


@dataclass(slots=True)
class AbortReceived(Event):
    pass


@dataclass(slots=True)
class DeadlinePassed(Event):
    by_time = True


@dataclass(slots=True)
class GraceEnded(Event):
    """An aborted request's step or transfer has still not ended."""

    by_time = True


class Request(Machine):
    """One attempt; `key` is `request_id/attempt`."""

    __slots__ = (
        "block_table",
        "deadline_s",
        "decode_here",
        "failure",
        "finish_reason",
        "first_pending",
        "gateway",
        "in_flight",
        "kv_room",
        "message",
        "missing",
        "num_computed",
        "num_sent",
        "output",
        "outcome_reported",
        "prompt",
        "rope",
        "rope_delta",
        "rows",
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
        self.missing: set[str] = set()  # rooms whose rows are not resident yet
        self.rows: dict[str, Any] = {}  # room to rows
        self.block_table: tuple[int, ...] = ()
        self.num_computed = 0
        self.in_flight = False  # a step or a transfer uses the blocks now
        self.output: list[Any] = []  # tokens sampled in this attempt, TokenLogprobs
        self.num_sent = 0
        self.rope: Any = None
        self.rope_delta = 0
        self.kv_room = ""
        self.finish_reason = ""
        self.failure = ("", "", True)

    @property
    def request_id(self) -> str:
        return str(self.message.request_id)

    @property
    def attempt(self) -> int:
        return int(self.message.attempt)

    @property
    def ended_for_client(self) -> bool:
        """Nobody reads its tokens any more, whatever still owns its memory."""
        return self.terminal or self.state is S.ABORTING

    @property
    def num_emitted(self) -> int:
        """Output tokens of earlier attempts, at the end of `prompt`."""
        return int(self.message.num_emitted)


def last_missing(request: Request, event: EmbeddingReady) -> bool:
    return request.missing <= {event.room}


def decode_here(request: Request, event: Event) -> bool:
    return request.decode_here


def in_flight(request: Request, event: Event) -> bool:
    return request.in_flight


def keep_rows(request: Request, event: EmbeddingReady) -> None:
    request.missing.discard(event.room)
    request.rows[event.room] = event.rows


def keep_blocks(request: Request, event: Scheduled) -> None:
    request.block_table = event.blocks


def count_chunk(request: Request, event: ChunkComputed) -> None:
    request.num_computed += event.num_tokens


def keep_first_token(request: Request, event: FirstTokenSampled) -> None:
    request.num_computed += event.num_tokens
    request.output.append(event.token)


def keep_token(request: Request, event: TokenSampled) -> None:
    request.num_computed += 1
    request.output.append(event.token)


def keep_last_token(request: Request, event: LastTokenSampled) -> None:
    request.output.append(event.token)
    request.finish_reason = event.finish_reason


def adopt_kv(request: Request, event: RemoteKvArrived) -> None:
    request.block_table = event.blocks
    request.num_computed = event.kv.num_tokens
    request.rope_delta = event.kv.rope_delta
    request.output.append(event.kv.first_token)


def keep_failure(request: Request, event: EmbeddingFailed | KvFailed | StepFailed) -> None:
    request.failure = (event.kind, event.reason, event.retryable)


def note_late(request: Request, event: DeadlinePassed) -> None:
    request.failure = ("deadline", "the request did not finish before its deadline", False)


def forget_progress(request: Request, event: Preempted) -> None:
    request.block_table, request.num_computed = (), 0


_ENDED = (S.FINISHED, S.FAILED)
_END = (Do.SEND_ABORTED,)
_RUN = (Do.DEQUEUE, Do.RELEASE_BLOCKS)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    # Arrival.
    Row(S.WAITING, EmbeddingsRequired, S.WAITING_FOR_EMBEDDINGS, (Do.ACQUIRE_EMBEDDINGS,)),
    Row(S.WAITING, TextOnly, None, (Do.ENQUEUE,), note="never waits for pictures of others"),
    Row(S.WAITING, KvOffered, S.WAITING_FOR_REMOTE_KV, (Do.RESERVE_BLOCKS,)),
    Row(S.WAITING, Scheduled, S.RUNNING, (), keep_blocks, decode_here),
    Row(S.WAITING, Scheduled, S.RUNNING, (Do.OFFER_KV,), keep_blocks, unless(decode_here)),
    Row(S.WAITING, AbortReceived, S.FINISHED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, *_END)),
    Row(S.WAITING, DeadlinePassed, S.FAILED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), note_late),
    # Embeddings.
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingReady, S.WAITING, (Do.ENQUEUE,), keep_rows, last_missing),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingReady, None, (), keep_rows, unless(last_missing)),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingFailed, S.FAILED, (Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure),
    Row(S.WAITING_FOR_EMBEDDINGS, AbortReceived, S.FINISHED, (Do.RELEASE_EMBEDDINGS, *_END)),
    Row(S.WAITING_FOR_EMBEDDINGS, DeadlinePassed, S.FAILED, (Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), note_late),
    # Prompt.
    Row(S.RUNNING, ChunkComputed, None, (), count_chunk),
    Row(S.RUNNING, FirstTokenSampled, S.DECODING, (Do.RELEASE_EMBEDDINGS, Do.START_DECODING, Do.EMIT_TOKENS), keep_first_token, decode_here, "a reference, no copy"),
    Row(S.RUNNING, FirstTokenSampled, S.TRANSFERRING, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.HAND_OVER_KV), keep_first_token, unless(decode_here)),
    Row(S.RUNNING, LastTokenSampled, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.EMIT_TOKENS, Do.REPORT_SPANS), keep_last_token, decode_here),
    Row(S.RUNNING, LastTokenSampled, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.WITHDRAW_OFFER), keep_last_token, unless(decode_here)),
    Row(S.RUNNING, StepFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), keep_failure),
    Row(S.RUNNING, KvFailed, S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight, "decode lost or refused early"),
    Row(S.RUNNING, KvFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure, unless(in_flight)),
    Row(S.RUNNING, AbortReceived, S.ABORTING, (Do.WITHDRAW_OFFER, *_END, Do.ARM_GRACE), when=in_flight, note="the step owns the blocks"),
    Row(S.RUNNING, AbortReceived, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, *_END), when=unless(in_flight)),
    Row(S.RUNNING, DeadlinePassed, S.ABORTING, (Do.WITHDRAW_OFFER, Do.SEND_FAILURE, Do.ARM_GRACE), note_late, in_flight),
    Row(S.RUNNING, DeadlinePassed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), note_late, unless(in_flight)),
    Row(S.RUNNING, Preempted, None, when=in_flight, note="not while a step uses the blocks (F6)"),
    Row(S.RUNNING, Preempted, S.PREEMPTED, _RUN, forget_progress, unless(in_flight), "recompute; rows stay referenced, the offer stands"),
    Row(S.PREEMPTED, Scheduled, S.RUNNING, (), keep_blocks),
    Row(S.PREEMPTED, KvFailed, S.FAILED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure, note="decode lost or refused early"),
    Row(S.PREEMPTED, AbortReceived, S.FINISHED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, *_END)),
    Row(S.PREEMPTED, DeadlinePassed, S.FAILED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), note_late),
    # Hand-over, prefill side: the transfer owns the blocks.
    Row(S.TRANSFERRING, KvDelivered, S.FINISHED, (Do.REPORT_SPANS,)),
    Row(S.TRANSFERRING, KvFailed, S.FAILED, (Do.SEND_FAILURE,), keep_failure),
    Row(S.TRANSFERRING, AbortReceived, S.FINISHED, (Do.WITHDRAW_OFFER, *_END), note="the transfer owns the blocks"),
    Row(S.TRANSFERRING, DeadlinePassed, S.FAILED, (Do.SEND_FAILURE,), note_late),
    # Hand-over, decode side: the transfer owns the blocks until they are published.
    Row(S.WAITING_FOR_REMOTE_KV, RemoteKvArrived, S.DECODING, (Do.START_DECODING, Do.EMIT_TOKENS), adopt_kv),
    Row(S.WAITING_FOR_REMOTE_KV, KvFailed, S.FAILED, (Do.SEND_FAILURE,), keep_failure),
    Row(S.WAITING_FOR_REMOTE_KV, KvWithdrawn, S.FINISHED),
    Row(S.WAITING_FOR_REMOTE_KV, AbortReceived, S.ABORTING, (Do.ARM_GRACE, *_END, Do.CANCEL_TRANSFER), note="armed first: the cancel may conclude at once"),
    Row(S.WAITING_FOR_REMOTE_KV, DeadlinePassed, S.ABORTING, (Do.ARM_GRACE, Do.SEND_FAILURE, Do.CANCEL_TRANSFER), note_late),
    # Decode.
    Row(S.DECODING, TokenSampled, None, (Do.EMIT_TOKENS,), keep_token),
    Row(S.DECODING, LastTokenSampled, S.FINISHED, (*_RUN, Do.EMIT_TOKENS, Do.REPORT_SPANS), keep_last_token),
    Row(S.DECODING, StepFailed, S.FAILED, (*_RUN, Do.SEND_FAILURE), keep_failure),
    Row(S.DECODING, AbortReceived, S.ABORTING, (*_END, Do.ARM_GRACE), when=in_flight, note="the step owns the blocks"),
    Row(S.DECODING, AbortReceived, S.FINISHED, (*_RUN, *_END), when=unless(in_flight)),
    Row(S.DECODING, DeadlinePassed, S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE), note_late, in_flight),
    Row(S.DECODING, DeadlinePassed, S.FAILED, (*_RUN, Do.SEND_FAILURE), note_late, unless(in_flight)),
    # Aborting: the outcome frees the memory.
    Row(S.ABORTING, StepReturned, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS)),
    Row(S.ABORTING, StepFailed, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS)),
    Row(S.ABORTING, RemoteKvArrived, S.FINISHED, (Do.RELEASE_BLOCKS,), adopt_kv, note="the commit was faster"),
    Row(S.ABORTING, KvFailed, None, when=in_flight, note="the step is still to return"),
    Row(S.ABORTING, KvFailed, S.FINISHED, when=unless(in_flight), note="the transfer returned the blocks, or fences them"),
    Row(S.ABORTING, KvWithdrawn, S.FINISHED),
    Row(S.ABORTING, GraceEnded, None, (Do.REPORT_HANG, Do.ARM_GRACE), note="time frees nothing (F6)"),
    Row(S.ABORTING, AbortReceived, None, _END, note="the confirmation was lost"),
    Row(_ENDED, AbortReceived, None, _END, note="the confirmation was lost"),
)

IGNORES = (
    Ignore(_ENDED, (EmbeddingReady, EmbeddingFailed, Scheduled, RemoteKvArrived, KvDelivered, KvFailed, KvWithdrawn, StepReturned, DeadlinePassed, GraceEnded), "it has ended"),
    Ignore((S.WAITING_FOR_REMOTE_KV, S.TRANSFERRING, S.WAITING, S.WAITING_FOR_EMBEDDINGS, S.PREEMPTED, S.RUNNING, S.DECODING), (StepReturned,), "nothing waits for the step's end"),
    Ignore((S.DECODING,), (KvFailed, KvWithdrawn, KvDelivered), "of an attempt that decodes here already"),
    Ignore((S.ABORTING,), (DeadlinePassed, KvDelivered, EmbeddingReady, EmbeddingFailed), "it has ended for the client"),
    Ignore((S.WAITING, S.RUNNING, S.PREEMPTED), (EmbeddingFailed, EmbeddingReady), "its rows are referenced already"),
)

_HELD: dict[State, str] = {S.ABORTING: "a step or a transfer still uses the blocks; only its end frees them (F6)"}
TABLE = Table("REQUEST", __doc__ or "", S, S.WAITING, _ENDED, ROWS, IGNORES, _HELD)
Request.table = TABLE
