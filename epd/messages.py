"""The control plane's vocabulary: what one instance may say to another.

Theory of operation
-------------------
A message is a noun on the wire.  Roles never see bytes: the bus decodes a frame once, at the edge,
into one of the tagged unions below, and a frame that does not decode is counted and dropped there.
The bus promises little (at most once, ordered per peer, never blocks), so nothing here relies on
delivery: a lost message is recovered by a time-out row of some state machine, and every message can
arrive twice without harm.  For that, each carries what makes it idempotent: ids that are never
reused, the `attempt` of the request, and (in the envelope) the sender's epoch.

Big things do not ride here.  Compressed images travel as payload frames behind the header frame
(not copied into it); embeddings and KV travel on the data plane.

Identifiers
-----------
`request_id`   minted by the gateway, unique over the cluster's life (gateway epoch + counter).
`attempt`      1, 2, ...: which try of the request; a migrated request is a new attempt.
`room`         the id of one transfer, `request_id/attempt/item` (E to P) or `request_id/attempt/kv`.
`mm_hash`      64 hex digits: H(tenant scope, content, processor config, model revision).
`instance_id`  a name; with `epoch` (set anew by each start of the process) it is an address.
All deadlines are absolute, in seconds of wall-clock time (`Clock.wall_s`).
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=False):
    """Base of everything on the bus; the tag is the class name, fields travel by position."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A value that travels inside messages."""


# --- values ---------------------------------------------------------------------------------------


class RemoteRegion(Record):
    """Where a peer's registered memory can be reached; `slot_nbytes * num_slots` bytes long."""

    backend: str
    instance_id: str
    epoch: int
    region_id: str
    locator: str  # backend's own: a shared memory name, host:port, ...
    slot_nbytes: int
    num_slots: int


class KvLayout(Record):
    """Shape of one KV block, `[num_layers, 2, block_size, num_kv_heads, head_dim]` of `dtype`."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_nbytes: int


class RowContract(Record):
    """What both ends must agree on before a byte of embeddings moves (fault F11).

    `row_width` elements per row: hidden * (1 + number of deepstack levels), main embedding first.
    """

    hidden: int
    row_width: int
    num_deepstack: int
    dtype: str
    row_nbytes: int


class Address(Record):
    """How to reach an instance: a bus endpoint plus what encryption needs."""

    instance_id: str
    epoch: int
    endpoint: str
    public_key: str = ""  # CURVE, z85; empty on ipc


class InstanceInfo(Record):
    """What an instance says of itself when it joins; the gateway's registry and all peers keep it."""

    address: Address
    roles: tuple[str, ...]
    host_id: str  # equal on one host (boot id): shared memory can reach it
    pid: int
    num_slots: int = 0  # receive pool (prefill)
    num_kv_blocks: int = 0  # KV pool (prefill, decode)
    max_queue: int = 0
    kv_layout: KvLayout | None = None
    row_contract: RowContract | None = None


class Load(Record):
    """Heartbeat's view of how busy an instance is; placement reads it."""

    open_requests: int = 0
    free_kv_blocks: int = 0
    free_slots: int = 0
    queued_images: int = 0
    live: tuple[tuple[str, int], ...] = ()  # what its roles own now, by kind; zero when idle


class SamplingParams(Record):
    """How to pick the next token; everything needed to continue on another instance exactly.

    `seed` is always set (the gateway draws one if the client did not): the random number for output
    token `i` is a pure function of `(seed, i)`, so batch, topology and migration cannot change it.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()  # EOS and client's; empty under ignore_eos
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1  # -1: none; 0: of the chosen token only; n: and the n likeliest
    min_tokens: int = 0


class MediaItem(Record):
    """One image of a prompt: where its rows go and who makes them."""

    index: int
    mm_hash: str
    offset: int  # position of its first placeholder in the prompt's token ids
    num_rows: int
    grid_thw: tuple[int, int, int]  # patches; for LLaVA-style models (1, height, width) of pixels
    room: str
    encoder: Address


class TokenLogprobs(Record):
    """Log-probabilities at one output position: of the chosen token, then of the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenChunk(Record):
    """Tokens of one request, numbered: `start` is the output index of the first one."""

    request_id: str
    attempt: int
    start: int
    token_ids: tuple[int, ...]
    finish_reason: str = ""  # "", "stop", "length"
    logprobs: tuple[TokenLogprobs, ...] = ()


class Span(Record):
    """A stage of a request as its instance saw it, for the timeline (wall-clock seconds)."""

    machine: str
    state: str
    at_s: float


# --- membership (every instance <-> gateway) -------------------------------------------------------


class Join(Message):
    """Sent until welcomed, with back-off: any start order works (faults F17, F18)."""

    protocol_version: int
    model_fingerprint: str
    info: InstanceInfo


class Welcome(Message):
    epoch: int  # of the instance that is welcomed: echoes the join
    heartbeat_interval_s: float


class JoinRefused(Message):
    epoch: int
    reason: str


class Heartbeat(Message):
    load: Load


class HeartbeatAck(Message):
    """Tells the instance that the gateway still knows it; its absence makes the instance rejoin.

    `version`: of the registry, so that an instance notices a `Membership` that it has missed.
    """

    known: bool
    version: int = 0


class DrainAnnounced(Message):
    """No new work, please; the instance leaves when its open work has ended."""


class Leave(Message):
    pass


class Membership(Message):
    """The gateway's registry, whole, after each change; `lost` lists recently fenced epochs."""

    version: int
    instances: tuple[InstanceInfo, ...]
    lost: tuple[Address, ...]


# --- gateway -> encode -----------------------------------------------------------------------------


class EncodeRequest(Message):
    """Make the rows of `mm_hash` and deliver them to `consumer` under `room`.  Payload: the image."""

    request_id: str
    attempt: int
    room: str
    mm_hash: str
    num_rows: int
    grid_thw: tuple[int, int, int]
    consumer: Address
    deadline_s: float


class EncodeAccepted(Message):
    room: str
    attempt: int


class EncodeRejected(Message):
    """Busy or draining: retryable, elsewhere."""

    request_id: str
    attempt: int
    room: str
    reason: str


# --- gateway -> prefill / decode -------------------------------------------------------------------


class PrefillRequest(Message):
    """Run a prompt.  After a migration `token_ids` ends with `num_emitted` tokens already sent."""

    request_id: str
    attempt: int
    token_ids: tuple[int, ...]
    num_emitted: int
    items: tuple[MediaItem, ...]
    sampling: SamplingParams
    decode: Address
    gateway: Address
    deadline_s: float


class RequestAccepted(Message):
    request_id: str
    attempt: int


class RequestFailed(Message):
    """The attempt ended without a finished answer.  `retryable`: another instance may do better."""

    request_id: str
    attempt: int
    kind: str  # "busy" | "media" | "engine" | "transfer" | "deadline" | "internal"
    reason: str
    retryable: bool
    spans: tuple[Span, ...] = ()


class AbortRequest(Message):
    """Stop working on it and give its memory back; answered by RequestAborted."""

    request_id: str
    attempt: int


class RequestAborted(Message):
    request_id: str
    attempt: int


# --- decode (or prefill that ends at once) -> gateway ----------------------------------------------


class Tokens(Message):
    """All tokens of one step that go to one gateway, coalesced."""

    chunks: tuple[TokenChunk, ...]


class StageReport(Message):
    """Spans of a finished stage; lossy by design (only the timeline reads it)."""

    request_id: str
    attempt: int
    spans: tuple[Span, ...]


# --- transfers, both hops (consumer <-> producer of a room) ----------------------------------------


class KvOffer(Message):
    """Prefill asks decode for room: blocks for `num_tokens` now and `max_tokens` to come."""

    room: str
    request_id: str
    attempt: int
    num_prompt_tokens: int
    num_emitted: int
    token_ids: tuple[int, ...]  # penalties and later recompute need the text
    sampling: SamplingParams
    layout: KvLayout
    gateway: Address
    deadline_s: float


class Grant(Message):
    """The consumer leased `slots` of `region` for this room: the producer may write.  Idempotent."""

    room: str
    attempt: int
    mm_hash: str  # empty for KV
    region: RemoteRegion
    slots: tuple[int, ...]
    contract: RowContract | None  # rows; None for KV, whose layout is checked at the offer
    num_rows: int
    deadline_s: float


class KvState(Record):
    """What decoding needs besides the KV bytes (fault F26: without the delta, garbage)."""

    num_tokens: int  # tokens whose KV is there
    first_token: TokenLogprobs
    rope_delta: int
    num_layers: int
    num_blocks: int


class Commit(Message):
    """Every byte of the room has landed; repeated until acknowledged."""

    room: str
    attempt: int
    nbytes: int
    checksum: int  # of all bytes in slot order; 0: not computed
    kv: KvState | None = None


class CommitAck(Message):
    room: str
    attempt: int


class CancelTransfer(Message):
    """The consumer does not want it any more; its slots stay leased until CancelAck (fault F7)."""

    room: str
    attempt: int


class CancelAck(Message):
    """The producer will never write to this room's slots again."""

    room: str
    attempt: int


class TransferAborted(Message):
    """The producer failed; nothing is being written and nothing will be."""

    room: str
    attempt: int
    kind: str
    reason: str
    retryable: bool


AnyMessage = (
    Join
    | Welcome
    | JoinRefused
    | Heartbeat
    | HeartbeatAck
    | DrainAnnounced
    | Leave
    | Membership
    | EncodeRequest
    | EncodeAccepted
    | EncodeRejected
    | PrefillRequest
    | RequestAccepted
    | RequestFailed
    | AbortRequest
    | RequestAborted
    | Tokens
    | StageReport
    | KvOffer
    | Grant
    | Commit
    | CommitAck
    | CancelTransfer
    | CancelAck
    | TransferAborted
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: who speaks, in which life, what it says, and to which life."""

    version: int
    source: str  # instance id
    epoch: int
    message: AnyMessage
    target_epoch: int = 0  # the life it is meant for; 0: any (the sender has not met the peer yet)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode(envelope: Envelope) -> bytes:
    """Envelope to header frame."""
    return _encoder.encode(envelope)


def decode(frame: Any) -> Envelope:
    """Header frame to envelope.  Raises msgspec.MsgspecError (a ValueError) on anything else."""
    return _decoder.decode(frame)
