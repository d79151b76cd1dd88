"""The port between the HTTP side and the gateway role: what one generation is, asked and answered.

The API admits first (`Frontend.admit`, a place or a refusal at once), then does its own work (fetch
media, render, tokenize), then starts the generation.  Leaf: values and protocols only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol, TypedDict

from epd.messages import (
    Address,
    Clip,
    MediaItem,
    PixelBounds,
    SamplingParams,
    TokenLogprobs,
    end_of,
)
from epd.observed import Observed, Query

JsonObject = dict[str, object]
"""As it comes and goes: a shape (`epd.api.http.shapes`) has what its values may be."""

Stage = Literal["", "encode", "prefill"]
"""What of a request is wanted, where somebody else drives its stages; empty: all of it."""


class Refused(Exception):
    """Not admitted, before any work (fault F39)."""

    def __init__(self, status: int, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.status = status  # 429 or 503
        self.message = message
        self.retry_after_s = retry_after_s


class Leave(Enum):
    """Why the API reads no more of a generation."""

    ENOUGH = "the client has enough: a stop string, or the one tool call"
    GONE = "the client left"
    REFUSED = "the client was told that its request is wrong, or that there is no room"
    FAULT = "the client was told of a fault of ours, or cannot be told"


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """One image or video of a prompt: compressed bytes, and the shape of its rows by its header."""

    mm_hash: str  # 64 hex digits
    offset: int  # of its first placeholder in `token_ids`
    num_rows: int
    grid_thw: tuple[int, int, int]
    image: bytes
    clip: Clip | None = None  # of a video
    offsets: tuple[int, ...] = ()  # these two: see `MediaItem`
    second_per_grid: float = 1.0
    bounds: PixelBounds | None = None  # of an image
    pixels_nbytes: int = 0  # of its decoded pixels: see `EncodeRequest`

    @property
    def end(self) -> int:
        """Position behind its last row."""
        return end_of(self.offset, self.num_rows, self.offsets)

    def placed(self, index: int, room: str, encoder: Address) -> MediaItem:
        """As prefill gets it: without its bytes, and with the encoder of its rows."""
        return MediaItem(
            index=index,
            mm_hash=self.mm_hash,
            offset=self.offset,
            num_rows=self.num_rows,
            grid_thw=self.grid_thw,
            room=room,
            encoder=encoder,
            offsets=self.offsets,
            second_per_grid=self.second_per_grid,
        )


class Adapter(NamedTuple):
    """What changes the model for a request: its name in the API, and its digest."""

    name: str = ""
    digest: str = ""
    changes_tower: bool = False  # and with it rows of images

    @property
    def of_rows(self) -> str:
        """Its digest, where rows depend on it."""
        return self.digest if self.changes_tower else ""


NO_ADAPTER = Adapter()


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice to generate; placeholders in `token_ids` are expanded already."""

    token_ids: tuple[int, ...]
    items: tuple[PreparedItem, ...]
    sampling: SamplingParams
    user: str = ""
    wants_timeline: bool = False  # stages then report when they were in which state
    scope: str = ""  # who shares KV with it: `identity.scope_of`
    stage: Stage = ""
    claim: str = ""  # a generation of stage "prefill" whose KV is held for this one
    encoded_at: Mapping[str, str] = field(default_factory=dict)  # hash to encoder, by who asks
    adapter: Adapter = NO_ADAPTER


class Timeouts(Protocol):
    """Of the settings (`epd.config.Timing`)."""

    @property
    def first_token_timeout_s(self) -> float: ...

    @property
    def token_timeout_s(self) -> float: ...

    @property
    def request_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a client waits, in seconds: for the first token, for each further one, in all."""

    first_token_s: float
    token_s: float
    total_s: float

    @classmethod
    def of(cls, timing: Timeouts) -> TimeLimits:
        first_s, token_s = timing.first_token_timeout_s, timing.token_timeout_s
        return cls(first_s, token_s, timing.request_timeout_s)


@dataclass(frozen=True, slots=True)
class GenerationError:
    """Why a generation ended without an answer."""

    kind: str
    message: str
    status: int
    retryable: bool
    retry_after_s: float = 1.0  # of one that is retryable


class GenerationUpdate(NamedTuple):
    """News of one generation; the last one has a `finish_reason` or an `error`."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str = ""  # "", "stop", "length"
    error: GenerationError | None = None
    num_accepted: int = 0  # of these tokens, those that were drafted before (speculation)
    num_rejected: int = 0  # rejected drafts meanwhile
    num_cached: int = 0  # with the first token: tokens of the prompt that were found in the cache


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """A machine of an instance entered a state, or (`lasted_s`) a chunk was computed."""

    machine: str
    instance: str
    key: str  # within the request: attempt, attempt/item, attempt/kv, or an image's hash
    state: str
    at_s: float  # wall-clock
    lasted_s: float = 0.0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TransferParams:
    """How rows and KV of the present attempt move, in the ecosystem's words (JSON values)."""

    ec: dict[str, JsonObject] = field(default_factory=dict)  # by mm_hash
    kv: JsonObject = field(default_factory=dict)


class GenerationStream(Protocol):
    """Updates in order; iteration ends after the last update or after `cancel`."""

    request_id: str
    client_request_id: str  # the client's own name for it, set by the API; for log lines
    transfer_params: Callable[[], TransferParams]
    timeline: Callable[[], list[TimelineEntry]]  # so far; of a generation that wants one
    on_concluded: Callable[[], None]  # called once, when the generation has ended

    def __aiter__(self) -> AsyncIterator[GenerationUpdate]: ...

    def next_ready(self) -> GenerationUpdate | None:
        """What is there already, so that several tokens leave in one write."""

    def cancel(self, why: Leave, reason: str) -> None:
        """Nobody reads any more, also while the prompt is prepared; gives the place back."""


class Client(Protocol):
    """Who waits for the answer: the other end of a `GenerationStream`."""

    client_request_id: str

    def push(self, update: GenerationUpdate) -> None: ...

    def conclude(self) -> None: ...


class WaitFacts(TypedDict):
    what: str
    for_s: float
    bound_s: float


class InstanceFacts(TypedDict):
    """What /ready shows of one instance."""

    instance: str
    epoch: int
    pid: int
    num_ranks: int  # processes
    roles: list[str]
    state: str
    assigned: int
    transports: Mapping[str, str]  # by peer
    fallbacks: Mapping[str, str]  # by peer: why the transport is not the best
    cached_images: int
    silent_peers: list[str]
    silent_s: float  # since its last heartbeat
    drain_left_s: float | None  # until its open work moves; None: it does not drain
    waits: list[WaitFacts]  # for works of a kind, as of that heartbeat
    reason: str  # why it is over, gets no work, or has not the roles that it was asked to have


@dataclass(frozen=True, slots=True)
class OutsideFacts:
    """A life that asked for a place and has none; `since_s`: since it asked, or was refused."""

    instance: str
    epoch: int
    pid: int
    endpoint: str
    roles: list[str]
    state: str
    since_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a topology can serve now; `reason`: what is missing."""

    ok: bool
    reason: str
    instances: list[InstanceFacts]
    outside: list[OutsideFacts] = field(default_factory=list)
    stages: Mapping[str, list[str]] = field(default_factory=dict)  # who takes work for each


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    kind: str = "gauge"  # or "counter"
    help: str = ""


def histogram(
    name: str,
    text: str,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
    labels: tuple[tuple[str, str], ...] = (),
) -> Iterator[Metric]:
    """In Prometheus' manner: buckets are cumulative, the one of all values has the bound +Inf."""
    count = 0
    for bound, more in zip((*bounds, "+Inf"), counts, strict=True):
        count += more
        own = (*labels, ("le", str(bound)))
        yield Metric(f"{name}_bucket", count, own, "histogram", text)
    yield Metric(f"{name}_sum", total, labels, "histogram", text)
    yield Metric(f"{name}_count", count, labels, "histogram", text)


class AdapterDesk(Protocol):
    """Adapters that come and go while the gateway serves."""

    @property
    def offered(self) -> Mapping[str, Adapter]:
        """By name, now."""

    def begin(self, held: Mapping[str, Adapter]) -> None:
        """Instances hold these from their start."""

    def load(self, adapter: Adapter, path: str) -> Awaitable[None]:
        """Done when it is offered; `path`: below `engine.lora.runtime_dir`.  Raises Refused."""

    def unload(self, name: str) -> Awaitable[None]:
        """Done when its memory is back, or those who have it are silent.  Raises Refused."""


class Frontend(Protocol):
    """What the API may ask of the gateway role."""

    adapters: AdapterDesk | None  # None: they are those of the start

    @property
    def is_full(self) -> bool:
        """Whether `admit` refuses whoever comes now."""

    def admit(self, limits: TimeLimits | None = None, who: str = "") -> GenerationStream:
        """A place for one choice; raises Refused.

        `limits`: those of the settings, if None.  `who`: a key; keys take turns.
        """

    def start_generation(self, stream: GenerationStream, generation: Generation) -> None:
        """The prompt of an admitted stream is ready."""

    def ready(self) -> Readiness: ...

    def metrics(self) -> list[Metric]: ...

    def profile(self, *, starts: bool) -> Awaitable[dict[str, tuple[bool, str]]]:
        """Start or stop recording at every instance: whether it did, and a trace or a reason."""

    def drain(
        self,
        name: str,
        within_s: float,
        *,
        forced: bool,
        restarts: bool,
        roles: tuple[str, ...] = (),
    ) -> None:
        """Have an instance take no new work, and leave; what is open moves at the bound.
        `forced`: also the only one of its role.  `roles`: its process returns with these.  Raises
        Refused."""

    def observe(self, query: Query) -> Awaitable[tuple[dict[str, Observed], list[str]]]:
        """Each process's machines, the gateway's first, and instances without an answer. Raises
        Refused."""
