"""GENERATION: one terminal answer over all attempts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from epd.failure import Failure, FailureKind
from epd.fsm import generation as g
from epd.fsm.generation import Do, S
from tests.fsm.paths import follow
from tests.fsm.tables import PEER, PLACEMENT, make_generation

TELL = (Do.CLOSE, Do.ANSWER_ERROR, Do.LOG_FAILURE)
WAIT = (Do.AWAIT_TOPOLOGY, Do.ARM_TOPOLOGY)
FAIL = (Do.ABORT_ATTEMPT, *TELL)
SEND = (Do.ARM_ATTEMPT, Do.DISPATCH)
PROMPT: Any = "a prompt"
ATTEMPTED = (S.PLACED, S.STREAMING, S.MIGRATING)


def tokens(*ids: int, finish: str = "", attempt: int = 1) -> SimpleNamespace:
    return SimpleNamespace(attempt=attempt, token_ids=ids, finish_reason=finish)


SAYS = (Do.DELIVER, Do.ARM_ATTEMPT, Do.ARM_PATIENCE)
CUT = (Do.ABORT_ATTEMPT, Do.CLOSE, Do.DELIVER_CUT)
LATE = g.TokenTimedOut("no further token came within 60 s")


@pytest.fixture
def placed() -> g.Generation:
    made = make_generation()
    made.fire(g.Admitted())
    made.fire(g.Prepared(PROMPT))
    made.fire(g.Placed(PLACEMENT))
    return made


def test_an_answer(placed: g.Generation) -> None:
    """PLACED -> STREAMING -> FINISHED; what comes later changes nothing."""
    follow(
        placed,
        (g.Accepted(), S.PLACED, (Do.ARM_ATTEMPT,)),
        (g.TokensArrived(tokens(1, 2)), S.STREAMING, SAYS),
        (g.Accepted(), S.STREAMING, (Do.ARM_ATTEMPT,)),  # preempted, and still there
        (g.FinalTokensArrived(tokens(3, finish="stop")), S.FINISHED, (Do.CLOSE, Do.DELIVER_FINAL)),
        (g.AttemptFailed(Failure(FailureKind.LOST, "gone")), S.FINISHED, ()),
        (g.DeadlinePassed(), S.FINISHED, ()),
    )
    assert (placed.token_ids, placed.finish_reason) == ([1, 2, 3], "stop")


def test_an_image_that_moves_is_no_attempt(placed: g.Generation) -> None:
    """F59: PLACED -> PLACED, and where it is says so."""
    placement: Any = "with another encoder"
    moved = g.ImageMoved(0, PEER, placement)
    follow(placed, (moved, S.PLACED, (Do.MOVE_IMAGE,)))
    hedged = g.ImageHedged(0, PEER, placement)
    follow(placed, (hedged, S.PLACED, (Do.HEDGE_IMAGE,)))
    assert (placed.placed, placed.attempt) == (placement, 1)


def test_what_moves_with_its_kv_streams_on_until_its_next_attempt_does(
    placed: g.Generation,
) -> None:
    """STREAMING -> PLACED, with its attempt: nothing is called off, and tokens of both count."""
    placement: Any = PLACEMENT
    follow(
        placed,
        (g.AttemptMoved(placement), S.PLACED, ()),  # it has no KV yet
        (g.TokensArrived(tokens(1, 2)), S.STREAMING, SAYS),
        (g.AttemptMoved(placement), S.PLACED, (Do.ARM_ATTEMPT, Do.HAND_OVER)),
    )
    assert (placed.attempt, placed.former, placed.resumes) == (2, 1, True)
    follow(placed, (g.TokensArrived(tokens(3)), S.STREAMING, SAYS))
    assert placed.resumes and placed.reads(1) and placed.reads(2)
    follow(placed, (g.TokensArrived(tokens(4, attempt=2)), S.STREAMING, SAYS))
    assert not placed.resumes and not placed.reads(1)
    assert (placed.token_ids, placed.token_ids_of_attempt) == ([1, 2, 3, 4], 1)


def test_a_full_gateway_refuses_at_once() -> None:
    """F39: RECEIVED -> REJECTED."""
    follow(make_generation(), (g.Refused("full"), S.REJECTED, ()))


@pytest.mark.parametrize(
    "failure",
    [
        g.AttemptFailed(Failure(FailureKind.LOST, "gone")),
        g.AttemptTimedOut("silent"),
        g.TokensMissed("hole"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_a_lost_attempt_migrates_with_its_tokens_until_attempts_run_out(
    placed: g.Generation, failure: g.AttemptFailed
) -> None:
    """F20: STREAMING -> MIGRATING -> PLACED -> FAILED; tokens that were sent are kept."""
    placed.fire(g.TokensArrived(tokens(1, 2)))
    follow(
        placed,
        (failure, S.MIGRATING, (Do.ABORT_ATTEMPT, Do.PLACE)),
        (failure, S.MIGRATING, ()),
        (g.Placed(PLACEMENT), S.PLACED, SEND),
        (failure, S.FAILED, FAIL),
    )
    assert (placed.attempt, placed.placement, placed.token_ids) == (2, PLACEMENT, [1, 2])


def test_failures_of_different_kinds_do_not_add_up(placed: g.Generation) -> None:
    """PLACED -> MIGRATING: one of two attempts may fail in each way (swarm 71480)."""
    kinds = (FailureKind.LOST, FailureKind.TRANSFER)
    lost, in_doubt = (g.AttemptFailed(Failure(kind, "because")) for kind in kinds)
    follow(
        placed,
        (in_doubt, S.MIGRATING, (Do.ABORT_ATTEMPT, Do.PLACE)),
        (g.Placed(PLACEMENT), S.PLACED, SEND),
        (lost, S.MIGRATING, (Do.ABORT_ATTEMPT, Do.PLACE)),
        (g.Placed(PLACEMENT), S.PLACED, SEND),
        (in_doubt, S.FAILED, FAIL),
    )


def test_what_nobody_else_can_do_better_fails_at_once(placed: g.Generation) -> None:
    """F40: PLACED -> FAILED with the reason."""
    drift = Failure(FailureKind.CONTRACT, "layouts differ")
    follow(placed, (g.AttemptFailed(drift), S.FAILED, FAIL))
    assert placed.failure == drift


def test_a_mistake_that_an_instance_finds_is_a_refusal(placed: g.Generation) -> None:
    """PLACED -> REJECTED with the reason: it is answered, and no failure of ours."""
    told = (Do.ABORT_ATTEMPT, Do.CLOSE, Do.ANSWER_ERROR)
    follow(placed, (g.AttemptRefused(Failure(FailureKind.MEDIA, "bad image")), S.REJECTED, told))
    assert placed.failure == Failure(FailureKind.MEDIA, "bad image")


OUTCOMES = [
    (g.CancelRequested("the client left"), S.CANCELLED, ()),
    (g.Refused("another choice was wrong"), S.REJECTED, ()),
    (g.Abandoned("a bug"), S.FAILED, (Do.LOG_FAILURE,)),
]


@pytest.mark.parametrize(("said", "state", "effects"), OUTCOMES, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("before", [S.PREPARING, S.MIGRATING])
def test_who_leaves_while_it_has_no_instances(
    before: S, said: g.Event, state: S, effects: tuple[Do, ...]
) -> None:
    """PREPARING and MIGRATING -> what an operator counts it as."""
    made = make_generation()
    made._state = before
    follow(made, (said, state, (Do.CLOSE, *effects)))


@pytest.mark.parametrize(("said", "state", "effects"), OUTCOMES[1:], ids=str)
def test_an_api_that_has_answered_calls_off_the_attempt(
    placed: g.Generation, said: g.Event, state: S, effects: tuple[Do, ...]
) -> None:
    """PLACED -> REJECTED or FAILED, with no second answer."""
    follow(placed, (said, state, (Do.ABORT_ATTEMPT, Do.CLOSE, *effects)))


def test_an_answer_that_a_stop_string_ended_is_finished(placed: g.Generation) -> None:
    """STREAMING -> STOPPING -> FINISHED."""
    placed.fire(g.TokensArrived(tokens(1)))
    follow(
        placed,
        (g.StopRequested("stop string"), S.STOPPING, (Do.ABORT_ATTEMPT, Do.ARM_ABORT)),
        (g.TokensArrived(tokens(2)), S.STOPPING, ()),
        (g.AbortConfirmed("peer"), S.FINISHED, (Do.CLOSE,)),
    )


def test_who_is_away_uses_up_no_attempts(placed: g.Generation) -> None:
    """PLACED -> MIGRATING -> PLACED, until who was asked is back."""
    away = g.AttemptFailed(Failure(FailureKind.AWAY, "e0 is draining"))
    for _ in range(3 * placed.max_attempts):
        follow(placed, (away, S.MIGRATING, (Do.ABORT_ATTEMPT, Do.PLACE)))
        placed.fire(g.Placed(placed.placement))
    assert not any(placed.failures.values())


def test_a_deadline_says_what_had_failed_before(placed: g.Generation) -> None:
    """MIGRATING -> FAILED: while it waited for its next attempt, time ran out."""
    placed.fire(g.AttemptFailed(Failure(FailureKind.AWAY, "d0 is draining")))
    follow(placed, (g.DeadlinePassed(), S.FAILED, TELL))
    assert placed.failure is not None and placed.failure.kind is FailureKind.DEADLINE
    assert placed.cause == "d0 is draining"


def test_with_nobody_left_the_error_says_why(placed: g.Generation) -> None:
    """MIGRATING -> AWAITING_TOPOLOGY, for a while -> FAILED."""
    placed.fire(g.AttemptFailed(Failure(FailureKind.LOST, "p0 is gone")))
    follow(
        placed,
        (g.NoTopology("no decode"), S.AWAITING_TOPOLOGY, WAIT),
        (g.NoTopology("no prefill"), S.AWAITING_TOPOLOGY, (Do.AWAIT_TOPOLOGY,)),
        (g.PlacementTimedOut(), S.FAILED, TELL),
    )
    assert placed.failure == Failure(FailureKind.UNAVAILABLE, "no prefill")
    assert placed.cause == "p0 is gone"


@pytest.mark.parametrize(
    ("then", "state", "effects"),
    [
        (g.Placed(PLACEMENT), S.PLACED, SEND),
        (g.PlacementTimedOut(), S.FAILED, TELL),
        (g.TopologyUnknown("no prefill"), S.FAILED, TELL),
    ],
    ids=["somebody joins", "nobody joins", "nobody ever will"],
)
def test_a_new_gateway_waits_for_its_instances(
    then: g.Event, state: g.S, effects: tuple[g.Do, ...]
) -> None:
    """F17: QUEUED -> AWAITING_TOPOLOGY, for a while -> PLACED or FAILED."""
    made = make_generation()
    follow(
        made,
        (g.Admitted(), S.PREPARING, (Do.ARM_DEADLINE, Do.ARM_PATIENCE)),
        (g.Prepared(PROMPT), S.QUEUED, (Do.QUEUE,)),
        (g.TurnCame(), S.QUEUED, (Do.CHOOSE,)),
        (g.NoTopology("no prefill"), S.AWAITING_TOPOLOGY, (Do.LEAVE_QUEUE, *WAIT)),
        (g.NoTopology("no prefill"), S.AWAITING_TOPOLOGY, (Do.AWAIT_TOPOLOGY,)),
        (then, state, effects),
    )
    assert state is S.PLACED or made.failure == Failure(FailureKind.UNAVAILABLE, "no prefill")


def test_what_would_be_too_late_is_refused_and_gets_a_time() -> None:
    """F39: QUEUED -> REJECTED, before any attempt; what comes later changes nothing."""
    made = make_generation()
    made.fire(g.Admitted())
    made.fire(g.Prepared(PROMPT))
    refused = (Do.LEAVE_QUEUE, Do.CLOSE, Do.ANSWER_ERROR)
    follow(
        made,
        (g.LateFound("in 9 s, and it has 3 s", 6.0), S.REJECTED, refused),
        (g.TurnCame(), S.REJECTED, ()),
        (g.LateFound("again", 1.0), S.REJECTED, ()),
    )
    assert made.failure is not None and made.failure.kind.status == 429
    assert made.retry_after_s == 6.0


def test_the_only_instance_may_come_back(placed: g.Generation) -> None:
    """MIGRATING -> AWAITING_TOPOLOGY -> PLACED."""
    placed.fire(g.AttemptFailed(Failure(FailureKind.LOST, "p0 is gone")))
    follow(
        placed,
        (g.NoTopology("no prefill"), S.AWAITING_TOPOLOGY, WAIT),
        (g.Placed(PLACEMENT), S.PLACED, SEND),
    )


def test_a_client_that_leaves_gets_nothing_and_frees_everything(placed: g.Generation) -> None:
    """F43: PLACED -> CANCELLING -> CANCELLED."""
    follow(
        placed,
        (g.CancelRequested("hung up"), S.CANCELLING, (Do.ABORT_ATTEMPT, Do.ARM_ABORT)),
        (g.TokensArrived(tokens(1)), S.CANCELLING, ()),
        (g.AbortConfirmed("peer"), S.CANCELLED, (Do.CLOSE,)),
        (g.AbortTimedOut(), S.CANCELLED, ()),
    )
    assert placed.token_ids == []


@pytest.mark.parametrize("state", [S.RECEIVED, S.PREPARING, S.QUEUED, *ATTEMPTED])
def test_the_deadline_answers_from_every_open_state(state: S) -> None:
    """F15: each -> FAILED with one answer."""
    made = make_generation()
    made._state = state
    assert made.fire(g.DeadlinePassed()).count(Do.ANSWER_ERROR) == 1
    assert made.state is S.FAILED and made.failure is not None
    assert made.failure.kind is FailureKind.DEADLINE


def test_what_was_said_is_the_answer_when_its_time_is_over(placed: g.Generation) -> None:
    """STREAMING -> FINISHED by length; it is called off and nothing of it comes later."""
    follow(
        placed,
        (g.TokensArrived(tokens(1, 2)), S.STREAMING, SAYS),
        (g.DeadlinePassed(), S.FINISHED, CUT),
        (g.FinalTokensArrived(tokens(3, finish="length")), S.FINISHED, ()),
    )
    assert (placed.token_ids, placed.finish_reason) == ([1, 2], "length")


def test_what_was_said_is_the_answer_wherever_the_next_attempt_is(placed: g.Generation) -> None:
    """STREAMING -> MIGRATING -> FINISHED, or -> PLACED -> FINISHED, by length."""
    again = make_generation()
    again.fire(g.Admitted())
    again.fire(g.Prepared(PROMPT))
    again.fire(g.Placed(PLACEMENT))
    for made in (placed, again):
        made.fire(g.TokensArrived(tokens(1)))
        made.fire(g.AttemptFailed(Failure(FailureKind.LOST, "gone")))
    follow(placed, (g.DeadlinePassed(), S.FINISHED, (Do.CLOSE, Do.DELIVER_CUT)))
    follow(again, (g.Placed(PLACEMENT), S.PLACED, SEND), (g.DeadlinePassed(), S.FINISHED, CUT))


@pytest.mark.parametrize("state", [S.PREPARING, S.QUEUED, *ATTEMPTED])
def test_a_token_that_does_not_come_is_an_error_whatever_was_said(state: S) -> None:
    """F15: each -> FAILED; clocks begin with the admission."""
    made = make_generation()
    assert made.fire(g.Admitted()) == (Do.ARM_DEADLINE, Do.ARM_PATIENCE)
    made._state = state
    made.token_ids = [1, 2]
    assert made.fire(LATE).count(Do.ANSWER_ERROR) == 1
    assert made.state is S.FAILED and made.failure == Failure(FailureKind.DEADLINE, LATE.reason)


def test_who_is_called_off_waits_for_no_token(placed: g.Generation) -> None:
    """CANCELLING -> CANCELLING."""
    placed.fire(g.CancelRequested("hung up"))
    follow(placed, (LATE, S.CANCELLING, ()))


# --- INSTANCE -------------------------------------------------------------------------------------
