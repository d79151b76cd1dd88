"""What came of a sequence's part of a step, as an event of its request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd.engine.base import Outcome, StepFailure
from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event
from epd.fsm.request import ChunkComputed, StepFailed
from epd.roles.steps.contents import Contents
from epd.roles.steps.prompt_scores import PromptScores
from epd.roles.steps.record import Record
from epd.roles.steps.step import token_event, until_end
from epd.roles.steps.step_loop import Part

if TYPE_CHECKING:
    from epd.roles.steps.speculation import Speculation


class Outcomes:
    """Of one instance; what a step has computed can be found by others from here on."""

    def __init__(self, scores: PromptScores, contents: Contents, speculation: Speculation) -> None:
        self._scores = scores
        self._contents = contents
        self._speculation = speculation

    def event_of(self, part: Part, outcome: Outcome, record: Record) -> Event:
        """Of a request that is not over for its client."""
        request = part.request
        outcome = self._scores.take(request, outcome)
        if isinstance(outcome, StepFailure):
            kind = FailureKind.RULES if outcome.by_rules else FailureKind.ENGINE
            return StepFailed(Failure(kind, outcome.reason))
        if outcome is None:
            return ChunkComputed()
        said = until_end(request, outcome) if isinstance(outcome, tuple) else (outcome,)
        self._contents.publish(request, record, request.num_tokens)
        if part.decoding:
            self._speculation.said(len(said))
        if part.decoding and part.count > 1:
            self._speculation.verified(record, part.count - 1, said)
        record.proposed = request.num_tokens + len(said), part.drafts
        return token_event(request, said, decoding=part.decoding)
