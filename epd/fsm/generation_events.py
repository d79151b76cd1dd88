"""What happens to a request at the gateway, what it orders, what it owns and its states."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from epd.failure import Failure, FailureKind
from epd.frontend import Generation as Prompt
from epd.fsm.kernel import Effect, Event, Owned, State
from epd.records import Address, TokenChunk
from epd.scheduling.placement import Placement


class Do(Effect):
    DISPATCH = "send the attempt to encode and prefill"
    HAND_OVER = "have the instance that decodes it send its KV to another one"
    MOVE_IMAGE = "send an image to another encoder, and tell prefill of its room"
    HEDGE_IMAGE = "send an image to a second encoder, too, and tell prefill of its room"
    PLACE = "choose instances for the next attempt, after a pause if several have failed"
    AWAIT_TOPOLOGY = "try to place it again soon"
    CHOOSE = "choose instances"
    QUEUE = "let it take turns with the requests of other keys"
    LEAVE_QUEUE = "give its place in the queue back"
    ARM_TOPOLOGY = "fire PlacementTimedOut later"
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
    TURN = "a place in the queue of its key", Do.LEAVE_QUEUE
    PLACE = "a place among the open requests", Do.CLOSE


class S(State):
    RECEIVED = "asked for", Own.CLIENT
    PREPARING = (
        "media are fetched, the prompt is tokenized",
        *(Own.CLIENT, Own.PLACE),
    )
    QUEUED = (
        "keys take turns, while instances are full of work that waits; then they are chosen",
        *(Own.CLIENT, Own.TURN, Own.PLACE),
    )
    AWAITING_TOPOLOGY = (
        "nothing can serve it; it is placed as soon as something can",
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
class Prepared(Event):
    """Its prompt is ready."""

    prompt: Prompt


@dataclass(slots=True)
class TurnCame(Event):
    """Its key's, and in it its own."""


@dataclass(slots=True)
class LateFound(Event):
    """By all that waits before it, its first token would come too late."""

    reason: str
    retry_after_s: float


@dataclass(slots=True)
class Placed(Event):
    placement: Placement


@dataclass(slots=True)
class NoTopology(Event):
    """Nothing can serve it now; what it lacks may come."""

    reason: str


@dataclass(slots=True)
class TopologyUnknown(NoTopology):
    """What it lacks there never was: an encoder that no registry has had will not come."""


@dataclass(slots=True)
class PlacementDue(Event):
    """The pause before the next attempt, or the next look, is over."""

    by_time = True


@dataclass(slots=True)
class PlacementTimedOut(Event):
    """No topology came in time."""

    by_time = True


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
class PoisonFound(Event):
    """As many instances have died of it, or of an image of it, as may."""

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
class AttemptRecalled(Event):
    """An instance of it drains, its time for that is over, and others have room for the rest."""


@dataclass(slots=True)
class AttemptMoved(Event):
    """Likewise, of one that has KV where it decodes: `placement` has that instance as prefill."""

    placement: Placement


@dataclass(slots=True)
class ImageMoved(Event):
    """The encoder of an image was lost, and another one takes it: the attempt goes on."""

    index: int
    encoder: Address
    placement: Placement  # with it


@dataclass(slots=True)
class ImageHedged(Event):
    """The rows of an image are late: another encoder is asked, too."""

    index: int
    encoder: Address
    placement: Placement  # with it


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
    """One instance of the attempt has called it off."""

    instance_id: str


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
