"""GENERATION: one request at the gateway, from admission to its one terminal answer.

Theory of operation
-------------------
It outlives attempts.  An attempt is a placement on instances; when it fails for a reason that
another instance may not have, the generation is MIGRATING: the prompt plus the tokens that the
client already has go elsewhere, and the client sees neither a gap nor a repeat (fault F20).  Tokens
are numbered by output index, so a duplicate is recognised and a hole is an outcome of its own.

What bounds the attempts is failing again and again in the same way, as a request does that brings
down whatever serves it.  Failures of different kinds happened to meet in one request and say
nothing about the next attempt: each kind is counted by itself, and the deadline bounds the sum.

Three clocks bound what a client waits for: the first token, each token after it, and the whole.  A
token that does not come in time is an error.  When the time for the whole is over, what has been
said is the answer, with `length` as its end: it was paid for, and the client asked for no more
time.

Exactly one terminal answer: FINISHED, CANCELLED, REJECTED and FAILED are the only ways out, each
reached once, and every state has a deadline.  They are also what an operator counts: answers,
clients that left, what was refused (there was no room, or the request was wrong, whoever noticed
it), and our own faults, which alone leave a line in the log.  A failed stage is a failed or a
retried request, never a success without its image (F40).  When the client leaves, or has enough,
CANCELLING and STOPPING wait until the instances have confirmed, so that the gateway's books and
theirs agree (F43).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from epd.api.port import Client, TimeLimits
from epd.api.port import Generation as Prompt
from epd.failure import Failure, FailureKind
from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    Timers,
    unless,
)
from epd.records import TokenChunk
from epd.scheduling.placement import Placement


class Do(Effect):
    DISPATCH = "send the attempt to encode and prefill"
    PLACE = "choose instances for the next attempt, after a pause if several have failed"
    AWAIT_TOPOLOGY = "try to place it again soon, and not for ever"
    DELIVER = "hand new tokens to the client"
    DELIVER_FINAL = "hand the last tokens and the finish reason to the client"
    ABORT_ATTEMPT = "tell the instances of the attempt to stop"
    ANSWER_ERROR = "hand the one error to the client"
    DELIVER_CUT = "hand the client the end of an answer whose time is over: `length`"
    LOG_FAILURE = "leave a line for the operator"
    CLOSE = "give the place back"
    ARM_DEADLINE = "bound the whole"
    ARM_PATIENCE = "restart the clock that bounds the wait for the next token"
    ARM_ATTEMPT = "restart the clock that bounds silence of the attempt"
    ARM_ABORT = "bound the wait for confirmations"


class Own(Owned):
    ATTEMPT = "an attempt at its instances", Do.ABORT_ATTEMPT
    CLIENT = (
        "a client that waits for its one answer",
        None,
        *(Do.DELIVER_FINAL, Do.DELIVER_CUT, Do.ANSWER_ERROR),
    )
    PLACE = "a place among the open requests", Do.CLOSE


class S(State):
    RECEIVED = "asked for", Own.CLIENT
    PREPARING = (
        "media are fetched, the prompt is tokenized, then instances are chosen",
        *(Own.CLIENT, Own.PLACE),
    )
    PLACED = (
        "an attempt was sent to its instances; no token yet",
        *(Own.ATTEMPT, Own.CLIENT, Own.PLACE),
    )
    STREAMING = "tokens arrive", Own.ATTEMPT, Own.CLIENT, Own.PLACE
    MIGRATING = "the attempt failed; another one is being placed", Own.CLIENT, Own.PLACE
    CANCELLING = "the client left; instances are asked to stop", Own.PLACE
    STOPPING = "the client has enough; instances are asked to stop", Own.PLACE
    FINISHED = "answered"
    CANCELLED = "the client left before its answer was whole"
    FAILED = "answered with one clear error, by a fault of ours"
    REJECTED = "refused: there was no room, or the request was wrong"


@dataclass(slots=True)
class Admitted(Event):
    pass


@dataclass(slots=True)
class Refused(Event):
    """There is no room, or the API has answered that the request is wrong."""

    ends = (Own.CLIENT,)
    reason: str


@dataclass(slots=True)
class Abandoned(Event):
    """The API has answered with a fault of ours, or cannot answer any more."""

    ends = (Own.CLIENT,)
    reason: str

    @property
    def failure(self) -> Failure:
        return Failure(FailureKind.INTERNAL, self.reason)


@dataclass(slots=True)
class Placed(Event):
    placement: Placement


@dataclass(slots=True)
class NoTopology(Event):
    reason: str


@dataclass(slots=True)
class PlacementTimedOut(Event):
    """No topology came back in time."""

    by_time = True
    reason: str


@dataclass(slots=True)
class Accepted(Event):
    pass


@dataclass(slots=True)
class TokensArrived(Event):
    chunk: TokenChunk


@dataclass(slots=True)
class FinalTokensArrived(Event):
    ends = (Own.ATTEMPT,)
    chunk: TokenChunk


@dataclass(slots=True)
class TokensMissed(Event):
    """A chunk starts beyond the next index: something between was lost, on its way."""

    blamed: ClassVar[Collection[str]] = ()
    reason: str

    @property
    def failure(self) -> Failure:
        return Failure(FailureKind.LOST, self.reason)


@dataclass(slots=True)
class AttemptFailed(Event):
    """`blamed`: at which instances, by name."""

    failure: Failure
    blamed: Collection[str] = ()


@dataclass(slots=True)
class AttemptRefused(Event):
    """An instance found that the request is wrong: no other one will find it right."""

    blamed: ClassVar[Collection[str]] = ()
    failure: Failure


@dataclass(slots=True)
class AttemptTimedOut(Event):
    by_time = True
    reason: str
    blamed: Collection[str] = ()

    @property
    def failure(self) -> Failure:
        return Failure(FailureKind.LOST, self.reason)


@dataclass(slots=True)
class CancelRequested(Event):
    """The client left."""

    ends = (Own.CLIENT,)
    reason: str


@dataclass(slots=True)
class StopRequested(Event):
    """The client has enough: a stop string, or the one tool call."""

    ends = (Own.CLIENT,)
    reason: str


@dataclass(slots=True)
class AbortConfirmed(Event):
    pass


@dataclass(slots=True)
class AbortTimedOut(Event):
    by_time = True


@dataclass(slots=True)
class TokenTimedOut(Event):
    """The client has waited too long for the first token, or for the one after the last."""

    by_time = True
    reason: str


@dataclass(slots=True)
class DeadlinePassed(Event):
    """The time for the whole is over, here or by the clock of an instance."""

    by_time = True


def may_retry(generation: Generation, event: AttemptEnded) -> bool:
    kind = event.failure.kind
    return kind.retryable and generation.failures.get(kind, 0) + 1 < generation.max_attempts


def has_said(generation: Generation, event: Event) -> bool:
    return bool(generation.token_ids)


def begin_attempt(generation: Generation, event: Placed) -> None:
    generation.attempt += 1
    generation.accepted = False
    generation.num_before = len(generation.token_ids)
    generation.placed = event.placement


def note_accepted(generation: Generation, event: Accepted) -> None:
    generation.accepted = True


def append_tokens(generation: Generation, event: TokensArrived | FinalTokensArrived) -> None:
    generation.token_ids.extend(event.chunk.token_ids)
    generation.finish_reason = event.chunk.finish_reason


def note_failure(generation: Generation, event: AttemptEnded) -> None:
    generation.failure, kind = event.failure, event.failure.kind
    generation.failures[kind] = generation.failures.get(kind, 0) + 1
    generation.avoided.update(event.blamed)


def note_refusal(generation: Generation, event: Refused) -> None:
    generation.failure = Failure(FailureKind.BUSY, event.reason)


def note_no_topology(generation: Generation, event: PlacementTimedOut) -> None:
    _fail_after(generation, FailureKind.UNAVAILABLE, event.reason)


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


def note_abandoned(generation: Generation, event: Abandoned) -> None:
    generation.failure = event.failure


AttemptEnded = TokensMissed | AttemptFailed | AttemptRefused | AttemptTimedOut
_OPEN = (S.PLACED, S.STREAMING)
_UNPLACED = (S.PREPARING, S.MIGRATING)
_ENDED = (S.FINISHED, S.CANCELLED, S.FAILED, S.REJECTED)
_TELL_FAILURE = (Do.ANSWER_ERROR, Do.LOG_FAILURE)
_MAY_BE_RETRIED = (TokensMissed, AttemptFailed, AttemptTimedOut)

# One line per row, as the table that it is.
# fmt: off
_SAID_ONCE = (CancelRequested, StopRequested, Refused, Abandoned)  # by the API
_STOPPED = (AbortConfirmed, FinalTokensArrived, AttemptFailed, AttemptRefused, AbortTimedOut, DeadlinePassed)
ROWS = (
    Row(S.RECEIVED, Admitted, S.PREPARING, (Do.ARM_DEADLINE, Do.ARM_PATIENCE)),
    Row(S.RECEIVED, Refused, S.REJECTED, (), note_refusal, note="at once (F39)"),
    Row(_UNPLACED, Placed, S.PLACED, (Do.ARM_ATTEMPT, Do.DISPATCH), begin_attempt),
    Row(_UNPLACED, NoTopology, None, (Do.AWAIT_TOPOLOGY,), note="of a new gateway the instances are about to join, the only one may be back soon (F19, F20)"),
    Row(_UNPLACED, PlacementTimedOut, S.FAILED, _TELL_FAILURE, note_no_topology),
    # The attempt.
    Row(S.PLACED, Accepted, None, (Do.ARM_ATTEMPT,), note_accepted),
    Row(S.STREAMING, Accepted, None, (Do.ARM_ATTEMPT,), note="it waits for blocks again (REQUEST, PREEMPTED): silent, not lost"),
    Row(_OPEN, TokensArrived, S.STREAMING, (Do.DELIVER, Do.ARM_ATTEMPT, Do.ARM_PATIENCE), append_tokens),
    Row(_OPEN, FinalTokensArrived, S.FINISHED, (Do.DELIVER_FINAL,), append_tokens),
    Row(_OPEN, _MAY_BE_RETRIED, S.MIGRATING, (Do.PLACE,), note_failure, may_retry, "elsewhere (F19, F20)"),
    Row(_OPEN, _MAY_BE_RETRIED, S.FAILED, _TELL_FAILURE, note_failure, unless(may_retry)),
    Row(_OPEN, AttemptRefused, S.REJECTED, (Do.ANSWER_ERROR,), note_failure),
    # The client, or the API for it.
    Row(_UNPLACED, CancelRequested, S.CANCELLED),
    Row(S.MIGRATING, StopRequested, S.FINISHED, note="it was in what had arrived before"),
    Row(_OPEN, CancelRequested, S.CANCELLING, (Do.ARM_ABORT,), note="F43"),
    Row(_OPEN, StopRequested, S.STOPPING, (Do.ARM_ABORT,)),
    Row((*_UNPLACED, *_OPEN), Refused, S.REJECTED, note="of an open one, with another choice of its request"),
    Row((*_UNPLACED, *_OPEN), Abandoned, S.FAILED, (Do.LOG_FAILURE,), note_abandoned),
    # Its time is over.
    Row((*_UNPLACED, *_OPEN), TokenTimedOut, S.FAILED, _TELL_FAILURE, note_late),
    Row((S.RECEIVED, S.PREPARING), DeadlinePassed, S.FAILED, _TELL_FAILURE, note_deadline),
    Row((S.MIGRATING, *_OPEN), DeadlinePassed, S.FINISHED, (Do.DELIVER_CUT,), note_cut, has_said, "paid for, and all that there is"),
    Row((S.MIGRATING, *_OPEN), DeadlinePassed, S.FAILED, _TELL_FAILURE, note_deadline, unless(has_said)),
    Row(S.CANCELLING, _STOPPED, S.CANCELLED, note="by time: instances end it by its deadline"),
    Row(S.STOPPING, _STOPPED, S.FINISHED, note="likewise"),
)

IGNORES = (
    Ignore((S.CANCELLING, S.STOPPING), (Accepted, TokensArrived, TokensMissed, *_SAID_ONCE), "nobody reads it any more"),
    Ignore((S.MIGRATING,), (Accepted,), "a late confirmation"),
    Ignore((S.MIGRATING,), (TokensArrived, FinalTokensArrived, TokensMissed, AttemptFailed, AttemptRefused), "of the attempt that was given up"),
    Ignore((S.PLACED, S.STREAMING, S.MIGRATING), (AbortConfirmed,), "of an attempt that was given up"),
    Ignore(_ENDED, (Accepted, TokensArrived, FinalTokensArrived, TokensMissed, AttemptFailed, AttemptRefused, AbortConfirmed, DeadlinePassed, *_SAID_ONCE), "the one answer was given"),
)

_TIMERS: Timers = {
    DeadlinePassed: (Do.ARM_DEADLINE,),
    TokenTimedOut: (Do.ARM_PATIENCE,),
    AttemptTimedOut: (Do.ARM_ATTEMPT,),
    AbortTimedOut: (Do.ARM_ABORT,),
    PlacementTimedOut: (Do.PLACE, Do.AWAIT_TOPOLOGY),
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
        "limits",
        "max_attempts",
        "num_before",
        "pending_aborts",
        "placed",
        "stream",
        "token_due_s",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        max_attempts: int,
        limits: TimeLimits,
        stream: Client,
        journal: Journal = NULL_JOURNAL,
    ) -> None:
        super().__init__(request_id, journal)
        self.admitted_s = journal.now_s()
        self.token_due_s = 0.0  # when the client's patience for the next token ends
        self.limits = limits  # how long it waits
        self.attempt = 0
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
        self.pending_aborts: set[str] = set()
        self.stream = stream

    @property
    def prompt(self) -> Prompt:
        assert self.asked is not None  # it was prepared
        return self.asked

    @property
    def placement(self) -> Placement:
        assert self.placed is not None  # it has an attempt
        return self.placed

    @property
    def token_ids_of_attempt(self) -> int:
        """How many tokens the present attempt has delivered."""
        return len(self.token_ids) - self.num_before
