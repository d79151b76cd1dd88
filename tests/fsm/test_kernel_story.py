"""Stories keep what happened, however often something repeats."""

from __future__ import annotations

from typing import Any

from epd.failure import Failure, FailureKind
from epd.fsm.generation import (
    Accepted,
    Admitted,
    AttemptFailed,
    FinalTokensArrived,
    Generation,
    Placed,
    Prepared,
    TokensArrived,
)
from epd.messages import TokenChunk
from tests.fsm.tables import CLIENT, LIMITS, PLACEMENT

PROMPT: Any = "a prompt"


def test_a_long_answer_does_not_push_out_its_beginning() -> None:
    """RECEIVED -> PREPARING -> QUEUED -> PLACED -> STREAMING (1000 times) -> FINISHED."""
    generation = Generation("r", 4, LIMITS, CLIENT)
    generation.fire(Admitted())
    generation.fire(Prepared(PROMPT))
    generation.fire(Placed(PLACEMENT))
    for i in range(1001):
        generation.fire(
            TokensArrived(TokenChunk(request_id="r", attempt=1, start=i, token_ids=(7,)))
        )
    generation.fire(
        FinalTokensArrived(
            TokenChunk(request_id="r", attempt=1, start=1001, token_ids=(7,), finish_reason="stop")
        )
    )
    told = [(entry.source, entry.target, entry.times) for entry in generation.story]
    assert told == [
        ("RECEIVED", "PREPARING", 1),
        ("PREPARING", "QUEUED", 1),
        ("QUEUED", "PLACED", 1),
        ("PLACED", "STREAMING", 1),
        ("STREAMING", "STREAMING", 1000),
        ("STREAMING", "FINISHED", 1),
    ]
    assert "x1000" in generation.tell_story()


def test_an_attempt_is_accepted_for_itself() -> None:
    generation = Generation("r", 4, LIMITS, CLIENT)
    accepted = []
    for event in (
        Admitted(),
        Prepared(PROMPT),
        Placed(PLACEMENT),
        Accepted(),
        AttemptFailed(Failure(FailureKind.LOST, "gone")),
        Placed(PLACEMENT),
    ):
        generation.fire(event)
        accepted.append(generation.accepted)
    assert accepted == [False, False, False, True, True, False]
    assert (generation.attempt, generation.placed) == (2, PLACEMENT)
