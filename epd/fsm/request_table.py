"""The rows of REQUEST; theory, states, events, guards and actions are in `epd.fsm.request`."""

from epd.fsm import request
from epd.fsm.kernel import Ignore, Row, State, Table, unless
from epd.fsm.request import (
    AbortReceived,
    ChunkComputed,
    DeadlinePassed,
    Do,
    EmbeddingFailed,
    EmbeddingReady,
    EmbeddingsPromised,
    EmbeddingsRequired,
    FirstTokenSampled,
    GraceEnded,
    Grown,
    KvDelivered,
    KvFailed,
    KvOffered,
    KvWithdrawn,
    LastTokenSampled,
    LayersComputed,
    LeaseEnded,
    LeaseRevoked,
    Preempted,
    PromptHeld,
    RemoteKvArrived,
    Request,
    S,
    Scheduled,
    StepFailed,
    StepReturned,
    TextOnly,
    TokenSampled,
)
from epd.fsm.request_parts import (
    adopt_kv,
    count_chunk,
    decode_here,
    end_here,
    goes_on,
    grow,
    in_flight,
    keep_blocks,
    keep_failure,
    keep_first_token,
    keep_last_token,
    keep_rows,
    keep_token,
    may_begin,
    note_late,
    reaches_missing,
)

_ENDED = (S.FINISHED, S.FAILED)
_END = (Do.SEND_ABORTED,)
_RUN = (Do.DEQUEUE, Do.RELEASE_BLOCKS)
_LET_GO = (Do.END_LEASE, Do.RELEASE_BLOCKS)
_GIVE_WAY = (*_RUN, Do.ENQUEUE)
_LINGERS = (S.ABORTING, S.FINISHING)

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
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingsPromised, S.WAITING, (Do.ENQUEUE,), when=may_begin, note="there is text before its pictures"),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingsPromised, None, when=unless(may_begin)),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingReady, S.WAITING, (Do.ENQUEUE,), keep_rows, may_begin),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingReady, None, (), keep_rows, unless(may_begin)),
    Row(S.WAITING_FOR_EMBEDDINGS, EmbeddingFailed, S.FAILED, (Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure),
    Row(S.WAITING_FOR_EMBEDDINGS, AbortReceived, S.FINISHED, (Do.RELEASE_EMBEDDINGS, *_END)),
    Row(S.WAITING_FOR_EMBEDDINGS, DeadlinePassed, S.FAILED, (Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), note_late),
    Row((S.WAITING, S.PREEMPTED), EmbeddingReady, None, (Do.EXTEND,), keep_rows),
    Row(S.WAITING, EmbeddingFailed, S.FAILED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure),
    Row(S.PREEMPTED, EmbeddingFailed, S.FAILED, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), keep_failure),
    # Prompt.
    Row(S.RUNNING, ChunkComputed, S.WAITING_MID_PROMPT, (Do.PUSH_KV,), count_chunk, reaches_missing, "others pass it"),
    Row(S.RUNNING, ChunkComputed, None, (Do.PUSH_KV,), count_chunk, unless(reaches_missing)),
    Row(S.RUNNING, LayersComputed, None, (Do.PUSH_KV,), note="of its last chunk"),
    Row(S.RUNNING, EmbeddingReady, None, (Do.EXTEND,), keep_rows, note="its load overlapped the steps before it"),
    Row(S.RUNNING, EmbeddingFailed, S.ABORTING, (Do.DEQUEUE, Do.WITHDRAW_OFFER, Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight),
    Row(S.RUNNING, EmbeddingFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), keep_failure, unless(in_flight)),
    Row(S.WAITING_MID_PROMPT, EmbeddingReady, S.RUNNING, (Do.EXTEND,), keep_rows, goes_on, "its blocks are as they were (F10)"),
    Row(S.WAITING_MID_PROMPT, EmbeddingReady, None, (), keep_rows, unless(goes_on), "a later picture"),
    Row(S.WAITING_MID_PROMPT, EmbeddingFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), keep_failure),
    Row(S.WAITING_MID_PROMPT, KvFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure, note="decode lost or refused early"),
    Row(S.WAITING_MID_PROMPT, AbortReceived, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, *_END)),
    Row(S.WAITING_MID_PROMPT, DeadlinePassed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), note_late),
    Row(S.WAITING_MID_PROMPT, Preempted, S.PREEMPTED, _GIVE_WAY, note="an older request needs the blocks that wait"),
    Row(S.RUNNING, FirstTokenSampled, S.DECODING, (Do.RELEASE_EMBEDDINGS, Do.START_DECODING, Do.EMIT_TOKENS), keep_first_token, decode_here, "a reference, no copy"),
    Row(S.RUNNING, FirstTokenSampled, S.TRANSFERRING, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.HAND_OVER_KV), keep_first_token, unless(decode_here)),
    Row(S.RUNNING, LastTokenSampled, S.FINISHING, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_GRACE), keep_last_token, in_flight, "the step ahead decodes it: it writes into its blocks and reads no rows"),
    Row(S.RUNNING, LastTokenSampled, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.WITHDRAW_OFFER), keep_last_token, unless(in_flight)),
    Row(S.RUNNING, Grown, None, (), grow, note="for its second token, in the step ahead"),
    Row(S.RUNNING, PromptHeld, S.HELD, (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_LEASE), keep_last_token, note="another request goes on with it"),
    Row(S.HELD, LeaseEnded, S.FINISHED, _LET_GO, note="nobody else uses the blocks, so time may end it"),
    Row(S.HELD, LeaseRevoked, S.FINISHED, _LET_GO),
    Row(S.HELD, AbortReceived, S.FINISHED, (*_LET_GO, *_END), note="somebody has come for it, or the gateway is gone"),
    Row(S.RUNNING, StepFailed, S.ABORTING, (Do.DEQUEUE, Do.WITHDRAW_OFFER, Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight, "its next chunk runs already"),
    Row(S.RUNNING, StepFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), keep_failure, unless(in_flight)),
    Row(S.RUNNING, KvFailed, S.ABORTING, (Do.DEQUEUE, Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight, "decode lost or refused early"),
    Row(S.RUNNING, KvFailed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE), keep_failure, unless(in_flight)),
    Row(S.RUNNING, AbortReceived, S.ABORTING, (Do.DEQUEUE, Do.WITHDRAW_OFFER, *_END, Do.ARM_GRACE), when=in_flight, note="the step owns the blocks"),
    Row(S.RUNNING, AbortReceived, S.FINISHED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, *_END), when=unless(in_flight)),
    Row(S.RUNNING, DeadlinePassed, S.ABORTING, (Do.DEQUEUE, Do.WITHDRAW_OFFER, Do.SEND_FAILURE, Do.ARM_GRACE), note_late, in_flight),
    Row(S.RUNNING, DeadlinePassed, S.FAILED, (*_RUN, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_FAILURE), note_late, unless(in_flight)),
    Row(S.RUNNING, Preempted, None, when=in_flight, note="not while a step uses the blocks (F6)"),
    Row(S.RUNNING, Preempted, S.PREEMPTED, _GIVE_WAY, when=unless(in_flight), note="recompute; rows stay referenced, the offer stands"),
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
    Row(S.DECODING, Grown, None, (), grow),
    Row(S.DECODING, Preempted, None, when=in_flight, note="not while a step uses the blocks (F6)"),
    Row(S.DECODING, Preempted, S.PREEMPTED, _GIVE_WAY, when=unless(in_flight), note="recompute the prompt and what was generated"),
    Row(S.DECODING, LastTokenSampled, S.FINISHING, (Do.DEQUEUE, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_GRACE), keep_last_token, in_flight, "the step ahead writes into its blocks"),
    Row(S.DECODING, LastTokenSampled, S.FINISHED, (*_RUN, Do.EMIT_TOKENS, Do.REPORT_SPANS), keep_last_token, unless(in_flight)),
    Row(S.DECODING, StepFailed, S.ABORTING, (Do.DEQUEUE, Do.SEND_FAILURE, Do.ARM_GRACE), keep_failure, in_flight, "the step ahead has it, too"),
    Row(S.DECODING, StepFailed, S.FAILED, (*_RUN, Do.SEND_FAILURE), keep_failure, unless(in_flight)),
    Row(S.DECODING, AbortReceived, S.ABORTING, (Do.DEQUEUE, *_END, Do.ARM_GRACE), when=in_flight, note="the step owns the blocks"),
    Row(S.DECODING, AbortReceived, S.FINISHED, (*_RUN, *_END), when=unless(in_flight)),
    Row(S.DECODING, DeadlinePassed, S.FINISHING, (Do.DEQUEUE, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_GRACE), end_here, in_flight, "all that it has said is the answer"),
    Row(S.DECODING, DeadlinePassed, S.FINISHED, (*_RUN, Do.EMIT_TOKENS, Do.REPORT_SPANS), end_here, unless(in_flight)),
    # Over for the client: the outcome frees the memory.
    Row(_LINGERS, StepReturned, None, when=in_flight, note="one more is under way"),
    Row(S.FINISHING, StepReturned, S.FINISHED, (Do.RELEASE_BLOCKS,), when=unless(in_flight), note="computed once too often"),
    Row(S.ABORTING, StepReturned, S.FINISHED, (Do.RELEASE_BLOCKS, Do.RELEASE_EMBEDDINGS), when=unless(in_flight)),
    Row(S.ABORTING, RemoteKvArrived, S.FINISHED, (Do.RELEASE_BLOCKS,), adopt_kv, note="the commit was faster"),
    Row(S.ABORTING, KvFailed, None, when=in_flight, note="the step is still to return"),
    Row(S.ABORTING, KvFailed, S.FINISHED, when=unless(in_flight), note="the transfer returned the blocks, or fences them"),
    Row(S.ABORTING, KvWithdrawn, S.FINISHED),
    Row(_LINGERS, GraceEnded, None, (Do.REPORT_HANG, Do.ARM_GRACE), note="time frees nothing (F6)"),
    Row((*_LINGERS, *_ENDED), AbortReceived, None, _END, note="the confirmation was lost"),
)

IGNORES = (
    Ignore((S.HELD,), (EmbeddingReady, EmbeddingFailed, EmbeddingsPromised, StepReturned, DeadlinePassed), "it was answered; its lease bounds it"),
    Ignore(_ENDED, (LeaseEnded, LeaseRevoked), "it was let go"),
    Ignore(_ENDED, (EmbeddingReady, EmbeddingFailed, Scheduled, RemoteKvArrived, KvDelivered, KvFailed, KvWithdrawn, StepReturned, DeadlinePassed, GraceEnded), "it has ended"),
    Ignore((S.WAITING_FOR_REMOTE_KV, S.TRANSFERRING, S.WAITING, S.WAITING_FOR_EMBEDDINGS, S.PREEMPTED, S.RUNNING, S.WAITING_MID_PROMPT, S.DECODING), (StepReturned,), "nothing waits for the step's end"),
    Ignore((S.WAITING, S.RUNNING, S.WAITING_MID_PROMPT, S.PREEMPTED, *_LINGERS, *_ENDED), (EmbeddingsPromised,), "a picture was here already"),
    Ignore((S.DECODING, S.FINISHING), (KvFailed, KvWithdrawn, KvDelivered), "of an attempt that decodes here already"),
    Ignore((S.ABORTING,), (KvDelivered, LayersComputed), "it has ended for the client"),
    Ignore(_LINGERS, (DeadlinePassed, EmbeddingReady, EmbeddingFailed), "it has ended for the client"),
    Ignore((S.DECODING, S.TRANSFERRING), (EmbeddingFailed, EmbeddingReady), "its prompt is computed: it needs rows no longer"),
)

_HELD: dict[State, str] = dict.fromkeys(_LINGERS, "a step or a transfer still uses the blocks; only its end frees them (F6)")
TABLE = Table("REQUEST", request.__doc__ or "", S, S.WAITING, _ENDED, ROWS, IGNORES, _HELD)
Request.table = TABLE
