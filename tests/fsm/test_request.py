"""REQUEST: its blocks belong to somebody at every moment, whatever client and device do."""

from __future__ import annotations

import pytest

from epd.fsm.request import (
    AbortReceived,
    ChunkComputed,
    DeadlinePassed,
    Do,
    EmbeddingFailed,
    EmbeddingReady,
    EmbeddingsRequired,
    FirstTokenSampled,
    GraceEnded,
    KvDelivered,
    KvFailed,
    KvOffered,
    LastTokenSampled,
    Preempted,
    RemoteKvArrived,
    Request,
    S,
    Scheduled,
    StepReturned,
    TextOnly,
    TokenSampled,
)
from epd.messages import TokenLogprobs
from tests.fsm.paths import follow
from tests.fsm.tables import KV, make_request

TOKEN = TokenLogprobs(9, 0.0)
FREE = (Do.DEQUEUE, Do.RELEASE_BLOCKS)
LOST = KvFailed("lost", "decode is gone", True)


@pytest.fixture
def running() -> Request:
    """Offered to another decode instance, no step in flight."""
    made = make_request()
    made.fire(TextOnly())
    assert made.fire(Scheduled((3, 4))) == (Do.OFFER_KV,)
    return made


@pytest.fixture
def decoding() -> Request:
    made = make_request()
    made.decode_here = True
    made.fire(TextOnly())
    made.fire(Scheduled((3, 4)))
    made.fire(FirstTokenSampled(3, TOKEN))
    return made


def test_text_only_never_waits_for_pictures() -> None:
    """WAITING -> RUNNING -> DECODING -> FINISHED, all on one instance."""
    made = make_request()
    made.decode_here = True
    started = (Do.RELEASE_EMBEDDINGS, Do.START_DECODING, Do.EMIT_TOKENS)
    follow(
        made,
        (TextOnly(), S.WAITING, (Do.ENQUEUE,)),
        (Scheduled((3, 4)), S.RUNNING, ()),
        (ChunkComputed(2), S.RUNNING, ()),
        (FirstTokenSampled(1, TOKEN), S.DECODING, started),
        (TokenSampled(TOKEN), S.DECODING, (Do.EMIT_TOKENS,)),
        (
            LastTokenSampled(TOKEN, "stop"),
            S.FINISHED,
            (*FREE, Do.EMIT_TOKENS, Do.REPORT_SPANS),
        ),
    )
    assert (made.num_computed, len(made.output), made.finish_reason) == (4, 3, "stop")


def test_pictures_are_waited_for_once_each() -> None:
    """F10: WAITING -> WAITING_FOR_EMBEDDINGS -> WAITING_FOR_EMBEDDINGS -> WAITING."""
    made = make_request()
    made.missing = {"a", "b"}
    follow(
        made,
        (EmbeddingsRequired(), S.WAITING_FOR_EMBEDDINGS, (Do.ACQUIRE_EMBEDDINGS,)),
        (EmbeddingReady("a", "rows a"), S.WAITING_FOR_EMBEDDINGS, ()),
        (EmbeddingReady("b", "rows b"), S.WAITING, (Do.ENQUEUE,)),
        (EmbeddingReady("b", "again"), S.WAITING, ()),
    )
    assert made.rows == {"a": "rows a", "b": "rows b"}


def test_a_picture_that_fails_fails_the_request() -> None:
    """F40: WAITING_FOR_EMBEDDINGS -> FAILED."""
    made = make_request()
    made.fire(EmbeddingsRequired())
    ends = (Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE)
    follow(made, (EmbeddingFailed("media", "bad picture", False), S.FAILED, ends))


def test_the_hand_over_gives_the_blocks_to_the_transfer(running: Request) -> None:
    """RUNNING -> TRANSFERRING -> FINISHED: no RELEASE_BLOCKS here."""
    follow(
        running,
        (
            FirstTokenSampled(3, TOKEN),
            S.TRANSFERRING,
            (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.HAND_OVER_KV),
        ),
        (KvDelivered(), S.FINISHED, (Do.REPORT_SPANS,)),
    )


def test_an_abort_between_steps_frees_at_once(running: Request) -> None:
    """F43: RUNNING -> FINISHED."""
    ends = (*FREE, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, Do.SEND_ABORTED)
    follow(
        running,
        (AbortReceived(), S.FINISHED, ends),
        (AbortReceived(), S.FINISHED, (Do.SEND_ABORTED,)),
    )


@pytest.mark.parametrize(
    ("event", "told"), [(AbortReceived(), Do.SEND_ABORTED), (DeadlinePassed(), Do.SEND_FAILURE)]
)
def test_a_step_in_flight_keeps_the_blocks_until_it_returns(
    running: Request, event: AbortReceived, told: Do
) -> None:
    """F6, F43: RUNNING -> ABORTING -> ABORTING -> FINISHED."""
    running.in_flight = True
    follow(
        running,
        (event, S.ABORTING, (Do.WITHDRAW_OFFER, told, Do.ARM_GRACE)),
        (GraceEnded(), S.ABORTING, (Do.REPORT_HANG, Do.ARM_GRACE)),
    )
    running.in_flight = False
    follow(running, (StepReturned(), S.FINISHED, (*FREE, Do.RELEASE_EMBEDDINGS)))


def test_decode_is_aborted_in_flight(decoding: Request) -> None:
    """F43: DECODING -> ABORTING -> FINISHED."""
    decoding.in_flight = True
    follow(
        decoding,
        (AbortReceived(), S.ABORTING, (Do.SEND_ABORTED, Do.ARM_GRACE)),
        (StepReturned(), S.FINISHED, (*FREE, Do.RELEASE_EMBEDDINGS)),
    )


def test_decode_lost_while_the_prompt_runs(running: Request) -> None:
    """F20: RUNNING -> FAILED, or ABORTING while a step uses the blocks."""
    running.in_flight = True
    follow(
        running,
        (LOST, S.ABORTING, (Do.SEND_FAILURE, Do.ARM_GRACE)),
        (StepReturned(), S.FINISHED, (*FREE, Do.RELEASE_EMBEDDINGS)),
    )
    assert running.failure == ("lost", "decode is gone", True)


def test_preemption_gives_blocks_up_between_steps_only(running: Request) -> None:
    """RUNNING -> RUNNING (in a step) -> PREEMPTED -> RUNNING, with one offer in all."""
    running.fire(ChunkComputed(2))
    running.in_flight = True
    follow(running, (Preempted(), S.RUNNING, ()))
    running.in_flight = False
    follow(running, (Preempted(), S.PREEMPTED, FREE), (Scheduled((7,)), S.RUNNING, ()))
    assert (running.num_computed, running.block_table) == (0, (7,))


def test_a_preempted_request_can_lose_its_decode_instance(running: Request) -> None:
    """PREEMPTED -> FAILED."""
    running.fire(Preempted())
    ends = (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE)
    follow(running, (LOST, S.FAILED, ends))


@pytest.fixture
def waiting_for_kv() -> Request:
    made = make_request()
    made.decode_here = True
    assert made.fire(KvOffered()) == (Do.RESERVE_BLOCKS,)
    return made


def test_remote_kv_brings_the_first_token_and_the_delta(waiting_for_kv: Request) -> None:
    """F26: WAITING_FOR_REMOTE_KV -> DECODING."""
    arrived = RemoteKvArrived((3, 4), KV)
    follow(waiting_for_kv, (arrived, S.DECODING, (Do.START_DECODING, Do.EMIT_TOKENS)))
    assert waiting_for_kv.rope_delta == KV.rope_delta
    assert waiting_for_kv.num_computed == KV.num_tokens
    assert waiting_for_kv.output == [KV.first_token]


@pytest.mark.parametrize(
    ("outcome", "effects"),
    [(RemoteKvArrived((3, 4), KV), (Do.RELEASE_BLOCKS,)), (LOST, ())],
    ids=["the commit was faster", "the transfer keeps its blocks"],
)
def test_an_abort_waits_for_the_transfer_of_kv(
    waiting_for_kv: Request, outcome: RemoteKvArrived, effects: tuple[Do, ...]
) -> None:
    """F6: WAITING_FOR_REMOTE_KV -> ABORTING -> FINISHED; the timer is armed first."""
    ends = (Do.ARM_GRACE, Do.SEND_ABORTED, Do.CANCEL_TRANSFER)
    follow(
        waiting_for_kv,
        (AbortReceived(), S.ABORTING, ends),
        (outcome, S.FINISHED, effects),
    )
