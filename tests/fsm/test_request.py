"""REQUEST: its blocks belong to somebody at every moment, whatever client and device do."""

from __future__ import annotations

import pytest

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event
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
    LastTokenSampled,
    LeaseEnded,
    LeaseRevoked,
    Preempted,
    PromptHeld,
    RemoteKvArrived,
    Request,
    S,
    Scheduled,
    Slid,
    StepFailed,
    StepLaunched,
    StepReturned,
    TextOnly,
    TokenSampled,
)
from epd.layouts import PASSED
from epd.messages import TokenLogprobs
from tests.fsm.paths import follow
from tests.fsm.tables import KV, launch, make_request

TOKEN = TokenLogprobs(9, 0.0)
FREE = (Do.DEQUEUE, Do.RELEASE_BLOCKS)
GIVES_WAY = (*FREE, Do.ENQUEUE)
GIVES_BACK = (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER)  # all but its blocks
LAST = LastTokenSampled(TOKEN, "stop")
LOST = KvFailed(Failure(FailureKind.LOST, "decode is gone"))


@pytest.mark.parametrize(
    ("end", "told"),
    [(LeaseEnded(), ()), (LeaseRevoked(), ()), (AbortReceived(), (Do.SEND_ABORTED,))],
)
def test_a_held_prompt_owns_its_blocks_until_one_of_its_ends(
    end: Event, told: tuple[Do, ...]
) -> None:
    """F43: RUNNING -> HELD -> FINISHED; its answer was given, so its deadline says nothing."""
    made = make_request(decode_here=True)
    made.fire(TextOnly())
    made.fire(Scheduled((3, 4)))
    answered = (*GIVES_BACK, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_LEASE)
    follow(
        made,
        (StepLaunched(3, False), S.RUNNING, ()),
        (PromptHeld(TOKEN, "length"), S.HELD, answered),
        (DeadlinePassed(), S.HELD, ()),
    )
    assert made.ended_for_client and made.block_table == (3, 4)
    let_go = (Do.END_LEASE, Do.RELEASE_BLOCKS, *told)
    follow(made, (end, S.FINISHED, let_go), (LeaseEnded(), S.FINISHED, ()))


def test_text_only_never_waits_for_images() -> None:
    """WAITING -> RUNNING -> DECODING -> FINISHED, all on one instance."""
    made = make_request(decode_here=True)
    started = (*GIVES_BACK[1:], Do.START_DECODING, Do.EMIT_TOKENS)
    follow(
        made,
        (TextOnly(), S.WAITING, (Do.ENQUEUE,)),
        (Scheduled((3, 4)), S.RUNNING, ()),
        (StepLaunched(2, False), S.RUNNING, ()),
        (StepLaunched(1, True), S.RUNNING, ()),
        (ChunkComputed(), S.RUNNING, (Do.PUSH_KV,)),
        (FirstTokenSampled(TOKEN), S.DECODING, started),
        (StepLaunched(1, False), S.DECODING, ()),
        (TokenSampled(TOKEN), S.DECODING, (Do.EMIT_TOKENS,)),
        (StepLaunched(1, False), S.DECODING, ()),
        (
            LastTokenSampled(TOKEN, "stop"),
            S.FINISHED,
            (*FREE, Do.EMIT_TOKENS, Do.REPORT_SPANS),
        ),
    )
    assert (made.num_computed, len(made.output), made.finish_reason) == (4, 3, "stop")


def test_images_are_waited_for_once_each() -> None:
    """F10: WAITING -> WAITING_FOR_EMBEDDINGS -> WAITING, and no message after the prompt's end."""
    made = make_request(min_early_tokens=2)
    follow(
        made,
        (EmbeddingsRequired(), S.WAITING_FOR_EMBEDDINGS, (Do.ACQUIRE_EMBEDDINGS,)),
        (EmbeddingReady("b"), S.WAITING_FOR_EMBEDDINGS, ()),
        (EmbeddingsPromised(), S.WAITING_FOR_EMBEDDINGS, ()),
        (EmbeddingReady("a"), S.WAITING, (Do.ENQUEUE,)),
        (EmbeddingsPromised(), S.WAITING, ()),
    )
    assert not made.missing


def test_a_prompt_waits_in_its_middle_and_keeps_its_blocks() -> None:
    """F10: WAITING_FOR_EMBEDDINGS -> ... -> RUNNING -> WAITING_MID_PROMPT -> RUNNING, each once."""
    made = make_request(decode_here=True)
    follow(
        made,
        (EmbeddingsRequired(), S.WAITING_FOR_EMBEDDINGS, (Do.ACQUIRE_EMBEDDINGS,)),
        (EmbeddingsPromised(), S.WAITING, (Do.ENQUEUE,)),
        (Scheduled((3, 4)), S.RUNNING, ()),
        (StepLaunched(1, False), S.RUNNING, ()),
        (ChunkComputed(), S.WAITING_MID_PROMPT, (Do.PUSH_KV,)),
        (EmbeddingReady("b"), S.WAITING_MID_PROMPT, ()),
        (EmbeddingReady("a"), S.RUNNING, (Do.EXTEND,)),
    )
    assert (made.block_table, made.num_computed, made.num_ready()) == ((3, 4), 1, None)


def test_a_load_that_overlaps_the_step_stops_nobody() -> None:
    """RUNNING -> RUNNING: the rows came while the chunk before them was computed."""
    made = make_request(decode_here=True, images=1)
    made.fire(EmbeddingsRequired())
    made.fire(EmbeddingsPromised())
    made.fire(Scheduled((3, 4)))
    follow(
        made,
        (StepLaunched(1, False), S.RUNNING, ()),
        (EmbeddingReady("a"), S.RUNNING, (Do.EXTEND,)),
        (ChunkComputed(), S.RUNNING, (Do.PUSH_KV,)),
    )


def test_cached_rows_are_not_waited_for() -> None:
    """The blocks that hold image a are here: only b is waited for."""
    made = make_request()
    made.fire(EmbeddingsRequired())
    made.fire(EmbeddingsPromised())
    made.fire(Scheduled((3, 4), num_cached=2))
    assert made.num_ready() == 2
    made.fire(Preempted())
    made.fire(Scheduled((5, 6)))
    assert made.num_ready() == 1  # they were forgotten meanwhile


@pytest.fixture
def parked() -> Request:
    made = make_request(images=1)
    for event in (EmbeddingsRequired(), EmbeddingsPromised(), Scheduled((3, 4))):
        made.fire(event)
    launch(made, 1).fire(ChunkComputed())
    assert made.state is S.WAITING_MID_PROMPT
    return made


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (EmbeddingFailed(Failure(FailureKind.MEDIA, "bad image")), Do.SEND_FAILURE),
        (DeadlinePassed(), Do.SEND_FAILURE),
        (AbortReceived(), Do.SEND_ABORTED),
    ],
)
def test_who_waits_in_its_middle_returns_everything(
    parked: Request, event: Event, told: Do
) -> None:
    """F43: WAITING_MID_PROMPT -> FAILED or FINISHED."""
    target = S.FINISHED if told is Do.SEND_ABORTED else S.FAILED
    follow(parked, (event, target, (*FREE, Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER, told)))


def test_who_waits_in_its_middle_gives_way(parked: Request) -> None:
    """F24: WAITING_MID_PROMPT -> PREEMPTED."""
    follow(parked, (Preempted(), S.PREEMPTED, GIVES_WAY))


def test_an_image_that_fails_fails_the_request() -> None:
    """F40: WAITING_FOR_EMBEDDINGS -> FAILED."""
    made = make_request()
    made.fire(EmbeddingsRequired())
    ends = (Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE)
    follow(made, (EmbeddingFailed(Failure(FailureKind.MEDIA, "bad image")), S.FAILED, ends))


def test_the_hand_over_gives_the_blocks_to_the_transfer(running: Request) -> None:
    """RUNNING -> TRANSFERRING -> FINISHED: no RELEASE_BLOCKS here."""
    follow(
        launch(running, 3),
        (
            FirstTokenSampled(TOKEN),
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


def test_its_deadline_ends_an_answer_with_all_that_it_has_said(decoding: Request) -> None:
    """DECODING -> FINISHED by length, not FAILED: its tokens are sent, were they few or many."""
    ends = (*FREE, Do.EMIT_TOKENS, Do.REPORT_SPANS)
    follow(decoding, (DeadlinePassed(), S.FINISHED, ends), (DeadlinePassed(), S.FINISHED, ()))
    assert decoding.finish_reason == "length"


def test_its_deadline_keeps_the_blocks_of_a_step(decoding: Request) -> None:
    """F6: DECODING -> FINISHING -> FINISHED; the token of that step is dropped."""
    launch(decoding, 1)
    ends = (Do.DEQUEUE, Do.EMIT_TOKENS, Do.REPORT_SPANS, Do.ARM_GRACE)
    follow(decoding, (DeadlinePassed(), S.FINISHING, ends))
    follow(decoding, (StepReturned(), S.FINISHED, (Do.RELEASE_BLOCKS,)))


@pytest.mark.parametrize(
    ("event", "told"), [(AbortReceived(), Do.SEND_ABORTED), (DeadlinePassed(), Do.SEND_FAILURE)]
)
def test_a_step_in_flight_keeps_the_blocks_until_it_returns(
    running: Request, event: AbortReceived, told: Do
) -> None:
    """F6, F43: RUNNING -> ABORTING -> ABORTING -> FINISHED."""
    launch(running, 1)
    follow(
        running,
        (event, S.ABORTING, (Do.DEQUEUE, Do.WITHDRAW_OFFER, told, Do.ARM_GRACE)),
        (GraceEnded(), S.ABORTING, (Do.REPORT_HANG, Do.ARM_GRACE)),
    )
    follow(running, (StepReturned(), S.FINISHED, (Do.RELEASE_BLOCKS, Do.RELEASE_EMBEDDINGS)))


def test_decode_is_aborted_in_flight(decoding: Request) -> None:
    """F43: DECODING -> ABORTING -> FINISHED."""
    launch(decoding, 1, 1)
    follow(decoding, (AbortReceived(), S.ABORTING, (Do.DEQUEUE, Do.SEND_ABORTED, Do.ARM_GRACE)))
    follow(decoding, (StepReturned(), S.ABORTING, ()))
    ends = (Do.RELEASE_BLOCKS, Do.RELEASE_EMBEDDINGS)
    follow(decoding, (StepReturned(), S.FINISHED, ends))


@pytest.mark.parametrize("outcome", [LAST, StepFailed(Failure(FailureKind.ENGINE, "not finite"))])
def test_the_step_ahead_keeps_blocks_of_who_has_ended(decoding: Request, outcome: Event) -> None:
    """F6: DECODING -> FINISHING or ABORTING -> FINISHED, and its client is told at once."""
    last = outcome is LAST
    told = (Do.EMIT_TOKENS, Do.REPORT_SPANS) if last else (Do.SEND_FAILURE,)
    lingers = S.FINISHING if last else S.ABORTING
    launch(decoding, 1, 1)
    follow(
        decoding,
        (outcome, lingers, (Do.DEQUEUE, *told, Do.ARM_GRACE)),
        (GraceEnded(), lingers, (Do.REPORT_HANG, Do.ARM_GRACE)),
        (AbortReceived(), lingers, (Do.SEND_ABORTED,)),
    )
    assert decoding.ended_for_client
    ends = (Do.RELEASE_BLOCKS,) if last else (Do.RELEASE_BLOCKS, Do.RELEASE_EMBEDDINGS)
    follow(decoding, (StepReturned(), S.FINISHED, ends))


def test_decode_lost_while_the_prompt_runs(running: Request) -> None:
    """F20: RUNNING -> FAILED, or ABORTING while a step uses the blocks."""
    launch(running, 1)
    follow(running, (LOST, S.ABORTING, (Do.DEQUEUE, Do.SEND_FAILURE, Do.ARM_GRACE)))
    ends = (Do.RELEASE_BLOCKS, Do.RELEASE_EMBEDDINGS)
    follow(running, (StepReturned(), S.FINISHED, ends))
    assert running.failure == LOST.failure


def test_who_fails_in_a_step_while_the_next_one_runs_has_a_reason(
    running: Request, decoding: Request
) -> None:
    """RUNNING or DECODING -> ABORTING: the step ahead still uses the blocks."""
    for request, offer in ((running, (Do.WITHDRAW_OFFER,)), (decoding, ())):
        launch(request, 1, 1)
        told = (Do.DEQUEUE, *offer, Do.SEND_FAILURE, Do.ARM_GRACE)
        follow(request, (StepFailed(Failure(FailureKind.ENGINE, "not finite")), S.ABORTING, told))
        assert request.failure == Failure(FailureKind.ENGINE, "not finite")


def test_preemption_gives_blocks_up_between_steps_only(running: Request) -> None:
    """RUNNING -> RUNNING (in a step) -> PREEMPTED -> RUNNING, with one offer in all."""
    launch(running, 2)
    follow(running, (Preempted(), S.RUNNING, ()))
    running.fire(ChunkComputed())
    follow(running, (Preempted(), S.PREEMPTED, GIVES_WAY))
    follow(running, (EmbeddingsPromised(), S.PREEMPTED, ()))  # of an image that was here already
    follow(running, (Scheduled((7,)), S.RUNNING, ()))
    assert (running.num_computed, running.block_table) == (0, (7,))


def test_blocks_behind_a_window_are_not_its_own(decoding: Request) -> None:
    """They go back once, and those for later places of its table with the rest."""
    decoding.fire(Grown((8, 9)))
    follow(decoding, (Slid({0: 3, 2: 8}), S.DECODING, (Do.RETURN_PASSED,)))
    assert decoding.block_table == (PASSED, 4, PASSED, 9)
    assert (decoding.num_passed, decoding.blocks) == (2, (4, 9))
    follow(decoding, (Preempted(), S.PREEMPTED, (Do.DEQUEUE, Do.RELEASE_BLOCKS, Do.ENQUEUE)))
    found = Scheduled((PASSED, 5, 6), 4, ahead=(7, 8))
    follow(decoding, (found, S.RUNNING, ()))
    assert (decoding.num_passed, decoding.blocks) == (1, (5, 6, 7, 8))
    decoding.fire(Grown((7, 3)))
    assert decoding.block_table == (PASSED, 5, 6, 7, 3)
    assert decoding.blocks == (5, 6, 7, 3, 8)


def test_decoding_grows_gives_way_and_goes_on(decoding: Request) -> None:
    """F24: DECODING -> PREEMPTED -> RUNNING -> DECODING: no token is said twice or lost."""
    decoding.fire(Grown((8,)))
    assert decoding.block_table == (3, 4, 8)
    launch(decoding, 1)
    follow(decoding, (Preempted(), S.DECODING, ()))
    decoding.fire(TokenSampled(TOKEN))
    again = (*GIVES_BACK[1:], Do.START_DECODING, Do.EMIT_TOKENS)
    follow(
        decoding,
        (Preempted(), S.PREEMPTED, GIVES_WAY),
        (Scheduled((7, 8, 9), num_cached=2), S.RUNNING, ()),
        (StepLaunched(3, False), S.RUNNING, ()),
        (FirstTokenSampled(TOKEN), S.DECODING, again),
    )
    assert decoding.tokens(2, 6) == [3, 9, 9, 9]
    assert (decoding.num_computed, decoding.num_tokens) == (5, 6)


def test_a_preempted_request_can_lose_its_decode_instance(running: Request) -> None:
    """PREEMPTED -> FAILED."""
    running.fire(Preempted())
    ends = (Do.DEQUEUE, Do.RELEASE_EMBEDDINGS, Do.SEND_FAILURE)
    follow(running, (LOST, S.FAILED, ends))


def test_remote_kv_brings_the_first_token_and_the_delta(waiting_for_kv: Request) -> None:
    """F26: WAITING_FOR_REMOTE_KV -> DECODING."""
    arrived = RemoteKvArrived((3, 4), KV)
    follow(waiting_for_kv, (arrived, S.DECODING, (Do.START_DECODING, Do.EMIT_TOKENS)))
    assert waiting_for_kv.rope_delta == KV.rope_delta
    assert waiting_for_kv.num_cached == KV.num_cached
    assert waiting_for_kv.num_computed == KV.num_tokens
    assert waiting_for_kv.output == [KV.first_token]
    assert waiting_for_kv.blocks == waiting_for_kv.block_table == (3, 4)


def test_remote_kv_of_a_window_comes_for_what_is_seen(waiting_for_kv: Request) -> None:
    """The other places are passed, and blocks may be its own for later ones."""
    arrived = RemoteKvArrived((PASSED, 3, PASSED, 4), KV, ahead=(5, 6))
    follow(waiting_for_kv, (arrived, S.DECODING, (Do.START_DECODING, Do.EMIT_TOKENS)))
    assert (waiting_for_kv.num_passed, waiting_for_kv.blocks) == (2, (3, 4, 5, 6))
    waiting_for_kv.fire(Grown((5,)))
    assert (waiting_for_kv.block_table[-2:], waiting_for_kv.blocks_ahead) == ((4, 5), (6,))


@pytest.mark.parametrize(
    ("outcome", "effects"),
    [(RemoteKvArrived((3, 4), KV), (Do.RELEASE_BLOCKS,)), (LOST, ())],
    ids=["the commit was faster", "the transfer keeps its blocks"],
)
def test_an_abort_waits_for_the_transfer_of_kv(
    waiting_for_kv: Request, outcome: RemoteKvArrived, effects: tuple[Do, ...]
) -> None:
    """F6: WAITING_FOR_REMOTE_KV -> CALLED_OFF -> FINISHED."""
    ends = (Do.SEND_ABORTED, Do.ARM_GRACE, Do.CANCEL_TRANSFER)
    follow(
        waiting_for_kv,
        (AbortReceived(), S.CALLED_OFF, ends),
        (outcome, S.FINISHED, effects),
    )
