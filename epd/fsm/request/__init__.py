"""REQUEST: one attempt of a request at an instance that runs the language model.

Theory of operation
-------------------
At a prefill instance a request asks for its embeddings and waits for a place in the batch, with
images until enough of its prompt can be computed. It computes its prompt in chunks, and waits where
an image's rows are loading (WAITING_MID_PROMPT: it keeps its blocks, and others pass it). Then it
hands its KV over: to itself if decode lives here too, else through an OUTGOING that sends finished
KV while the rest is computed. At a decode instance it begins by waiting for remote KV. Either way
it then decodes until a token, or its deadline, ends the answer. Where an instance drains, it may
end before (MOVING): another attempt inherits its KV and hands that over, without a step.

Blocks belong to the request from admission to its end, except after the hand-over, when the
transfer owns them until its outcome. Those behind a window go back while it runs. Decoding asks for
more as it goes. When there are none, the youngest request gives up its blocks (PREEMPTED), joins
the queue at its old place, and computes all of it again; its client sees a pause.

A step in flight uses the blocks and cannot be interrupted. An abort meanwhile is the state
ABORTING, which keeps the blocks until the last step has returned (faults F6, F43). CALLED_OFF does
the same for a transfer of remote KV. The next step may be launched before the tokens of the current
one have arrived.  If one of these ends the request, it is computed once too often: FINISHING keeps
the blocks until that step has returned, and its token is dropped.

An embedding is received once: later chunks use the resident rows (F10). A request for its prompt
alone (another request continues it) is HELD afterwards: nobody else uses its blocks, so its lease
may end by time.
"""

from __future__ import annotations

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event, Ignore, Row, State, Table, Timers, unless
from epd.fsm.request.context import Context, Launched
from epd.fsm.request.events import (
    AbortReceived,
    ChunkComputed,
    DeadlinePassed,
    EmbeddingFailed,
    EmbeddingReady,
    EmbeddingsPromised,
    EmbeddingsRequired,
    FirstTokenSampled,
    GraceEnded,
    Grown,
    KvDelivered,
    KvFailed,
    KvInherited,
    KvOffered,
    KvWithdrawn,
    LastTokenSampled,
    LayersComputed,
    LeaseEnded,
    LeaseRevoked,
    MoveRequested,
    PlanFailed,
    Preempted,
    PromptHeld,
    RemoteKvArrived,
    Scheduled,
    Slid,
    StepFailed,
    StepLaunched,
    StepReturned,
    TextOnly,
    TokenSampled,
    _Failed,
)
from epd.fsm.request.states import Do, Own, S
from epd.layouts import PASSED

__all__ = (
    "TABLE",
    "AbortReceived",
    "ChunkComputed",
    "DeadlinePassed",
    "Do",
    "EmbeddingFailed",
    "EmbeddingReady",
    "EmbeddingsPromised",
    "EmbeddingsRequired",
    "FirstTokenSampled",
    "GraceEnded",
    "Grown",
    "KvDelivered",
    "KvFailed",
    "KvInherited",
    "KvOffered",
    "KvWithdrawn",
    "LastTokenSampled",
    "Launched",
    "LayersComputed",
    "LeaseEnded",
    "LeaseRevoked",
    "MoveRequested",
    "Own",
    "PlanFailed",
    "Preempted",
    "PromptHeld",
    "RemoteKvArrived",
    "Request",
    "S",
    "Scheduled",
    "Slid",
    "StepFailed",
    "StepLaunched",
    "StepReturned",
    "TextOnly",
    "TokenSampled",
    "adopt_kv",
    "await_rows",
    "count_chunk",
    "decode_here",
    "end_here",
    "end_step",
    "fail_step",
    "goes_on",
    "grow",
    "in_another_step",
    "in_flight",
    "inherit",
    "keep_blocks",
    "keep_failure",
    "keep_first_token",
    "keep_last_token",
    "keep_move",
    "keep_rows",
    "keep_token",
    "launch",
    "may_begin",
    "note_late",
    "reaches_missing",
    "slide",
)  # fmt: skip


def may_begin(request: Request, event: EmbeddingReady | EmbeddingsPromised) -> bool:
    num_ready = request.num_ready(event.room if isinstance(event, EmbeddingReady) else "")
    return num_ready is None or num_ready >= request.min_early_tokens


def reaches_missing(request: Request, event: ChunkComputed) -> bool:
    num_ready = request.num_ready()
    num_tokens = request.num_computed + request.steps[0].num_tokens
    return num_ready is not None and num_tokens >= num_ready


def goes_on(request: Request, event: EmbeddingReady) -> bool:
    num_ready = request.num_ready(event.room)
    return num_ready is None or num_ready > request.num_computed


def decode_here(request: Request, event: Event) -> bool:
    return request.decode_here


def in_flight(request: Request, event: Event) -> bool:
    return bool(request.steps)


def in_another_step(request: Request, event: StepOver) -> bool:
    """Than the one that ends with this event: it was launched ahead, and has the blocks."""
    return len(request.steps) > 1


def await_rows(request: Request, event: EmbeddingsRequired) -> None:
    request.missing = {item.room for item in request.message.items}


def keep_rows(request: Request, event: EmbeddingReady) -> None:
    request.missing.discard(event.room)


def launch(request: Request, event: StepLaunched) -> None:
    request.steps += (Launched(event.num_tokens, event.ahead),)
    request.num_under_way += event.num_tokens
    request.num_coming += event.ahead


def _end_step(request: Request) -> int:
    """The oldest one; the number of tokens that it computed."""
    (num_tokens, ahead), *later = request.steps
    request.steps = tuple(later)
    request.num_under_way -= num_tokens
    request.num_coming -= ahead
    return num_tokens


def end_step(request: Request, event: StepReturned) -> None:
    _end_step(request)


def fail_step(request: Request, event: StepFailed) -> None:
    _end_step(request)
    request.failure = event.failure


def keep_blocks(request: Request, event: Scheduled) -> None:
    request.block_table, request.num_computed = event.blocks, event.num_cached
    request.blocks_ahead, request.num_passed = event.ahead, event.blocks.count(PASSED)
    request.states_found, request.states_kept = event.states_found, event.states_kept
    request.num_found = event.num_cached
    if request.num_cached is None:
        request.num_cached = event.num_cached


def grow(request: Request, event: Grown) -> None:
    request.block_table += event.blocks
    if request.blocks_ahead:
        new = set(event.blocks)
        request.blocks_ahead = tuple(b for b in request.blocks_ahead if b not in new)


def slide(request: Request, event: Slid) -> None:
    table = list(request.block_table)
    for place in event.passed:
        table[place] = PASSED
    request.block_table = tuple(table)
    request.num_passed += len(event.passed)


def count_chunk(request: Request, event: ChunkComputed) -> None:
    request.num_computed += _end_step(request)


def keep_first_token(request: Request, event: FirstTokenSampled) -> None:
    request.num_computed += _end_step(request)
    request.output.append(event.token)


def keep_token(request: Request, event: TokenSampled) -> None:
    _end_step(request)  # of its drafts only some may count
    request.num_computed += len(event.accepted) + 1
    request.output += (*event.accepted, event.token)


def keep_last_token(request: Request, event: LastTokenSampled) -> None:
    _end_step(request)
    request.output += (*event.accepted, event.token)
    request.finish_reason = event.finish_reason


def adopt_kv(request: Request, event: RemoteKvArrived) -> None:
    request.block_table, request.blocks_ahead = event.blocks, event.ahead
    request.num_passed = event.blocks.count(PASSED)
    request.num_computed = event.kv.num_tokens
    request.num_cached = event.kv.num_cached
    request.rope_delta = event.kv.rope_delta
    request.output.append(event.kv.first_token)


def keep_move(request: Request, event: MoveRequested) -> None:
    request.move = event.move


def inherit(request: Request, event: KvInherited) -> None:
    request.block_table = event.blocks
    request.num_passed = event.blocks.count(PASSED)
    request.num_computed = len(request.prompt)
    request.num_cached = event.num_cached
    request.output.append(event.token)


def keep_failure(request: Request, event: _Failed) -> None:
    request.failure = event.failure


def end_here(request: Request, event: Event) -> None:
    request.finish_reason = "length"


def note_late(request: Request, event: DeadlinePassed) -> None:
    reason = "the request did not finish before its deadline"
    request.failure = Failure(FailureKind.DEADLINE, reason)


StepOver = TokenSampled | LastTokenSampled | StepFailed | StepReturned
_ENDED = (S.FINISHED, S.FAILED)
_USED_BY_STEPS = (S.ABORTING, S.FINISHING)
_LINGERS = (*_USED_BY_STEPS, S.CALLED_OFF)
_IN_QUEUE = (S.WAITING, S.PREEMPTED)
_PROMPT = (S.RUNNING, S.WAITING_MID_PROMPT)
_IN_BATCH = (*_PROMPT, S.DECODING)
_SAMPLES = (S.RUNNING, S.DECODING, S.MOVING)
_STAYS = (
    *_IN_QUEUE,
    *_PROMPT,
    S.WAITING_FOR_EMBEDDINGS,
    S.TRANSFERRING,
    S.WAITING_FOR_REMOTE_KV,
    S.HELD,
    *_LINGERS,
)
_UNBEGUN = (S.ARRIVED, S.WAITING, S.WAITING_FOR_EMBEDDINGS, S.PREEMPTED)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    # Arrival.
    Row(S.ARRIVED, TextOnly, S.WAITING, (Do.ENQUEUE,), note="never waits for images of others"),
    Row(S.ARRIVED, EmbeddingsRequired, S.WAITING_FOR_EMBEDDINGS, (Do.ACQUIRE_EMBEDDINGS,), await_rows),
    Row(S.ARRIVED, KvOffered, S.WAITING_FOR_REMOTE_KV, (Do.RESERVE_BLOCKS,)),
    # Embeddings.
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingsPromised, S.WAITING, (Do.ENQUEUE,), when=may_begin, note="there is text before its images"),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingsPromised, None, when=unless(may_begin)),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingReady, S.WAITING, (Do.ENQUEUE,), keep_rows, may_begin),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingReady, None, (), keep_rows, unless(may_begin)),
    Row((*_IN_QUEUE, S.RUNNING), EmbeddingReady, None, (Do.EXTEND,), keep_rows, note="of RUNNING, the load overlapped the steps before it"),
    Row(S.WAITING_MID_PROMPT, EmbeddingReady, S.RUNNING, (Do.EXTEND,), keep_rows, goes_on, "its blocks are as they were (F10)"),
    Row(S.WAITING_MID_PROMPT, EmbeddingReady, None, (), keep_rows, unless(goes_on), "a later image"),
    # Prompt.
    Row(S.WAITING, Scheduled, S.RUNNING, (), keep_blocks, decode_here),
    Row(S.WAITING, Scheduled, S.RUNNING, (Do.OFFER_KV,), keep_blocks, unless(decode_here)),
    Row(S.PREEMPTED, Scheduled, S.RUNNING, (), keep_blocks, note="its offer stands"),
    Row((S.RUNNING, S.DECODING), StepLaunched, None, (), launch, note="the next one may be launched before it ends"),
    Row(S.RUNNING, ChunkComputed, S.WAITING_MID_PROMPT, (Do.PUSH_KV,), count_chunk, reaches_missing, "others pass it"),
    Row(S.RUNNING, ChunkComputed, None, (Do.PUSH_KV,), count_chunk, unless(reaches_missing)),
    Row(S.RUNNING, LayersComputed, None, (Do.PUSH_KV,), note="of its last chunk"),
    Row(S.RUNNING, FirstTokenSampled, S.DECODING, (Do.START_DECODING, Do.EMIT_TOKENS), keep_first_token, decode_here, "a reference, no copy"),
    Row(S.RUNNING, FirstTokenSampled, S.TRANSFERRING, (Do.HAND_OVER_KV,), keep_first_token, unless(decode_here)),
    Row(S.RUNNING, PromptHeld, S.HELD, (Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_LEASE), keep_last_token, note="another request goes on with it"),
    Row(S.HELD, (LeaseEnded, LeaseRevoked), S.FINISHED, note="nobody else uses the blocks, so time may end it"),
    # Hand-over: the transfer owns the blocks, on either side, until they are published.
    Row(S.TRANSFERRING, KvDelivered, S.FINISHED, (Do.REPORT_SPANS,)),
    Row(S.WAITING_FOR_REMOTE_KV, RemoteKvArrived, S.DECODING, (Do.START_DECODING, Do.EMIT_TOKENS), adopt_kv),
    Row((S.WAITING_FOR_REMOTE_KV, S.CALLED_OFF), KvWithdrawn, S.FINISHED),
    # Decode.
    Row(S.DECODING, TokenSampled, None, (Do.EMIT_TOKENS,), keep_token),
    Row(_IN_BATCH, Slid, None, (Do.RETURN_PASSED,), slide, note="its next blocks are taken when they are back"),
    Row(_IN_BATCH, Grown, None, (), grow, note="of a prompt: behind a window, or for its second token, in the step ahead"),
    Row(_SAMPLES, LastTokenSampled, S.FINISHING, (Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_GRACE), keep_last_token, in_another_step, "the step ahead writes into its blocks, and reads no rows"),
    Row(_SAMPLES, LastTokenSampled, S.FINISHED, (Do.EMIT_TOKENS, Do.REPORT_SPANS), keep_last_token, unless(in_another_step)),
    # It moves.
    Row(S.DECODING, MoveRequested, S.MOVING, (), keep_move, in_flight, "steps use the blocks (F6)"),
    Row(S.DECODING, MoveRequested, S.FINISHED, (Do.BEQUEATH, Do.REPORT_SPANS), keep_move, unless(in_flight)),
    Row(S.MOVING, TokenSampled, None, (Do.EMIT_TOKENS,), keep_token, in_another_step),
    Row(S.MOVING, TokenSampled, S.FINISHED, (Do.BEQUEATH, Do.REPORT_SPANS), keep_token, unless(in_another_step), "the token goes with its KV, as a first one"),
    Row(_STAYS, MoveRequested, None, (Do.REFUSE_MOVE,), note="it is computed again elsewhere"),
    Row(S.ARRIVED, KvInherited, S.TRANSFERRING, (Do.MOVE_KV,), inherit),
    # It gives way: what it computed is computed again; rows stay referenced, an offer stands.
    Row(_IN_BATCH, Preempted, None, when=in_flight, note="not while a step uses the blocks (F6)"),
    Row(_IN_BATCH, Preempted, S.PREEMPTED, (Do.ENQUEUE,), when=unless(in_flight)),
    # It fails.
    Row((S.WAITING_FOR_EMBEDDINGS, *_IN_QUEUE), EmbeddingFailed, S.FAILED, (Do.SEND_FAILURE,), keep_failure),
    Row((S.PREEMPTED, S.TRANSFERRING, S.WAITING_FOR_REMOTE_KV), KvFailed, S.FAILED, (Do.SEND_FAILURE,), keep_failure),
    Row(_PROMPT, (EmbeddingFailed, KvFailed), S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight, "KV: decode is lost, or refused early"),
    Row(_PROMPT, (EmbeddingFailed, KvFailed), S.FAILED, (Do.SEND_FAILURE,), keep_failure, unless(in_flight)),
    Row(_SAMPLES, StepFailed, S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE), fail_step, in_another_step, "the step ahead has it, too"),
    Row(_SAMPLES, StepFailed, S.FAILED, (Do.SEND_FAILURE,), fail_step, unless(in_another_step)),
    Row(_IN_QUEUE, PlanFailed, S.FAILED, (Do.SEND_FAILURE,), keep_failure, note="the others of the step go on"),
    Row(_IN_BATCH, PlanFailed, S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight),
    Row(_IN_BATCH, PlanFailed, S.FAILED, (Do.SEND_FAILURE,), keep_failure, unless(in_flight)),
    Row(S.WAITING_FOR_REMOTE_KV, PlanFailed, S.CALLED_OFF, (Do.SEND_FAILURE, Do.ARM_GRACE, Do.CANCEL_TRANSFER), keep_failure),
    # It is called off.
    Row((*_UNBEGUN, S.HELD), AbortReceived, S.FINISHED, (Do.SEND_ABORTED,), note="of HELD, somebody has come for it, or the gateway is gone"),
    Row(S.TRANSFERRING, AbortReceived, S.FINISHED, (Do.WITHDRAW_OFFER, Do.SEND_ABORTED), note="the transfer is told, and owns the blocks"),
    Row((*_IN_BATCH, S.MOVING), AbortReceived, S.ABORTING, (Do.SEND_ABORTED, Do.ARM_GRACE), when=in_flight, note="the step owns the blocks"),
    Row((*_IN_BATCH, S.MOVING), AbortReceived, S.FINISHED, (Do.SEND_ABORTED,), when=unless(in_flight)),
    Row(S.WAITING_FOR_REMOTE_KV, AbortReceived, S.CALLED_OFF, (Do.SEND_ABORTED, Do.ARM_GRACE, Do.CANCEL_TRANSFER)),
    # Its time is over.
    Row((*_UNBEGUN, S.TRANSFERRING), DeadlinePassed, S.FAILED, (Do.SEND_FAILURE,), note_late),
    Row(_PROMPT, DeadlinePassed, S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE), note_late, in_flight),
    Row(_PROMPT, DeadlinePassed, S.FAILED, (Do.SEND_FAILURE,), note_late, unless(in_flight)),
    Row((S.DECODING, S.MOVING), DeadlinePassed, S.FINISHING, (Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_GRACE), end_here, in_flight, "all that it has said is the answer"),
    Row((S.DECODING, S.MOVING), DeadlinePassed, S.FINISHED, (Do.EMIT_TOKENS, Do.REPORT_SPANS), end_here, unless(in_flight)),
    Row(S.WAITING_FOR_REMOTE_KV, DeadlinePassed, S.CALLED_OFF, (Do.SEND_FAILURE, Do.ARM_GRACE, Do.CANCEL_TRANSFER), note_late),
    # Over for the client: the outcome frees the memory.
    Row(_USED_BY_STEPS, StepReturned, None, (), end_step, in_another_step, "one more is under way"),
    Row(_USED_BY_STEPS, StepReturned, S.FINISHED, (), end_step, unless(in_another_step), "of FINISHING, computed once too often"),
    Row(S.CALLED_OFF, RemoteKvArrived, S.FINISHED, (), adopt_kv, note="the commit was faster"),
    Row(S.CALLED_OFF, KvFailed, S.FINISHED, note="the transfer returned the blocks, or fences them"),
    Row(_LINGERS, GraceEnded, None, (Do.REPORT_HANG, Do.ARM_GRACE), note="time frees nothing (F6)"),
    Row((*_LINGERS, *_ENDED), AbortReceived, None, (Do.SEND_ABORTED,), note="the confirmation was lost"),
    Row(_ENDED, Scheduled, None, (), keep_blocks, note="too late: given back"),
    Row(_ENDED, RemoteKvArrived, None, (), adopt_kv, note="too late: given back"),
)

IGNORES = (
    Ignore((S.HELD,), (EmbeddingReady, EmbeddingFailed, EmbeddingsPromised), "it was answered; its lease bounds it"),
    Ignore(_ENDED, (LeaseRevoked,), "it was let go"),
    Ignore((S.MOVING,), (MoveRequested,), "asked twice"),
    Ignore(_ENDED, (EmbeddingReady, EmbeddingFailed, KvDelivered, KvFailed, KvWithdrawn), "it has ended"),
    Ignore((*_IN_QUEUE, *_PROMPT, *_USED_BY_STEPS, *_ENDED), (EmbeddingsPromised,), "an image was here already"),
    Ignore((S.DECODING, S.MOVING, S.FINISHING), (KvFailed, KvWithdrawn, KvDelivered), "of an attempt that decodes here already"),
    Ignore((S.ABORTING,), (KvFailed, KvDelivered, LayersComputed), "it has ended for the client"),
    Ignore(_USED_BY_STEPS, (EmbeddingReady, EmbeddingFailed), "it has ended for the client"),
    Ignore((S.DECODING, S.MOVING, S.TRANSFERRING), (EmbeddingFailed, EmbeddingReady), "its prompt is computed: it needs rows no longer"),
)

_HELD: dict[State, str] = {
    **dict.fromkeys(_USED_BY_STEPS, "a step still uses the blocks; only its end frees them (F6)"),
    S.CALLED_OFF: "the transfer still uses the blocks; only its end frees them (F6)",
}
_TIMERS: Timers = {DeadlinePassed: (), GraceEnded: (Do.ARM_GRACE,), LeaseEnded: (Do.ARM_LEASE,)}
TABLE = Table("REQUEST", __doc__ or "", S, S.ARRIVED, _ENDED, ROWS, IGNORES, _HELD, _TIMERS)
# fmt: on


class Request(Context):
    """One attempt; `key` is `request_id/attempt`."""

    table = TABLE
    __slots__ = ()
