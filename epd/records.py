"""The values inside messages: plain frozen records; `epd.messages` has their senders."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from epd.layouts import KvLayout
from epd.observed import Wait
from epd.ranges import (
    Count,
    Digits,
    Hash,
    Id,
    Index,
    Logprob,
    Name,
    NumBytes,
    Offset,
    Positive,
    Real,
    Seconds,
    Signed,
    TokenId,
    Total,
    Where,
)
from epd.wire import Record

Listed = Meta(max_length=4096)  # of what a heartbeat lists
Tally = Annotated[tuple[tuple[Name, Total], ...], Listed]  # by kind
Names = Annotated[tuple[Name, ...], Listed]


class RemoteRegion(Record):
    """Where a peer's registered memory can be reached; `slot_nbytes * num_slots` bytes long."""

    backend: Name
    instance_id: Name
    epoch: Total
    region_id: Id
    locator: Where  # backend's own: a shared memory name, host:port, ...
    slot_nbytes: Positive
    num_slots: Positive


class RowContract(Record):
    """Of embeddings, alike at both ends (fault F11): rows of hidden * (1 + deepstack levels)."""

    hidden: Positive
    row_width: Positive
    num_deepstack: Count
    dtype: Name
    row_nbytes: Positive
    max_uncut: Count = 0  # rows of a picture that see each other: no chunk ends among them


class Address(Record, kw_only=False):
    """How to reach an instance: a bus endpoint plus what encryption needs."""

    instance_id: Name
    epoch: Total
    endpoint: Where
    public_key: Name = ""  # CURVE, z85; empty on ipc

    def of_rank(self, rank: int) -> Address:
        """Of a process of a group, to the data plane; the first leads, and is the instance."""
        return Address(rank_name(self.instance_id, rank), self.epoch, "") if rank else self


def rank_name(instance_id: str, rank: int) -> str:
    return f"{instance_id}.{rank}"


class TransportOffer(Record):
    """A way to move rows and KV; two instances with an equal offer can use it between them."""

    name: Name  # of a backend
    domain: Where  # how far it reaches


class TransportLack(Record):
    """A way that `auto` would offer at an instance, and what is missing there."""

    name: Name  # of a backend
    reason: Where


class InstanceInfo(Record):
    """What an instance sends of itself when it joins; the registry and all peers keep it."""

    address: Address
    roles: Annotated[tuple[Name, ...], Meta(max_length=8)]
    host_id: Where  # equal where pids mean the same: one boot of one host, one pid namespace
    pid: Count
    num_slots: Count = 0  # receive pool (prefill)
    num_kv_blocks: Count = 0  # KV pool (prefill, decode)
    max_queue: Count = 0
    kv_layout: KvLayout | None = None
    row_contract: RowContract | None = None
    transports: tuple[TransportOffer, ...] = ()
    lacks: tuple[TransportLack, ...] = ()
    finds_rows: bool = False  # it cannot encode; it reads what encoders stored
    other_ranks: tuple[tuple[Where, Count], ...] = ()  # of a group: host_id and pid of each
    attention: Name = ""  # what computes that of prompts and towers: torch, triton, or a library
    films: Name = ""  # what decodes them: cpu or nvdec; empty: it does not encode
    lineage: Name = ""  # of the parent that starts its lives; random
    kept_roles: Where = ""  # why it has not the other roles that it was last asked to have
    dialled: Where = ""  # the endpoint at which it has called the gateway that it joins


STAGES = {  # what a state of a machine is called in traces and metrics
    ("GENERATION", "PREPARING"): "prepare",
    ("GENERATION", "QUEUED"): "queue",
    ("GENERATION", "AWAITING_TOPOLOGY"): "wait",
    ("GENERATION", "MIGRATING"): "migrate",
    ("GENERATION", "CANCELLING"): "cancel",
    ("GENERATION", "STOPPING"): "cancel",
    ("ENCODING", "DEFERRED"): "wait",
    ("ENCODING", "LOADING"): "load",
    ("ENCODING", "QUEUED"): "decode-image",
    ("ENCODING", "PREPARED"): "queue",
    ("ENCODING", "ENCODING"): "encode",
    ("OUTGOING", "PARKED"): "wait",
    ("OUTGOING", "AWAITING_SLOTS"): "wait",
    ("OUTGOING", "WRITING"): "transfer",
    ("REQUEST", "WAITING"): "queue",
    ("REQUEST", "WAITING_FOR_EMBEDDINGS"): "wait",
    ("REQUEST", "WAITING_MID_PROMPT"): "wait",
    ("REQUEST", "PREEMPTED"): "preempted",
    ("REQUEST", "RUNNING"): "prefill",
    ("REQUEST", "TRANSFERRING"): "kv",
    ("REQUEST", "WAITING_FOR_REMOTE_KV"): "kv",
    ("REQUEST", "DECODING"): "decode",
}


class Counted(Record):
    """A labelled counter of one process, since it began; for metrics."""

    name: Name
    labels: tuple[tuple[Name, Where], ...]
    value: Total


class Histogram(Record):
    """Observations since a process began; bounds belong to the name (`roles.watching`)."""

    name: Name
    labels: tuple[tuple[Name, Where], ...]
    counts: tuple[Total, ...]  # by bucket, the last without a bound; not cumulative
    total: Seconds


class CacheTier(Record):
    """One tier of an encoder's cache, since its process began; for metrics."""

    tier: Name  # "device", "host" or "disk"
    nbytes: NumBytes
    capacity_nbytes: NumBytes
    hits: Total
    misses: Total
    evictions: Total
    failures: Total  # reads and writes that went wrong; the value was encoded anew


class StageCosts(Record):
    """What an instance has measured of itself, in seconds; 0: not yet.  Placement reads it."""

    patch_s: Seconds = 0.0  # of an image in the tower
    token_s: Seconds = 0.0  # of a prompt
    step_s: Seconds = 0.0  # a step that only decodes, whoever is in it,
    sequence_s: Seconds = 0.0  # and what each sequence adds to it
    nbyte_s: Seconds = 0.0  # of rows to another instance
    quantum_s: Seconds = 0.0  # that images and prompts may hold decodes up for; 0: any time
    unsure: Annotated[tuple[Name, ...], Meta(max_length=8)] = ()  # measured seldom, or long ago


class HandsList(Record):
    """What engines compute now and have yielded nothing of: a death counts against that."""

    serial: Total = 0  # a copy that comes late is none
    images: Annotated[tuple[Hash, ...], Meta(max_length=1 << 14)] = ()
    requests: Annotated[tuple[Id, ...], Meta(max_length=1 << 14)] = ()

    def __contains__(self, key: str) -> bool:
        return key in self.images or key in self.requests


class Load(Record):
    """Heartbeat's view of how busy an instance is; placement reads it."""

    open_requests: Count = 0
    free_kv_blocks: Count = 0
    live: Tally = ()  # what its roles own now, by kind; zero when idle
    totals: Tally = ()  # what they have counted since the start, by kind
    cache_sequence: Total = 0  # of the last batch of cache events
    events: Tally = ()  # what was odd or deferred since the process began
    num_encoded: Total = 0  # images, since the process began
    cache: Annotated[tuple[CacheTier, ...], Meta(max_length=8)] = ()  # of rows, at an encoder
    dropped: Tally = ()  # by its bus, by kind, since the process began
    histograms: Annotated[tuple[Histogram, ...], Listed] = ()  # of stages and hops
    counts: Annotated[tuple[Counted, ...], Listed] = ()  # of transfers and links
    silent_peers: Names = ()  # that do not answer it, though they may be healthy
    costs: StageCosts = StageCosts()
    hands: HandsList = HandsList()
    waits: Annotated[tuple[Wait, ...], Meta(max_length=16)] = ()  # now; of what is idle none
    adapters: Annotated[tuple[Hash, ...], Listed] = ()  # digests of those that it holds
    adapter_list: tuple[Total, Total] = (0, 0)  # that it applied: the gateway's epoch, its serial
    unheld: Annotated[tuple[tuple[Hash, Where], ...], Listed] = ()  # of it, and why
    num_gateways: Count = 1  # that it joins: they are to send equal images to one encoder


class NoRepeat(Record):
    """No run of `ngram_size` tokens comes twice among the answer's last `window_size` ones and the
    next, unless the run ends with a token of the whitelist."""

    ngram_size: Positive
    window_size: Positive
    whitelist_token_ids: tuple[TokenId, ...] = ()


class SamplingParams(Record):
    """How to pick the next token; everything needed to continue on another instance exactly.

    `seed` is always set (the gateway draws one if the client did not). The random number for output
    token `i` is a pure function of `(seed, i)`, so batch, topology and migration cannot change it.
    """

    max_tokens: Count
    temperature: Real = 0.0
    top_p: Real = 1.0
    top_k: Count = 0  # 0: off
    min_p: Real = 0.0
    seed: Signed = 0
    stop_token_ids: tuple[TokenId, ...] = ()  # EOS (not under ignore_eos) and the client's own
    frequency_penalty: Real = 0.0
    presence_penalty: Real = 0.0
    repetition_penalty: Real = 1.0
    logit_bias: tuple[tuple[TokenId, Real], ...] = ()
    num_logprobs: Digits = -1  # -1: none; 0: of the chosen token only; n: and the n likeliest
    num_prompt_logprobs: Digits = -1  # likewise, of the prompt's tokens
    min_tokens: Count = 0
    allowed_token_ids: tuple[TokenId, ...] = ()  # nothing else may be said; empty: anything
    bad_words: tuple[tuple[TokenId, ...], ...] = ()  # token sequences that may not be said
    no_repeat_ngram: NoRepeat | None = None
    grammar: str = ""  # llguidance's text that the answer must follow; empty: free text
    priority: Offset = 0  # lower goes first: each step is worth so many seconds of waiting
    tokens_per_word: Positive = 1  # told at once, but for the first and the last ones
    logprob_token_ids: tuple[TokenId, ...] = ()  # with num_logprobs: these instead of the likeliest

    def seedless(self) -> SamplingParams:
        """The same, whoever drew the seed."""
        return msgspec.structs.replace(self, seed=0)

    @property
    def tells_logprobs(self) -> bool:
        return max(self.num_logprobs, self.num_prompt_logprobs) >= 0

    @property
    def reads_output(self) -> bool:
        """Whether sampling looks back at the tokens of the answer."""
        return bool(
            self.grammar
            or self.bad_words
            or self.no_repeat_ngram is not None
            or self.frequency_penalty
            or self.presence_penalty
            or self.repetition_penalty != 1.0
        )

    def adjusts(self, output_index: int) -> bool:
        """Whether more than temperature and filters decides this output token."""
        reads_list = self.logit_bias or self.allowed_token_ids or self.reads_output
        return bool(reads_list) or output_index < self.min_tokens


class Clip(Record):
    """Which frames of a video an item's rows are made of; an image has none.

    `container`: the file's format, one of `epd.media_files.video.CONTAINERS`, or "frames" for
    images packed one after the other (a msgpack array).  `frames`: indices into it."""

    container: Name
    frames: tuple[Index, ...]


class PixelBounds(Record):
    """Between which areas an image is resized, instead of the model's own; 0: as the model's."""

    min_pixels: Total = 0
    max_pixels: Total = 0


def end_of(offset: int, num_rows: int, offsets: tuple[int, ...]) -> int:
    """Position behind the last row of an item; see `MediaItem`."""
    if not offsets:
        return offset + num_rows
    return offsets[-1] + num_rows // len(offsets)


class MediaItem(Record):
    """One image or video of a prompt: where its rows go and who makes them."""

    index: Index
    mm_hash: Hash
    offset: Index  # position of its first placeholder in the prompt's token ids
    num_rows: Positive
    grid_thw: tuple[Count, Count, Count]  # patches; LLaVA-style: (1, height, width) of pixels
    room: Id
    encoder: Address
    offsets: tuple[Index, ...] = ()  # where each frame or tile begins, if text is between them
    second_per_grid: Seconds = 1.0  # time between two of the grid's frames

    def __post_init__(self) -> None:
        if self.offsets and self.num_rows % len(self.offsets):
            raise ValueError(f"{self.num_rows} rows are not shared by {len(self.offsets)} places")

    @property
    def end(self) -> int:
        """Position behind its last row."""
        return end_of(self.offset, self.num_rows, self.offsets)

    def elsewhere(self, room: str, encoder: Address) -> MediaItem:
        return msgspec.structs.replace(self, room=room, encoder=encoder)

    def runs(self) -> list[tuple[int, int, int]]:
        """Its rows without gaps: position in the prompt, first row, number of rows."""
        if not self.offsets:
            return [(self.offset, 0, self.num_rows)]
        count = self.num_rows // len(self.offsets)
        return [(at, i * count, count) for i, at in enumerate(self.offsets)]


def check_prompt(
    token_ids: tuple[int, ...], num_emitted: int, items: tuple[MediaItem, ...]
) -> None:
    """Raises ValueError unless all items of a prompt are among these tokens."""
    if not token_ids or num_emitted > len(token_ids):
        raise ValueError(f"{num_emitted} of {len(token_ids)} tokens are an answer's")
    for item in items:
        if item.end > len(token_ids):
            raise ValueError(f"rows end at token {item.end} of {len(token_ids)}")


class TokenLogprobs(Record, kw_only=False):
    """Log-probabilities at one output position: of the chosen token, then of the likeliest, or of
    those that were asked for."""

    token_id: TokenId
    logprob: Logprob
    top: tuple[tuple[TokenId, Logprob], ...] = ()
    rank: Count = 0  # 1: the likeliest; of a token of the prompt, else 0
    prompt: tuple[TokenLogprobs, ...] = ()
    """With the first token of an answer, where it is asked for: the prompt's, from its second."""

    def with_prompt(self, prompt: tuple[TokenLogprobs, ...]) -> TokenLogprobs:
        return msgspec.structs.replace(self, prompt=prompt)


class TokenChunk(Record):
    """Tokens of one request, numbered: `start` is the output index of the first one.

    The message that comes most often: a bound costs 2 % of its decoding, and no lack of one harms.
    """

    request_id: str
    attempt: int
    start: Index
    token_ids: tuple[TokenId, ...]
    finish_reason: str = ""  # "", "stop", "length"
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_accepted: int = 0  # of these tokens, those that were drafted before
    num_rejected: int = 0  # drafts that were computed for them and were wrong
    num_cached: int = 0  # with an attempt's first token: of its prompt, tokens found in the cache


class Span(Record):
    """A stage of a request as its instance saw it, for the timeline (in the gateway's time)."""

    machine: Name
    state: Name
    at_s: Seconds
    key: Where = ""  # of the machine
    lasted_s: Seconds = 0.0  # of what is no state: a chunk of a prompt
    num_tokens: Count = 0  # of the chunk


class KvState(Record):
    """What decoding needs besides the KV bytes (fault F26: without the delta, garbage)."""

    num_tokens: Count  # tokens whose KV is there
    first_token: TokenLogprobs
    rope_delta: Offset
    num_layers: Count
    num_blocks: Count
    num_whole: Count  # blocks that were sent before the last chunk; those behind came by layers
    num_cached: Count = 0  # tokens of the prompt that prefill found in its prefix cache
