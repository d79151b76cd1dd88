"""Ports of the model: what a role may ask of a device.

`encode` and `step` are queued on the device's one launch thread, which keeps their order; image
decode and resize go to a pool.  The completion (a returned call on CPU, a CUDA event on GPU)
becomes a future of the loop.  Engines hold no request state: what a step needs is in the batch, and
the same batch gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from epd.errors import Told
from epd.messages import Clip, KvLayout, PixelBounds, RowContract, SamplingParams, TokenLogprobs

OnLayers = Callable[[int], None]
Progress = Callable[[str, int, int], None]  # stage, bytes of its weights that are read, of how many
Taker = Callable[[Any], None]  # of a tensor that is there, which it does not keep
Buffer = Any  # bytes of the host, or what says where on a device they lie
LAUNCH_STACK_NBYTES = 64 << 20  # far more than the stack on which a grammar is proved
PENDING = -1  # in place of a token id: the one that the request's sequence of the last step samples


def no_progress(stage: str, done_nbytes: int, total_nbytes: int) -> None:
    """Nobody asks how far loading is."""


def nothing() -> None:
    """Nobody asks when a call begins."""


class EngineError(Told):
    """A step or batch failed on the device."""


class DeviceLost(EngineError):
    """The device answers nothing any more, and will not for as long as this process lives."""


@dataclass(frozen=True, slots=True)
class Patches:
    """An image ready for the vision tower."""

    pixels: Any  # engine's own: tensor [num_patches, patch_dim] for the Qwen families
    grid_thw: tuple[int, int, int]
    num_patches: int  # cost measure for batching
    num_rows: int  # embedding rows that it will give
    adapter: str = ""  # digest of the adapter that changes the tower for it; empty: none


def part(total: int, index: int, count: int) -> range:
    """One of `count` parts of so many things in a row, as equal as can be."""
    return range(total * index // count, total * (index + 1) // count)


@dataclass(frozen=True, slots=True)
class Rows:
    """Embeddings of one image: `[num_rows, row_width]`, contiguous; deepstack side by side."""

    tensor: Any
    num_rows: int
    nbytes: int

    @property
    def on_host(self) -> bool:
        """Whether `buffer` works: the bytes are in memory that the processor reads."""
        device = getattr(self.tensor, "device", None)
        return device is None or device.type == "cpu"

    def buffer(self) -> memoryview:
        """The bytes, without a copy (host memory)."""
        return memoryview(self.raw()).cast("B")

    def raw(self) -> Buffer:
        """The bytes where they lie: of the host, or a flat tensor on a device."""
        if isinstance(self.tensor, bytes | bytearray | memoryview):
            return self.tensor
        import torch  # an engine that made a tensor has it; the simulator never comes here

        data = self.tensor.detach().view(torch.uint8)
        return data.numpy() if self.on_host else data.view(-1)


@dataclass(frozen=True, slots=True)
class EncodeFailure:
    """One image of a batch failed; its neighbours are not affected (fault F13)."""

    reason: str


class HoldsAdapters(Protocol):
    @property
    def adapters(self) -> tuple[str, ...]:
        """Digests of those that what comes may have."""

    def hold_adapters(self, wanted: Mapping[str, str]) -> Coroutine[object, None, dict[str, str]]:
        """Hold exactly these: digest to directory below `engine.lora.runtime_dir` (empty: of the
        start).  When this returns, `adapters` has no other; those go behind the work that is
        launched, then what is new is read.  Gives what cannot be held, and why."""


class AdapterParts(Protocol):
    """Of a rank, or of all (`engine/adapter_list.py`)."""

    async def read_adapter(self, digest: str, path: str) -> None:
        """Have it ready, beside the steps.  Raises ModelError or EngineError."""

    def change_adapters(self, dropped: Sequence[str], held: str) -> Awaitable[None]:
        """Between two steps: these go, and `held` comes, which is ready (empty: nothing comes).
        What else is ready is forgotten."""


class VisionEngine(HoldsAdapters, Protocol):
    """The vision tower of one device."""

    contract: RowContract
    max_batches: int  # calls of `encode` at once: 2, where others come between their parts

    @property
    def patch_s(self) -> float:
        """Seconds of the tower per patch, as measured; 0: not yet."""

    async def preprocess(
        self,
        image: Any,
        grid_thw: tuple[int, int, int],
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        on_begin: Callable[[], None] = nothing,
    ) -> Patches:
        """Decode, resize, normalise, patchify compressed bytes, on the pool; `on_begin` is called
        on the loop before a thread begins.

        `clip`: which frames to take of a video; `bounds`: how an image is resized.  Raises
        MediaError, also when it does not give the gateway's `grid_thw`."""

    def encode(self, batch: Sequence[Patches]) -> Awaitable[list[Rows | EncodeFailure]]:
        """Run the tower over a batch; one result per item, in order."""

    async def to_host(self, rows: Rows) -> Rows:
        """The same rows in host memory: these, if they are there, else a copy of their own."""

    async def to_device(self, rows: Rows) -> Rows:
        """The same rows where `encode` puts them: these, if they are there, else a copy."""

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        """Copy the bytes into host memory, filling the views in order, off the loop."""


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows of an image that each rank of a group has in these slots of its own: its part of them
    (`part`), or all of them."""

    slots: Sequence[int]
    num_rows: int
    is_sharded: bool
    transport: str = ""  # by which they came: where the slots are

    def held(self, rank: int, num_ranks: int) -> range:
        return part(self.num_rows, rank, num_ranks) if self.is_sharded else range(self.num_rows)


class RowMemory(Protocol):
    """The registered memory in which one rank's embedding rows arrive."""

    @property
    def buffer(self) -> memoryview:
        """All of it, of the host."""

    def views(self, rows: SlotRows, nbytes: int) -> Sequence[Buffer]:
        """So many bytes of an image's rows, where they arrived."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Embedding rows that replace placeholders of the chunk.

    Rows `[row_start, row_start + count)` of the item go to positions `[at, at + count)` of the
    chunk.  `chunks`: the item's rows as byte views in slot order (each whole rows), or one tensor.
    """

    at: int
    row_start: int
    count: int
    rows: Any  # Rows, a list of buffers of whole rows, or SlotRows
    left: int = 0  # rows of its run of placeholders that stand behind the chunk


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tokens whose log-probabilities are asked for: those behind the first of a chunk."""

    targets: Sequence[int]
    num_logprobs: int  # of the likeliest tokens besides


@dataclass(slots=True)
class StepSequence:
    """One request's part of a step: a chunk of its tokens, prompt or generated.

    Derived from the request when its step is launched (`roles/steps/step.py`), and gone with the
    step. It stands apart because the device's threads read it while the request goes on on the
    loop: it gets tokens, may end, and is in the next step already.
    """

    request_id: str
    token_ids: Sequence[int]  # the chunk; (PENDING,) where its one token is still being sampled
    start: int  # index of its first token in the whole sequence
    block_table: Sequence[int]  # covers start + len(token_ids) tokens
    positions: Any  # None: index + rope_delta in all axes; else [3][len] ints of this chunk
    rope_delta: int = 0
    spans: Sequence[RowSpan] = ()
    sample: SamplingParams | None = None  # None: this chunk does not reach the last prompt token
    output_index: int = 0  # index of the token to be sampled among the output tokens
    prompt_ids: Sequence[int] = ()  # repetition penalty reads them
    output_ids: Sequence[int] = ()  # said so far and known here: penalties and grammars read them
    num_drafts: int = 0  # the last of `token_ids` are drafts: each is sampled behind, too
    num_wanted: int = 0  # drafts to be made for the step behind it, where the model has a layer
    next_id: int = -1  # the token behind the chunk, where that is known
    is_followed: bool = True  # by that layer, if any of the step is: it has rows of these tokens
    scoring: Scoring | None = None  # of a prompt's chunk
    copies: Sequence[tuple[int, int]] = ()  # blocks, from and to, before anything of the step runs
    adapter: str = ""  # digest of the adapter that changes the model for it; empty: none

    @property
    def is_pending(self) -> bool:
        """Whether its one token is still being sampled."""
        return len(self.token_ids) == 1 and self.token_ids[0] == PENDING

    @property
    def drafts(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class StepFailure:
    """This sequence failed in this step (bad input, non-finite logits); others are unharmed."""

    reason: str
    by_rules: bool = False  # by what was asked for: it would fail at every engine


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """The targets of a chunk's `scoring`; where the chunk samples, too, its token has them."""

    prompt: tuple[TokenLogprobs, ...]


Settled = TokenLogprobs | tuple[TokenLogprobs, ...] | StepFailure | None
Outcome = Settled | ChunkScores


class StepResult(NamedTuple):
    """Per sequence of the batch, in order: the sampled token, with drafts the accepted ones and the
    next, a chunk's scores, None (none asked), or a failure."""

    outcomes: list[Outcome]
    elapsed_s: float = 0.0
    drafts: Mapping[int, Sequence[int]] = {}  # of what follows, by place in the batch


def verify(
    drafts: Sequence[int], sample: Callable[[int], TokenLogprobs | StepFailure]
) -> tuple[TokenLogprobs, ...] | StepFailure:
    """The accepted tokens of a sequence with drafts, and the one behind them.

    `sample(i)` is the model's token behind the first i drafts, drawn as if they were the output.
    It is asked in order and not beyond the first rejected draft, so whatever follows the text (a
    grammar's matcher) has never to be taken back.  A failure behind an accepted draft is left to
    the next step, where it is that step's own.
    """
    said: list[TokenLogprobs] = []
    for at in range(len(drafts) + 1):
        token = sample(at)
        if isinstance(token, StepFailure):
            return tuple(said) or token
        said.append(token)
        if at == len(drafts) or token.token_id != drafts[at]:
            break
    return tuple(said)


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Multimodal positions of a prompt, computed once: `[3][num_tokens]` and the decode delta."""

    positions: Any  # None for models with linear positions
    delta: int = 0


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Where an item's rows stand in the prompt, for position computation."""

    offset: int
    num_rows: int
    grid_thw: tuple[int, int, int]
    second_per_grid: float = 1.0  # time between two of the grid's frames


class KvMemory(Protocol):
    """Of a device, as the data plane has made it."""

    @property
    def whole(self) -> Buffer: ...


class LanguageEngine(HoldsAdapters, AdapterParts, Protocol):
    """The language model of one device with its paged KV pool."""

    kv_layout: KvLayout
    num_blocks: int
    row_contract: RowContract | None  # None: a text-only model
    max_context: int
    kv_in_place: bool  # host memory: KV from elsewhere lands in the pool's own blocks
    kv_memory: KvMemory | None  # where a device's pool lies, if the data plane has made that
    num_landing_blocks: int  # registered memory, in blocks, that KV lands in where it is no pool's

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        """Pure and cheap."""

    def attach_kv(self, buffer: memoryview) -> None:
        """The registered memory, `num_landing_blocks` blocks: the KV pool itself where it is in
        place, else what `land_kv` reads.  Once."""

    def attach_rows(self, memory: RowMemory) -> None:
        """Where embedding rows arrive, so that the device reads it itself.  Once."""

    def lift_rows(self, rows: object) -> object:
        """Rows have arrived (in a form of `RowSpan.rows`): begin to copy them to the device, if
        they are in host memory and there is room.  Gives the form that a step is to read, which is
        to be dropped with the last step."""

    async def fetch_kv(
        self, slots: Sequence[int], *, in_place: bool, heads: range | None = None
    ) -> Sequence[Buffer]:
        """The bytes of slots (`block * kv_layout.slots_per_block + group`), in order, in host
        memory: a copy where the pool is not.  `in_place`: or what gathers them where they are.
        `heads`: only those of these heads, one head of a slot behind the other.

        They must be final: computed by a step that has returned, or by layers that a running step
        has reported.  They are read until the call has returned; what is no copy until the caller
        is done.
        """

    async def fetch_state(
        self, blocks: Sequence[int], heads: range, *, in_place: bool
    ) -> Sequence[Buffer]:
        """Of the state in these blocks, which is final, the bytes of these heads, a copy: in host
        memory, or `in_place` where it is."""

    async def land_state(
        self,
        memory: Buffer,
        slots: Sequence[int],
        blocks: Sequence[int],
        pieces: Sequence[tuple[range, int]],
    ) -> None:
        """What landed in `slots` (blocks) of this memory becomes the state in `blocks`;
        `pieces`: heads, and where behind the first byte their own begin."""

    async def land_kv(
        self, memory: Buffer, slots: Sequence[int], blocks: Sequence[int], *, by_head: bool = False
    ) -> None:
        """Copy `slots` (blocks) of the attached memory into blocks of a pool elsewhere.  `memory`:
        that, or the pool's.
        `by_head`: what landed has one head of a transfer's slot behind the other; also in place."""

    def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Awaitable[StepResult]:
        """One forward over a mixed batch of prefill chunks and decodes, then sampling.

        It is queued when this returns; a second step may be, before the first one is over.  Raises
        EngineError, here or when it is awaited, when the whole step failed.

        `on_layers(n)` is called on the loop before the result, for some n in rising order, when the
        KV of the batch in the first n layers is final.
        """


class Profiler(Protocol):
    """Records what an instance does, from outside its work; both raise EngineError or OSError."""

    async def start(self) -> None: ...

    async def stop(self) -> str:
        """Where the trace is."""
