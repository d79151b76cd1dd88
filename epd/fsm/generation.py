"""GENERATION: one request at the gateway, from admission to its one terminal answer.

Theory of operation
-------------------
It outlives attempts.  An attempt is a placement on instances.  When it fails for a reason that
another instance may not have, the generation is MIGRATING: the prompt plus the tokens that the
client has go elsewhere.  The client sees neither a gap nor a repeat (fault F20).  Tokens are
numbered by output index, so a duplicate is recognised and a hole is an outcome of its own.

What bounds the attempts is failing again and again in the same way, as a request does that brings
down whatever serves it.  Failures of different kinds met in one request by chance: each kind is
counted by itself, and the deadline bounds the sum.  One is not counted (AWAY, F61): an instance
that drains, or has no welcome yet, has done nothing with the request, and the gateway will soon
have its state.

An attempt at an instance that drains too long is recalled while that instance still streams.  The
next one begins behind the last token that the client has.  Later tokens of the first one are
dropped by the number of their attempt.  If it decodes and its KV can move, the next attempt has the
draining instance as prefill (AttemptMoved): it inherits the KV there and hands it over.  Until its
own first token the tokens of the former one count: by their index they are the same.

Deaths are counted by input, over all requests (`scheduling/deaths.py`): what two instances died of
goes to no third one.  It ends with an error that is not tried again (PoisonFound, F68).

Three clocks bound what a client waits for: the first token, each token after it, and the whole.  A
token that does not come in time is an error.  When the time for the whole is over, the tokens so
far are the answer, with `length` as its end: it was paid for.

Keys take turns (QUEUED): a request goes out when its key has one and instances are not full of work
that waits.  What cannot be in time is refused there, and before (LateFound).

Without an instance that can serve it, it waits for one (AWAITING_TOPOLOGY): those of a new gateway
are about to join, and a lost one may be back soon.

Exactly one terminal answer: FINISHED, CANCELLED, REJECTED and FAILED are the only ways out, each
reached once, and every state has a deadline.  They are also the operator's counts: answers, clients
that left, requests without room or with a mistake, and our own faults, which alone leave a line in
the log.  A failed stage is a failed or a retried request, never a success without its image (F40).
When the client leaves, or has enough, CANCELLING and STOPPING wait for the instances'
confirmations, so that the gateway's books and theirs agree (F43).
"""

from __future__ import annotations

from epd.failure import Failure, FailureKind
from epd.frontend import Client, TimeLimits
from epd.frontend import Generation as Prompt
from epd.fsm.generation_events import (
    Abandoned,
    AbortConfirmed,
    AbortTimedOut,
    Accepted,
    Admitted,
    AttemptFailed,
    AttemptMoved,
    AttemptRecalled,
    AttemptRefused,
    AttemptTimedOut,
    CancelRequested,
    DeadlinePassed,
    Do,
    FinalTokensArrived,
    ImageHedged,
    ImageMoved,
    LateFound,
    NoTopology,
    Own,
    Placed,
    PlacementDue,
    PlacementTimedOut,
    PoisonFound,
    Prepared,
    Refused,
    S,
    StopRequested,
    TokensArrived,
    TokensMissed,
    TokenTimedOut,
    TopologyUnknown,
    TurnCame,
)
from epd.fsm.kernel import (
    NULL_JOURNAL,
    Event,
    Ignore,
    Journal,
    Machine,
    Row,
    Table,
    Timers,
    unless,
)
from epd.scheduling.placement import Placement

__all__ = [
    "TABLE",
    "Abandoned",
    "AbortConfirmed",
    "AbortTimedOut",
    "Accepted",
    "Admitted",
    "AttemptFailed",
    "AttemptMoved",
    "AttemptRecalled",
    "AttemptRefused",
    "AttemptTimedOut",
    "CancelRequested",
    "DeadlinePassed",
    "Do",
    "FinalTokensArrived",
    "Generation",
    "ImageHedged",
    "ImageMoved",
    "LateFound",
    "NoTopology",
    "Own",
    "Placed",
    "PlacementDue",
    "PlacementTimedOut",
    "PoisonFound",
    "Prepared",
    "Refused",
    "S",
    "StopRequested",
    "TokenTimedOut",
    "TokensArrived",
    "TokensMissed",
    "TopologyUnknown",
    "TurnCame",
]


def may_retry(generation: Generation, event: AttemptEnded) -> bool:
    kind = event.failure.kind
    has_more = generation.failures.get(kind, 0) + 1 < generation.max_attempts
    return kind.retryable and (has_more or not kind.is_counted)


def is_last(generation: Generation, event: AbortConfirmed) -> bool:
    """Whether nobody else has yet to confirm."""
    return generation.unconfirmed <= {event.instance_id}


def has_said(generation: Generation, event: Event) -> bool:
    return bool(generation.token_ids)


def begin_attempt(generation: Generation, event: Placed | AttemptMoved) -> None:
    generation.attempt += 1
    generation.former = 0
    generation.accepted = False
    generation.num_before = len(generation.token_ids)
    generation.placed = placement = event.placement
    generation.unconfirmed = {placement.prefill.instance_id, placement.decode.instance_id}


def begin_move(generation: Generation, event: AttemptMoved) -> None:
    begin_attempt(generation, event)
    generation.former = generation.attempt - 1


def keep_prompt(generation: Generation, event: Prepared) -> None:
    generation.asked = event.prompt


def note_confirmed(generation: Generation, event: AbortConfirmed) -> None:
    generation.unconfirmed.discard(event.instance_id)


def note_moved(generation: Generation, event: ImageMoved | ImageHedged) -> None:
    generation.placed = event.placement


def note_accepted(generation: Generation, event: Accepted) -> None:
    generation.accepted = True


def append_tokens(generation: Generation, event: TokensArrived | FinalTokensArrived) -> None:
    generation.token_ids.extend(event.chunk.token_ids)
    if event.chunk.attempt == generation.former:
        generation.num_before = len(generation.token_ids)
    else:
        generation.former = 0
    generation.finish_reason = event.chunk.finish_reason


def note_failure(generation: Generation, event: AttemptEnded) -> None:
    generation.failure, kind = event.failure, event.failure.kind
    generation.failures[kind] = generation.failures.get(kind, 0) + kind.is_counted
    generation.avoided.update(event.blamed)


def note_refusal(generation: Generation, event: Refused) -> None:
    generation.failure = Failure(FailureKind.BUSY, event.reason)


def note_lacking(generation: Generation, event: NoTopology) -> None:
    generation.lacking = event.reason


def note_no_topology(generation: Generation, event: TopologyUnknown | PlacementTimedOut) -> None:
    reason = event.reason if isinstance(event, TopologyUnknown) else generation.lacking
    _fail_after(generation, FailureKind.UNAVAILABLE, reason)


def note_cut(generation: Generation, event: Event) -> None:
    generation.finish_reason = "length"


def note_late(generation: Generation, event: TokenTimedOut) -> None:
    _fail_after(generation, FailureKind.DEADLINE, event.reason)


def note_deadline(generation: Generation, event: DeadlinePassed) -> None:
    reason = "the request did not finish before its deadline"
    _fail_after(generation, FailureKind.DEADLINE, reason)


def _fail_after(generation: Generation, kind: FailureKind, reason: str) -> None:
    """Also because of what had failed before."""
    generation.cause = generation.failure.reason if generation.failure is not None else ""
    generation.failure = Failure(kind, reason)


def note_late_found(generation: Generation, event: LateFound) -> None:
    generation.failure = Failure(FailureKind.OVERLOADED, event.reason)
    generation.retry_after_s = event.retry_after_s


def note_poison(generation: Generation, event: PoisonFound) -> None:
    generation.failure = event.failure


def note_abandoned(generation: Generation, event: Abandoned) -> None:
    generation.failure = event.failure


AttemptEnded = TokensMissed | AttemptFailed | AttemptRefused | AttemptTimedOut
_OPEN = (S.PLACED, S.STREAMING)
_BETWEEN = (S.AWAITING_TOPOLOGY, S.MIGRATING)
_CHOOSING = (S.QUEUED, *_BETWEEN)
_UNPLACED = (S.PREPARING, *_CHOOSING)
_ENDED = (S.FINISHED, S.CANCELLED, S.FAILED, S.REJECTED)
_TELL_FAILURE = (Do.ANSWER_ERROR, Do.LOG_FAILURE)
_MAY_BE_RETRIED = (TokensMissed, AttemptFailed, AttemptTimedOut)

# One line per row, as the table that it is.
# fmt: off
_SAID_ONCE = (CancelRequested, StopRequested, Refused, Abandoned)  # by the API
_STOPPED = (FinalTokensArrived, AttemptFailed, AttemptRefused, AbortTimedOut, DeadlinePassed)
ROWS = (
    Row(S.RECEIVED, Admitted, S.PREPARING, (Do.ARM_DEADLINE, Do.ARM_PATIENCE)),
    Row(S.RECEIVED, Refused, S.REJECTED, (), note_refusal, note="at once (F39)"),
    Row(S.PREPARING, Prepared, S.QUEUED, (Do.QUEUE,), keep_prompt),
    Row(S.QUEUED, TurnCame, None, (Do.CHOOSE,)),
    Row(S.QUEUED, LateFound, S.REJECTED, (Do.ANSWER_ERROR,), note_late_found, note="before it costs anything (F39)"),
    Row(_CHOOSING, Placed, S.PLACED, (Do.ARM_ATTEMPT, Do.DISPATCH), begin_attempt),
    Row((S.QUEUED, S.MIGRATING), NoTopology, S.AWAITING_TOPOLOGY, (Do.AWAIT_TOPOLOGY, Do.ARM_TOPOLOGY), note_lacking, note="F19, F20"),
    Row(S.AWAITING_TOPOLOGY, NoTopology, None, (Do.AWAIT_TOPOLOGY,), note_lacking),
    Row(_CHOOSING, TopologyUnknown, S.FAILED, _TELL_FAILURE, note_no_topology),
    Row(_BETWEEN, PlacementDue, None, (Do.CHOOSE,)),
    Row(S.AWAITING_TOPOLOGY, PlacementTimedOut, S.FAILED, _TELL_FAILURE, note_no_topology),
    # The attempt.
    Row(S.PLACED, Accepted, None, (Do.ARM_ATTEMPT,), note_accepted),
    Row(S.STREAMING, Accepted, None, (Do.ARM_ATTEMPT,), note="it waits for blocks again (REQUEST, PREEMPTED): silent, not lost"),
    Row(_OPEN, ImageMoved, None, (Do.MOVE_IMAGE,), note_moved, note="its loss costs its images, not the attempt (F19)"),
    Row(_OPEN, ImageHedged, None, (Do.HEDGE_IMAGE,), note_moved, note="F62"),
    Row(_OPEN, TokensArrived, S.STREAMING, (Do.DELIVER, Do.ARM_ATTEMPT, Do.ARM_PATIENCE), append_tokens),
    Row(_OPEN, FinalTokensArrived, S.FINISHED, (Do.DELIVER_FINAL,), append_tokens),
    Row(_OPEN, _MAY_BE_RETRIED, S.MIGRATING, (Do.PLACE,), note_failure, may_retry, "elsewhere (F19, F20)"),
    Row(_OPEN, _MAY_BE_RETRIED, S.FAILED, _TELL_FAILURE, note_failure, unless(may_retry)),
    Row(_OPEN, AttemptRecalled, S.MIGRATING, (Do.CHOOSE,), note="its instance drains, and still works on it"),
    Row(S.STREAMING, AttemptMoved, S.PLACED, (Do.ARM_ATTEMPT, Do.HAND_OVER), begin_move, note="with its KV"),
    Row(_OPEN, AttemptRefused, S.REJECTED, (Do.ANSWER_ERROR,), note_failure),
    Row((*_CHOOSING, *_OPEN), PoisonFound, S.FAILED, _TELL_FAILURE, note_poison, note="not to a third instance (F68)"),
    # The client, or the API for it.
    Row(_UNPLACED, CancelRequested, S.CANCELLED),
    Row(_BETWEEN, StopRequested, S.FINISHED, note="it was in what had arrived before"),
    Row(_OPEN, CancelRequested, S.CANCELLING, (Do.ARM_ABORT,), note="F43"),
    Row(_OPEN, StopRequested, S.STOPPING, (Do.ARM_ABORT,)),
    Row((*_UNPLACED, *_OPEN), Refused, S.REJECTED, note="of an open one, with another choice of its request"),
    Row((*_UNPLACED, *_OPEN), Abandoned, S.FAILED, (Do.LOG_FAILURE,), note_abandoned),
    # Its time is over.
    Row((*_UNPLACED, *_OPEN), TokenTimedOut, S.FAILED, _TELL_FAILURE, note_late),
    Row((S.RECEIVED, S.PREPARING, S.QUEUED), DeadlinePassed, S.FAILED, _TELL_FAILURE, note_deadline),
    Row((*_BETWEEN, *_OPEN), DeadlinePassed, S.FINISHED, (Do.DELIVER_CUT,), note_cut, has_said, "paid for, and all that there is"),
    Row((*_BETWEEN, *_OPEN), DeadlinePassed, S.FAILED, _TELL_FAILURE, note_deadline, unless(has_said)),
    Row(S.CANCELLING, AbortConfirmed, S.CANCELLED, when=is_last),
    Row(S.STOPPING, AbortConfirmed, S.FINISHED, when=is_last),
    Row((S.CANCELLING, S.STOPPING), AbortConfirmed, None, (), note_confirmed, unless(is_last)),
    Row(S.CANCELLING, _STOPPED, S.CANCELLED, note="by time: instances end it by its deadline"),
    Row(S.STOPPING, _STOPPED, S.FINISHED, note="likewise"),
)

IGNORES = (
    Ignore((S.CANCELLING, S.STOPPING), (Accepted, TokensArrived, TokensMissed, AttemptRecalled, AttemptMoved, PoisonFound, *_SAID_ONCE), "nobody reads it any more"),
    Ignore(_BETWEEN, (Accepted,), "a late confirmation"),
    Ignore(_BETWEEN, (TokensArrived, FinalTokensArrived, TokensMissed, AttemptFailed, AttemptRecalled, AttemptMoved, AttemptRefused), "of the attempt that was given up"),
    Ignore((S.PLACED,), (AttemptMoved,), "it was placed anew, and has no KV there"),
    Ignore((*_OPEN, *_BETWEEN), (AbortConfirmed,), "of an attempt that was given up"),
    Ignore(_ENDED, (Prepared, TurnCame, LateFound, Accepted, TokensArrived, FinalTokensArrived, TokensMissed, AttemptFailed, AttemptRecalled, AttemptMoved, AttemptRefused, AbortConfirmed, DeadlinePassed, PoisonFound, *_SAID_ONCE), "the one answer was given"),
)

_TIMERS: Timers = {
    DeadlinePassed: (Do.ARM_DEADLINE,),
    TokenTimedOut: (Do.ARM_PATIENCE,),
    AttemptTimedOut: (Do.ARM_ATTEMPT,),
    AbortTimedOut: (Do.ARM_ABORT,),
    PlacementDue: (Do.PLACE, Do.AWAIT_TOPOLOGY),
    PlacementTimedOut: (Do.ARM_TOPOLOGY,),
}
TABLE = Table("GENERATION", __doc__ or "", S, S.RECEIVED, _ENDED, ROWS, IGNORES, timers=_TIMERS)
# fmt: on


class Generation(Machine):
    """One choice of one API request."""

    table = TABLE
    __slots__ = (
        "accepted",
        "admitted_s",
        "asked",
        "attempt",
        "avoided",
        "cause",
        "failure",
        "failures",
        "finish_reason",
        "former",
        "lacking",
        "limits",
        "max_attempts",
        "num_before",
        "placed",
        "retry_after_s",
        "stream",
        "token_ids",
        "unconfirmed",
        "who",
    )

    def __init__(
        self,
        request_id: str,
        max_attempts: int,
        limits: TimeLimits,
        stream: Client,
        journal: Journal = NULL_JOURNAL,
        who: str = "",
    ) -> None:
        super().__init__(request_id, journal)
        self.admitted_s = journal.now_s()
        self.limits = limits  # how long it waits
        self.attempt = 0
        self.former = 0  # the attempt that the present one inherits KV of, while its tokens count
        self.max_attempts = max_attempts
        self.failures: dict[FailureKind, int] = {}  # of attempts
        self.avoided: set[str] = set()  # where they failed: taken again only if there is no other
        self.asked: Prompt | None = None  # what the API prepared, when it has
        self.placed: Placement | None = None  # where the latest attempt is
        self.accepted = False
        self.token_ids: list[int] = []  # delivered so far, over all attempts
        self.num_before = 0  # of them, by earlier attempts
        self.finish_reason = ""
        self.failure: Failure | None = None  # the last one
        self.cause = ""  # what had failed before it
        self.lacking = ""  # why it could not be placed
        self.retry_after_s = 1.0  # if it was refused
        self.unconfirmed: set[str] = set()  # instances of the attempt that may work on it
        self.stream = stream
        self.who = who  # asks, as keys take turns

    @property
    def prompt(self) -> Prompt:
        assert self.asked is not None  # it was prepared
        return self.asked

    @property
    def placement(self) -> Placement:
        assert self.placed is not None  # it has an attempt
        return self.placed

    @property
    def has_attempt(self) -> bool:
        """Whether its present attempt is at its instances, and was not given up."""
        return Own.ATTEMPT in self.state.owns

    def reads(self, attempt: int) -> bool:
        """Whether what comes of that attempt is of the present one, or of its former one."""
        return attempt in (self.attempt, self.former)

    @property
    def resumes(self) -> bool:
        """Whether it has moved, and waits for the first token from where it is now."""
        return self.attempt > 1 and self.has_attempt and not self.token_ids_of_attempt

    @property
    def token_ids_of_attempt(self) -> int:
        """How many tokens the present attempt has delivered."""
        return len(self.token_ids) - self.num_before
