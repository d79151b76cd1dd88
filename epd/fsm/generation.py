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
said is the answer, with `length` as its end: it was paid for, and the client asked for no more time.

Exactly one terminal answer: FINISHED, CANCELLED, REJECTED and FAILED are the only ways out, each
reached once, and every state has a deadline.  They are also what an operator counts: answers,
clients that left, what was refused (there was no room, or the request was wrong, whoever noticed
it), and our own faults, which alone leave a line in the log.  A failed stage is a failed or a
retried request, never a success without its picture (F40).  When the client leaves, or has enough,
CANCELLING and STOPPING wait until the instances have confirmed, so that the gateway's books and
theirs agree (F43).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

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
    RECEIVED = "asked for; nothing is reserved"
    PREPARING = (
        "holds a place; media are fetched, the prompt is tokenized, then instances are chosen"
    )
    PLACED = "an attempt was sent to its instances; no token yet"
    STREAMING = "tokens arrive"
    MIGRATING = "the attempt failed; another one is being placed"
    CANCELLING = "the client left; instances are asked to stop"
    STOPPING = "the client has enough; instances are asked to stop"
    FINISHED = "answered"
    CANCELLED = "the client left before its answer was whole"
    FAILED = "answered with one clear error, by a fault of ours"
    REJECTED = "refused: there was no room, or the request was wrong"


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


@dataclass(slots=True)
class Admitted(Event):
    pass


@dataclass(slots=True)
class Refused(Event):
    """There is no room, or the API has answered that the request is wrong."""

    reason: str


@dataclass(slots=True)
class Abandoned(Event):
    """The API has answered with a fault of ours, or cannot answer any more."""

    reason: str
    kind: str = "internal"


@dataclass(slots=True)
class Placed(Event):
    placement: Any


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
    chunk: Any


@dataclass(slots=True)
class FinalTokensArrived(Event):
    chunk: Any


@dataclass(slots=True)
class TokensMissed(Event):
    """A chunk starts beyond the next index: something between was lost, on its way."""

    blamed: ClassVar[Collection[str]] = ()
    reason: str
    kind: str = "lost"
    retryable: bool = True


@dataclass(slots=True)
class AttemptFailed(Event):
    """`blamed`: at which instances, by name."""

    kind: str
    reason: str
    retryable: bool
    blamed: Collection[str] = ()


@dataclass(slots=True)
class AttemptRefused(Event):
    """An instance found that the request is wrong: no other one will find it right."""

    blamed: ClassVar[Collection[str]] = ()
    kind: str
    reason: str


@dataclass(slots=True)
class AttemptTimedOut(Event):
    by_time = True
    reason: str
    kind: str = "lost"
    retryable: bool = True
    blamed: Collection[str] = ()


@dataclass(slots=True)
class CancelRequested(Event):
    """The client left."""

    reason: str


@dataclass(slots=True)
class StopRequested(Event):
    """The client has enough: a stop string, or the one tool call."""

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


class Generation(Machine):
    """One choice of one API request."""

    __slots__ = (
        "accepted",
        "admitted_s",
        "attempt",
        "avoided",
        "cause",
        "error",
        "failures",
        "finish_reason",
        "limits",
        "max_attempts",
        "num_before",
        "pending_aborts",
        "placement",
        "prompt",
        "stream",
        "token_due_s",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        max_attempts: int,
        journal: Journal = NULL_JOURNAL,
        limits: Any = None,
    ) -> None:
        super().__init__(request_id, journal)
        self.admitted_s = journal.now_s()
        self.token_due_s = 0.0  # when the client's patience for the next token ends
        self.limits = limits  # how long it waits
        self.attempt = 0
        self.max_attempts = max_attempts
        self.failures: dict[str, int] = {}  # of attempts, by kind
        self.avoided: set[str] = set()  # where they failed: taken again only if there is no other
        self.prompt: Any = None  # what the API prepared
        self.placement: Any = None
        self.accepted = False
        self.token_ids: list[int] = []  # delivered so far, over all attempts
        self.num_before = 0  # of them, by earlier attempts
        self.finish_reason = ""
        self.error = ("", "")  # kind, reason
        self.cause = ""  # what had failed before
        self.pending_aborts: set[str] = set()
        self.stream: Any = None

    @property
    def token_ids_of_attempt(self) -> int:
        """How many tokens the present attempt has delivered."""
        return len(self.token_ids) - self.num_before


def may_retry(generation: Generation, event: Any) -> bool:
    num_alike = generation.failures.get(event.kind, 0) + 1
    return event.retryable and num_alike < generation.max_attempts


def has_said(generation: Generation, event: Event) -> bool:
    return bool(generation.token_ids)


def begin_attempt(generation: Generation, event: Placed) -> None:
    generation.attempt += 1
    generation.accepted = False
    generation.num_before = len(generation.token_ids)
    generation.placement = event.placement


def note_accepted(generation: Generation, event: Accepted) -> None:
    generation.accepted = True


def append_tokens(generation: Generation, event: TokensArrived | FinalTokensArrived) -> None:
    generation.token_ids.extend(event.chunk.token_ids)
    generation.finish_reason = event.chunk.finish_reason


def note_failure(generation: Generation, event: Any) -> None:
    generation.error = (event.kind, event.reason)
    generation.failures[event.kind] = generation.failures.get(event.kind, 0) + 1
    generation.avoided.update(event.blamed)


def note_refusal(generation: Generation, event: Refused) -> None:
    generation.error = ("busy", event.reason)


def note_no_topology(generation: Generation, event: PlacementTimedOut) -> None:
    _, generation.cause = generation.error
    generation.error = ("unavailable", event.reason)


def note_cut(generation: Generation, event: Event) -> None:
    generation.finish_reason = "length"


def note_late(generation: Generation, event: TokenTimedOut) -> None:
    _, generation.cause = generation.error
    generation.error = ("deadline", event.reason)


def note_deadline(generation: Generation, event: DeadlinePassed) -> None:
    _, generation.cause = generation.error
    generation.error = ("deadline", "the request did not finish before its deadline")


def note_abandoned(generation: Generation, event: Abandoned) -> None:
    generation.error = (event.kind, event.reason)


_OPEN = (S.PLACED, S.STREAMING)
_UNPLACED = (S.PREPARING, S.MIGRATING)
_ENDED = (S.FINISHED, S.CANCELLED, S.FAILED, S.REJECTED)
_TELL_FAILURE = (Do.ANSWER_ERROR, Do.LOG_FAILURE, Do.CLOSE)
_FAIL = (Do.ABORT_ATTEMPT, *_TELL_FAILURE)
_RETRY = (Do.ABORT_ATTEMPT, Do.PLACE)
_CUT = (Do.ABORT_ATTEMPT, Do.DELIVER_CUT, Do.CLOSE)


# One line per row, as the table that it is.
# fmt: off
def _until_stopped(stopping: S, stopped: S) -> tuple[Row, ...]:
    return (
        Row(stopping, AbortConfirmed, stopped, (Do.CLOSE,)),
        Row(stopping, FinalTokensArrived, stopped, (Do.CLOSE,), note="it was faster"),
        Row(stopping, AttemptFailed, stopped, (Do.CLOSE,)),
        Row(stopping, AttemptRefused, stopped, (Do.CLOSE,)),
        Row(stopping, AbortTimedOut, stopped, (Do.CLOSE,), note="instances end it by its deadline"),
        Row(stopping, DeadlinePassed, stopped, (Do.CLOSE,)),
    )


ROWS = (
    Row(S.RECEIVED, Admitted, S.PREPARING, (Do.ARM_DEADLINE, Do.ARM_PATIENCE)),
    Row(S.RECEIVED, Refused, S.REJECTED, (), note_refusal, note="at once (F39)"),
    Row(S.RECEIVED, DeadlinePassed, S.FAILED, (Do.ANSWER_ERROR, Do.LOG_FAILURE), note_deadline),
    Row(S.PREPARING, Placed, S.PLACED, (Do.ARM_ATTEMPT, Do.DISPATCH), begin_attempt, note="armed first: a dispatch may fail at once"),
    Row(S.PREPARING, NoTopology, None, (Do.AWAIT_TOPOLOGY,), note="of a new gateway the instances are about to join"),
    Row(S.MIGRATING, Placed, S.PLACED, (Do.ARM_ATTEMPT, Do.DISPATCH), begin_attempt),
    Row(S.MIGRATING, NoTopology, None, (Do.AWAIT_TOPOLOGY,), note="the only instance may be back soon (F19, F20)"),
    Row(_UNPLACED, PlacementTimedOut, S.FAILED, _TELL_FAILURE, note_no_topology),
    Row(_UNPLACED, Refused, S.REJECTED, (Do.CLOSE,)),
    Row(_UNPLACED, Abandoned, S.FAILED, (Do.LOG_FAILURE, Do.CLOSE), note_abandoned),
    Row(_UNPLACED, CancelRequested, S.CANCELLED, (Do.CLOSE,)),
    Row(S.MIGRATING, StopRequested, S.FINISHED, (Do.CLOSE,), note="it was in what had arrived before"),
    Row(_UNPLACED, TokenTimedOut, S.FAILED, _TELL_FAILURE, note_late),
    Row(S.PREPARING, DeadlinePassed, S.FAILED, _TELL_FAILURE, note_deadline),
    Row(S.MIGRATING, DeadlinePassed, S.FINISHED, (Do.DELIVER_CUT, Do.CLOSE), note_cut, has_said),
    Row(S.MIGRATING, DeadlinePassed, S.FAILED, _TELL_FAILURE, note_deadline, unless(has_said)),
    Row(S.PLACED, Accepted, None, (Do.ARM_ATTEMPT,), note_accepted),
    Row(S.STREAMING, Accepted, None, (Do.ARM_ATTEMPT,), note="it waits for blocks again (REQUEST, PREEMPTED): silent, not lost"),
    Row(_OPEN, TokensArrived, S.STREAMING, (Do.DELIVER, Do.ARM_ATTEMPT, Do.ARM_PATIENCE), append_tokens),
    Row(_OPEN, FinalTokensArrived, S.FINISHED, (Do.DELIVER_FINAL, Do.CLOSE), append_tokens),
    Row(_OPEN, TokensMissed, S.MIGRATING, _RETRY, note_failure, may_retry, "a hole in the stream"),
    Row(_OPEN, TokensMissed, S.FAILED, _FAIL, note_failure, unless(may_retry)),
    Row(_OPEN, AttemptFailed, S.MIGRATING, _RETRY, note_failure, may_retry, "elsewhere (F19, F20)"),
    Row(_OPEN, AttemptFailed, S.FAILED, _FAIL, note_failure, unless(may_retry)),
    Row(_OPEN, AttemptRefused, S.REJECTED, (Do.ABORT_ATTEMPT, Do.ANSWER_ERROR, Do.CLOSE), note_failure),
    Row(_OPEN, AttemptTimedOut, S.MIGRATING, _RETRY, note_failure, may_retry),
    Row(_OPEN, AttemptTimedOut, S.FAILED, _FAIL, note_failure, unless(may_retry)),
    Row(_OPEN, CancelRequested, S.CANCELLING, (Do.ABORT_ATTEMPT, Do.ARM_ABORT), note="F43"),
    Row(_OPEN, StopRequested, S.STOPPING, (Do.ABORT_ATTEMPT, Do.ARM_ABORT)),
    Row(_OPEN, Refused, S.REJECTED, (Do.ABORT_ATTEMPT, Do.CLOSE), note="with another choice of its request"),
    Row(_OPEN, Abandoned, S.FAILED, (Do.ABORT_ATTEMPT, Do.LOG_FAILURE, Do.CLOSE), note_abandoned),
    Row(_OPEN, TokenTimedOut, S.FAILED, _FAIL, note_late),
    Row(_OPEN, DeadlinePassed, S.FINISHED, _CUT, note_cut, has_said, "paid for, and all that there is"),
    Row(_OPEN, DeadlinePassed, S.FAILED, _FAIL, note_deadline, unless(has_said)),
    *_until_stopped(S.CANCELLING, S.CANCELLED),
    *_until_stopped(S.STOPPING, S.FINISHED),
)

_SAID_ONCE = (CancelRequested, StopRequested, Refused, Abandoned)  # by the API

IGNORES = (
    Ignore((S.CANCELLING, S.STOPPING), (Accepted, TokensArrived, TokensMissed, AttemptTimedOut, TokenTimedOut, *_SAID_ONCE), "nobody reads it any more"),
    Ignore((S.MIGRATING,), (Accepted,), "a late confirmation"),
    Ignore((S.MIGRATING,), (TokensArrived, FinalTokensArrived, TokensMissed, AttemptFailed, AttemptRefused, AttemptTimedOut), "of the attempt that was given up"),
    Ignore((S.PLACED, S.STREAMING, S.MIGRATING), (AbortConfirmed, AbortTimedOut), "of an attempt that was given up"),
    Ignore(_ENDED, (Accepted, TokensArrived, FinalTokensArrived, TokensMissed, AttemptFailed, AttemptRefused, AttemptTimedOut, AbortConfirmed, AbortTimedOut, DeadlinePassed, TokenTimedOut, *_SAID_ONCE), "the one answer was given"),
)

TABLE = Table("GENERATION", __doc__ or "", S, S.RECEIVED, _ENDED, ROWS, IGNORES)
Generation.table = TABLE
