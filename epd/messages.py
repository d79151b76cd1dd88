"""The control plane's vocabulary: what one instance may send to another.

Theory of operation
-------------------
A message is a noun on the wire.  Roles never see bytes: the bus decodes a frame once, at the edge,
into one of the tagged unions below.  A frame that does not decode is counted and dropped there.
The bus promises little (at most once, ordered per peer, never blocks), so nothing here relies on
delivery.  A lost message is recovered by a time-out row of some state machine, and every message
can arrive twice without harm.  For that, each carries what makes it idempotent: ids that are never
reused, the `attempt` of the request, and (in the envelope) the sender's epoch.

Identifiers
-----------
`request_id` minted by the gateway: random, so that nobody forges for one that is to come. `attempt`
1, 2, ...: which try of the request; a migrated request is a new attempt. `room` one transfer:
`request_id/attempt/item` (E to P) or `request_id/attempt/kv` (P to D); `request_id/attempt/item.n`
where an image is encoded once more. `mm_hash` 64 hex digits: H(tenant scope, content, processor
config, model revision). `instance_id` a name; with `epoch` (set anew by each start of the process)
it is an address. `PROTOCOL_VERSION` rises with each release that changes a message or a record. A
process of another version is refused by name, not by frames that do not decode.
Deadlines are absolute, in the time of the request's gateway: its wall clock's as it started, and
steady since (`roles/behind_gateways.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

import msgspec
from msgspec import Meta

from epd.failure import Failure
from epd.layouts import KvLayout, StateTensor
from epd.observed import ObserveReport, ObserveRequest, SelfTest, SelfTestResult
from epd.ranges import Count, Hash, Id, Index, Name, Positive, Seconds, TokenId, Total, Where
from epd.records import (
    Address,
    CacheTier,
    Clip,
    HandsList,
    InstanceInfo,
    KvState,
    Load,
    MediaItem,
    NoRepeat,
    PixelBounds,
    RemoteRegion,
    RowContract,
    SamplingParams,
    Span,
    StageCosts,
    TokenChunk,
    TokenLogprobs,
    TransportLack,
    TransportOffer,
    check_prompt,
    end_of,
)
from epd.room_messages import (
    CancelAck,
    CancelTransfer,
    Commit,
    CommitAck,
    Grant,
    KvOffer,
    MoveRequest,
    TransferAborted,
    TransferInDoubt,
)
from epd.wire import Message, Record

PROTOCOL_VERSION = 5
Interval = Annotated[float, Meta(gt=0, le=3600)]


# --- membership (every instance <-> gateway) ------------------------------------------------------


class Join(Message):
    """Sent until welcomed, with back-off: any start order works (faults F17, F18)."""

    protocol_version: Count
    model_fingerprint: Where
    info: InstanceInfo
    was_member: bool = False  # of an earlier registry, or of this one
    lost: tuple[tuple[Name, Total], ...] = ()
    """Lives of others that it takes for over, by an earlier registry's message: it may have fenced
    them, so none of them may be a member."""
    adapters: AdapterList | None = None  # the last list of adapters that came
    adapters_of: Total = 0  # epoch of the gateway that sent it


class Welcome(Message):
    epoch: Total  # of the instance that is welcomed: echoes the join
    heartbeat_interval_s: Interval
    cluster_s: Seconds  # the gateway's time
    wall_s: Seconds  # and its wall clock, which may have been set since it started
    dialled: Where = ""  # the endpoint at which it was asked: until then it has no name there


class JoinDeferred(Message):
    """Ask again: another life has the name, and may be alive."""

    epoch: Total
    holder: InstanceInfo
    dialled: Where = ""


class JoinRefused(Message):
    epoch: Total
    reason: str
    dialled: Where = ""
    is_over: bool = False  # this life of it was declared lost: its next one may join


class Heartbeat(Message):
    """States rather than news: the next one has all that a lost one had."""

    load: Load
    version: Total = 0  # of the registry that the instance has seen
    is_draining: bool = False  # no new work, please; it leaves when its open work has ended
    drain_left_s: Seconds = 0.0  # if so: until its open work is to move elsewhere
    next_roles: tuple[Name, ...] = ()  # and those that its process returns with


class DrainRequest(Message):
    """Take no new work, and leave; heartbeats have what came of it.  `roles`: return with these."""

    within_s: Annotated[float, Meta(ge=0, le=1e6)]
    restarts: bool  # whether the next life of the process is to follow
    roles: tuple[Name, ...] = ()


class HeartbeatAck(Message):
    """The instance is still a member; without this message it rejoins.  It comes a few times per
    `lost_after_s`, and at once to no member, or after a `Membership` was missed (`version`)."""

    known: bool
    version: Total
    cluster_s: Seconds  # the gateway's time


class Leave(Message):
    pass


class Membership(Message):
    """The gateway's registry, whole, after each change; `lost` lists recently fenced epochs."""

    version: Total
    instances: tuple[InstanceInfo, ...]
    lost: tuple[Address, ...]


class AdapterList(Message):
    """Hold exactly these: digest, directory below `engine.lora.runtime_dir` (empty: one of the
    start), name, whether it changes the tower.  Heartbeats have what came of it."""

    serial: Total
    adapters: Annotated[tuple[tuple[Hash, Where, Where, bool], ...], Meta(max_length=4096)]


# --- cache events (encode -> gateway) -------------------------------------------------------------


class CacheEvents(Message):
    """What changed in an encoder's cache, numbered; `full`: all that it holds, and nothing else."""

    sequence: Total
    full: bool
    stored: tuple[Hash, ...]
    evicted: tuple[Hash, ...]


class CacheEventsWanted(Message):
    """The gateway missed a batch: send everything."""


# --- gateway -> encode ----------------------------------------------------------------------------


class EncodeRequest(Message):
    """Make the rows of `mm_hash`, of the image or video in its payload, and deliver them to
    `consumer` under `room`; to nobody: keep them in the cache and answer `RowsKept`."""

    request_id: Id
    attempt: Count
    room: Id
    mm_hash: Hash
    num_rows: Positive
    grid_thw: tuple[Count, Count, Count]
    consumer: Address | None
    first_token_deadline_s: Seconds  # as in PrefillRequest: its rows are of no use later
    reports: bool = False  # the client wants a timeline
    clip: Clip | None = None  # of a video
    bounds: PixelBounds | None = None  # of an image
    pixels_nbytes: Count = 0  # of its decoded pixels, 8 bits a sample
    is_suspect: bool = False  # an instance died of it: it is computed apart from other suspects
    adapter: Hash = ""  # digest of the adapter that changes the tower for it; empty: none

    def elsewhere(self, room: str, *, is_suspect: bool) -> EncodeRequest:
        return msgspec.structs.replace(self, room=room, is_suspect=is_suspect)


class EncodeAccepted(Message):
    """The image is at work.  Sent again now and then while the room is open."""

    room: Id
    attempt: Count


class RowsKept(Message):
    """The rows of a room without a consumer are in this encoder's cache; the room is closed."""

    request_id: Id
    attempt: Count
    room: Id


class EncodeRejected(Message):
    """The room was not opened; elsewhere it may be."""

    request_id: Id
    attempt: Count
    room: Id
    failure: Failure


class AtHand(Message):
    """What the engines of an instance have at hand, sent before they begin with more."""

    hands: HandsList


class AbortEncode(Message):
    """The attempt is over, or has what it needs: drop the room.

    Not acknowledged: an encoder that has missed it sends `EncodeAccepted` again, and gets it again.
    """

    room: Id


# --- gateway -> prefill / decode ------------------------------------------------------------------


class PrefillRequest(Message):
    """Run a prompt.  After a migration `token_ids` ends with `num_emitted` tokens already sent."""

    request_id: Id
    attempt: Count
    token_ids: tuple[TokenId, ...]
    num_emitted: Count
    items: tuple[MediaItem, ...]
    sampling: SamplingParams
    decode: Address
    gateway: Address
    deadline_s: Seconds  # of the whole answer
    reports: bool = False  # the client wants a timeline
    scope: Where = ""  # of who asks: blocks are found by those of one scope only (F53)
    first_token_deadline_s: Seconds = 0.0  # for all that is moved before it: rows, then KV
    lease_s: Seconds = 0.0  # its KV is held so long after its answer, for a request that goes on
    is_suspect: bool = False  # as in EncodeRequest
    adapter: Hash = ""  # digest of the adapter that the request names; empty: none

    def __post_init__(self) -> None:
        check_prompt(self.token_ids, self.num_emitted, self.items)


class RequestAccepted(Message):
    """Sent soon, if the first token has not come by then, and now and then while it is silent."""

    request_id: Id
    attempt: Count


class RequestInquiry(Message):
    """Nothing has come of an attempt for a while.  Answered by `RequestFailed` if it has ended, for
    its last message was lost then; by nothing while it is open."""

    request_id: Id
    attempt: Count


class RequestFailed(Message):
    """The attempt ended without a finished answer."""

    request_id: Id
    attempt: Count
    failure: Failure
    spans: tuple[Span, ...] = ()


class RoomWanted(Message):
    """The rows of an image do not come from this encoder: may another one be asked?

    Answered by `RoomAdded`, or by the end of the attempt.  Without a failure they are late: may
    another one be asked, too?  Then no answer means no.
    """

    request_id: Id
    attempt: Count
    index: Index  # of the image
    encoder: Address
    failure: Failure | None = None
    waited_s: Seconds = 0.0  # where they are late


class RoomAdded(Message):
    """The rows of an image may come in this room, too."""

    request_id: Id
    attempt: Count
    index: Index  # of the image
    room: Id
    encoder: Address
    is_rival: bool = False  # of one that is late


class AbortRequest(Message):
    """Stop working on it and give its memory back; answered by RequestAborted."""

    request_id: Id
    attempt: Count


class RequestAborted(Message):
    request_id: Id
    attempt: Count


# --- decode (or prefill that ends at once) -> gateway ---------------------------------------------


class Tokens(Message):
    """All tokens of one step that go to one gateway, coalesced."""

    chunks: tuple[TokenChunk, ...]


class StageReport(Message):
    """Spans of a finished stage, where the request asks for `reports`; lossy by design."""

    request_id: Id
    attempt: Count
    spans: tuple[Span, ...]


# --- links (anybody <-> anybody) ------------------------------------------------------------------


class LinkProbe(Message):
    """Do messages arrive?  Answered at once by `LinkEcho`.

    `is_mute`: no echo came for long, so the link was opened anew; open your direction anew as well.
    """

    is_mute: bool


class LinkEcho(Message):
    pass


class ProfileRequest(Message):
    """Record what threads and device do, or end that and write it; a repeat gets the present
    state."""

    serial: Total
    starts: bool


class ProfileReport(Message):
    """What came of it: a trace's path, or a reason."""

    serial: Total  # of the message that it answers
    ok: bool
    detail: str


# What a gateway alone says, whoever else is a member.
OF_GATEWAY = frozenset((
    Welcome, JoinDeferred, JoinRefused, HeartbeatAck, DrainRequest, Membership, AdapterList,
    CacheEventsWanted, EncodeRequest, AbortEncode, PrefillRequest, RequestInquiry, RoomAdded,
    AbortRequest, ObserveRequest, ProfileRequest, SelfTest, MoveRequest,
))  # fmt: skip
MESSAGES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
if TYPE_CHECKING:
    AnyMessage = Message
else:
    AnyMessage = Union[MESSAGES]  # noqa: UP007, RUF100  # what the bus decodes: each of them


__all__ = [
    "Address", "CacheTier", "CancelAck", "CancelTransfer", "Clip", "Commit", "CommitAck", "Grant",
    "InstanceInfo", "KvLayout", "KvOffer", "KvState", "Load", "MediaItem", "Message", "MoveRequest",
    "NoRepeat", "ObserveReport", "ObserveRequest", "PixelBounds", "Record", "RemoteRegion",
    "RowContract", "SamplingParams", "SelfTest", "SelfTestResult", "Span", "StageCosts",
    "StateTensor", "TokenChunk", "TokenLogprobs", "TransferAborted", "TransferInDoubt",
    "TransportLack", "TransportOffer", "end_of",
]  # fmt: skip
