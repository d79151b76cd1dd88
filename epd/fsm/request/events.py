"""Events of REQUEST."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd.failure import Failure
from epd.fsm.kernel import Event
from epd.fsm.request.states import Own
from epd.messages import MoveRequest
from epd.records import KvState, TokenLogprobs


@dataclass(slots=True)
class _Failed(Event):
    failure: Failure


@dataclass(slots=True)
class EmbeddingsRequired(Event):
    """Arrived with images."""


@dataclass(slots=True)
class EmbeddingsPromised(Event):
    """There will be room for all its rows, and all are asked for; some may be here already."""


@dataclass(slots=True)
class EmbeddingReady(Event):
    room: str


class EmbeddingFailed(_Failed):
    pass


@dataclass(slots=True)
class TextOnly(Event):
    """Arrived without images."""


@dataclass(slots=True)
class KvOffered(Event):
    """Arrived at a decode instance: its KV will come from a prefill instance."""


@dataclass(slots=True)
class Scheduled(Event):
    """The batch took it; blocks for all its tokens so far are its own."""

    brings = (Own.BATCH_PLACE, Own.BLOCKS)
    ends = (Own.QUEUE_PLACE,)
    blocks: tuple[int, ...]
    num_cached: int = 0  # tokens whose KV the first blocks hold already
    states_found: tuple[int, ...] = ()  # where the state behind them is, to be read
    states_kept: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # see `Context`
    ahead: tuple[int, ...] = ()  # of its blocks, those for later places of its table


@dataclass(slots=True)
class Grown(Event):
    """It got blocks for its next tokens."""

    blocks: tuple[int, ...]


@dataclass(slots=True)
class Slid(Event):
    """No step under way sees these blocks, nor will a later one."""

    passed: Mapping[int, int]  # by their place in its table


@dataclass(slots=True)
class StepLaunched(Event):
    """A step with its next tokens is under way, and uses the blocks (see `Launched`).  Steps end
    in the order of their launch, each by what came of it: an event of its own."""

    num_tokens: int
    ahead: bool


@dataclass(slots=True)
class ChunkComputed(Event):
    """A step has ended, and it computed no more than a part of the prompt."""


@dataclass(slots=True)
class LayersComputed(Event):
    """Of its last chunk, which begins at token `start`: KV of the first layers is final."""

    start: int
    num_layers: int


@dataclass(slots=True)
class FirstTokenSampled(Event):
    """The prompt (after a preemption, and what was generated) is computed; the request goes on."""

    token: TokenLogprobs


@dataclass(slots=True)
class LastTokenSampled(Event):
    """This token ends the request."""

    token: TokenLogprobs
    finish_reason: str
    accepted: tuple[TokenLogprobs, ...] = ()  # drafts before it that the same step accepted


@dataclass(slots=True)
class PromptHeld(LastTokenSampled):
    """Likewise, of a request that was for its prompt's KV: another one will go on with it."""


@dataclass(slots=True)
class LeaseEnded(Event):
    """Nobody came for the KV in time."""

    by_time = True


@dataclass(slots=True)
class LeaseRevoked(Event):
    """Too much is held, or the instance leaves; who comes computes it again."""


@dataclass(slots=True)
class TokenSampled(Event):
    token: TokenLogprobs
    accepted: tuple[TokenLogprobs, ...] = ()  # drafts before it that the same step accepted


@dataclass(slots=True)
class RemoteKvArrived(Event):
    brings = (Own.BLOCKS,)
    ends = (Own.REMOTE_KV,)
    blocks: tuple[int, ...]
    kv: KvState
    ahead: tuple[int, ...] = ()  # as in `Scheduled`


@dataclass(slots=True)
class KvDelivered(Event):
    pass


class KvFailed(_Failed):
    """The transfer is over, and has its memory or gave it back: an offer, or what was on its
    way."""

    ends = (Own.OFFER, Own.REMOTE_KV)


@dataclass(slots=True)
class KvWithdrawn(Event):
    """Prefill ended the request itself: nothing to decode."""

    ends = (Own.REMOTE_KV,)


@dataclass(slots=True)
class MoveRequested(Event):
    """This instance drains: another one is to go on with it, from its KV."""

    move: MoveRequest


@dataclass(slots=True)
class KvInherited(Event):
    """Arrived with the KV of an attempt that was decoded here, and goes on elsewhere."""

    brings = (Own.BLOCKS,)
    blocks: tuple[int, ...]
    token: TokenLogprobs  # its last one, whose KV is not computed
    num_cached: int


class StepFailed(_Failed):
    """This sequence failed in a step; the step is over."""


class PlanFailed(_Failed):
    """No step can be planned with it: what it brings to one cannot be made."""


@dataclass(slots=True)
class StepReturned(Event):
    """A step that this sequence was in is over; nobody reads what came of it."""


@dataclass(slots=True)
class Preempted(Event):
    """An older request needs its blocks."""


@dataclass(slots=True)
class AbortReceived(Event):
    pass


@dataclass(slots=True)
class DeadlinePassed(Event):
    by_time = True


@dataclass(slots=True)
class GraceEnded(Event):
    """The step or transfer of one that is over for the client has still not ended."""

    by_time = True
