"""Simulated engines: the ports of `epd.engine.base` over the golden model and the device here.

The language engine keeps its KV in the pool memory that the role attached, so that bytes which a
transfer wrote, or another request overwrote, are what it computes with.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from epd.engine.base import (
    PENDING,
    ChunkScores,
    EncodeFailure,
    EngineError,
    MediaLayout,
    OnLayers,
    Outcome,
    Patches,
    RopePositions,
    RowMemory,
    Rows,
    StepFailure,
    StepResult,
    StepSequence,
    nothing,
    verify,
)
from epd.errors import MediaError
from epd.messages import Clip, PixelBounds, RowContract, TokenLogprobs
from epd_lab.sim.engine import golden, sampler
from epd_lab.sim.engine.adapting import Adapting
from epd_lab.sim.engine.device import Costs, SimDevice
from epd_lab.sim.engine.golden import BLOCK_SIZE, NUM_LAYERS, RECORD_NBYTES, Image
from epd_lab.sim.engine.hash_states import HashStates, layout_of
from epd_lab.sim.engine.kv_records import KvRecords
from epd_lab.sim.engine.landing import LandedKv, PoolMemory
from epd_lab.sim.engine.sampler import Past
from epd_lab.sim.engine.spans import cuts_one, placeholders, rows_by_position
from epd_lab.sim.poison import Poison, both

BLOCK_NBYTES = BLOCK_SIZE * RECORD_NBYTES
_INDEX_LOW = bytes(index & 0xFF for index in range(65536))


_Made = list[Rows | EncodeFailure]
OnCall = Callable[[str, Any], None]  # what was asked, and of what: for checkers


def _unseen(what: str, work: Any) -> None:
    """Nobody looks."""


class SimVisionEngine(Adapting):
    """The `VisionEngine` port."""

    contract = golden.ROW_CONTRACT

    def __init__(
        self, device: SimDevice, pool: SimDevice, costs: Costs, max_quantum_s: float = 0.0
    ) -> None:
        self.device = device
        self._quantum_s = max_quantum_s
        self.max_batches = 2 if max_quantum_s else 1
        self.patch_s = 0.0
        self._pool = pool
        self._costs = costs
        self.num_encoded: dict[str, int] = {}  # by image, for the single-flight checker
        self.on_call: OnCall = _unseen
        self.poison = Poison()

    async def preprocess(
        self,
        image: Any,
        grid_thw: tuple[int, int, int],
        clip: Clip | None = None,
        bounds: PixelBounds | None = None,
        on_begin: Callable[[], None] = nothing,
    ) -> Patches:
        self.on_call("preprocess", image)
        process = self.device.process
        keys = [name.decode(errors="replace") for name in bytes(image).split(b"|")[1:2]]

        def decode() -> Patches:
            try:
                shown = Image.parse(bytes(image))
            except ValueError:
                raise MediaError("the image is damaged: send it again as PNG or JPEG") from None
            if shown.flaw == "broken" or tuple(grid_thw) != shown.grid_thw:
                raise MediaError("the image is truncated")
            self.poison.meet(process, "image", shown.name)
            t, h, w = shown.grid_thw
            return Patches(shown, shown.grid_thw, t * h * w, shown.num_rows)

        cost_s, jitter = self._costs.preprocess_s, self._costs.jitter
        with self.poison.work(process, keys) as begin:
            begins = both(on_begin, begin)
            running = self._pool.run(cost_s, jitter, decode, begin=begins, call="preprocess")
            patches: Patches = await running
            return patches

    async def encode(self, batch: Sequence[Patches]) -> list[Rows | EncodeFailure]:
        self.on_call("encode", batch)
        n, names = self.num_slices(batch), [item.pixels.name for item in batch]
        with self.poison.work(self.device.process, names) as begin:
            begin()
            return [await self.slice(batch, n, is_last=i == n) for i in range(1, n + 1)][-1]

    def num_slices(self, batch: Sequence[Patches]) -> int:
        return max(1, math.ceil(self._cost_s(batch) / self._quantum_s)) if self._quantum_s else 1

    def slice(self, batch: Sequence[Patches], count: int, *, is_last: bool) -> Awaitable[_Made]:
        """One of so many; the last one gives rows."""
        cost_s = self._cost_s(batch)
        self.patch_s = cost_s / sum(item.num_patches for item in batch)
        slowness = 20 if any(item.pixels.flaw == "slow" for item in batch) else 1
        return self.device.run(
            cost_s / count * slowness,
            self._costs.jitter,
            lambda: [self._rows(item) for item in batch if is_last],
            call="encode",
        )

    def _cost_s(self, batch: Sequence[Patches]) -> float:
        num_patches = sum(item.num_patches for item in batch)
        return self._costs.encode_base_s + num_patches * self._costs.encode_per_patch_s

    async def to_host(self, rows: Rows) -> Rows:
        """A copy, though the memory is the host's: one that takes time, as a device's does."""
        return await self._copy(rows, "to_host")

    async def to_device(self, rows: Rows) -> Rows:
        return await self._copy(rows, "to_device")

    async def _copy(self, rows: Rows, call: str) -> Rows:
        def copy() -> Rows:
            return Rows(bytes(rows.buffer()), rows.num_rows, rows.nbytes)

        copied: Rows = await self._pool.run(self._costs.copy_s, self._costs.jitter, copy, call=call)
        return copied

    async def copy_out(self, rows: Rows, views: Sequence[memoryview]) -> None:
        self.on_call("copy_out", views)

        def copy() -> None:
            at = 0
            for view in views:
                view[:] = rows.buffer()[at : at + view.nbytes]
                at += view.nbytes

        await self._pool.run(self._costs.copy_s, self._costs.jitter, copy, call="copy_out")

    def _rows(self, patches: Patches) -> Rows | EncodeFailure:
        image = replace(patches.pixels, adapter=patches.adapter)
        if image.adapter not in {"", *self.held}:
            return EncodeFailure("its adapter is not held here")
        if image.flaw == "unencodable":
            return EncodeFailure("non-finite embeddings")
        self.num_encoded[image.name] = self.num_encoded.get(image.name, 0) + 1
        content = image.rows()
        return Rows(content, image.num_rows, len(content))


@dataclass(slots=True)
class _Launched:
    """A step, and its state for the one launched behind it."""

    failed: set[str]  # who has, or has not been computed yet
    sampled: dict[str, int] = field(default_factory=dict)  # by request

    def note(self, sequence: StepSequence, outcome: Outcome) -> None:
        """Its token behind drafts is not there for the next step."""
        if not isinstance(outcome, StepFailure):
            self.failed.discard(sequence.request_id)
        if isinstance(outcome, TokenLogprobs):
            self.sampled[sequence.request_id] = outcome.token_id

    def known(self, sequence: StepSequence) -> StepSequence:
        """With its token, if it was on its way."""
        if not sequence.is_pending:
            return sequence
        token_id = self.sampled.get(sequence.request_id, PENDING)
        looks_back = sequence.sample is not None and sequence.sample.reads_output
        output_ids = [*sequence.output_ids, token_id] if looks_back else ()
        return replace(sequence, token_ids=(token_id,), output_ids=output_ids)


class SimLanguageEngine(HashStates, KvRecords, LandedKv, Adapting):
    """The `LanguageEngine` port."""

    row_contract: RowContract | None = golden.ROW_CONTRACT
    max_context = 4096
    row_memory: RowMemory  # once attached

    def __init__(
        self,
        device: SimDevice,
        costs: Costs,
        num_blocks: int,
        *,
        num_landing_blocks: int = 0,
        has_state: bool = False,
        window: int | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """`num_landing_blocks`: 0, if KV lands in the pool.  `rank`: of a group of this size."""
        self.kv_layout = layout_of(rank, size, has_state=has_state, window=window)
        super().__init__(device, self.kv_layout.state_shares[rank] if has_state else range(0))
        self._num_state_blocks = self.kv_layout.num_state_blocks
        self.num_blocks, self.kv_in_place = num_blocks, not num_landing_blocks
        self.num_landing_blocks = num_landing_blocks or num_blocks
        self.on_call: OnCall = _unseen
        self.poison = Poison()
        self._is_alone = size == 1
        self._costs = costs
        self._copy_s = costs.copy_s
        self._kv = memoryview(bytearray(num_blocks * BLOCK_NBYTES))
        self.kv_memory = PoolMemory(self._kv) if num_landing_blocks else None
        self._last = _Launched(set())

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        return golden.rope_positions(num_tokens, items)

    def attach_rows(self, memory: RowMemory) -> None:
        self.row_memory = memory

    def lift_rows(self, rows: object) -> object:
        """They are read where they are."""
        return rows

    def kv_views(self, blocks: Sequence[int]) -> list[memoryview]:
        return [self._kv[b * BLOCK_NBYTES : (b + 1) * BLOCK_NBYTES] for b in blocks]

    async def fetch_kv(
        self, slots: Sequence[int], *, in_place: bool, heads: range | None = None
    ) -> list[memoryview]:
        breaks = self.device.process.breaks
        if breaks.meet("fetch_kv"):
            raise breaks.error("fetch_kv")
        size = self.kv_layout.slot_nbytes
        return [self._kv[s * size : (s + 1) * size] for s in slots]

    def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Awaitable[StepResult]:
        if not batch:
            raise EngineError("an empty step")
        self.on_call("step", batch)
        num_tokens = sum(len(sequence.token_ids) for sequence in batch)
        cost_s = self._costs.step_base_s + num_tokens * self._costs.step_per_token_s
        before, self._last = self._last, _Launched({s.request_id for s in batch})
        work = partial(self._forward, batch, before, self._last)
        halfway = None if on_layers is None else partial(self._halfway, batch, before, on_layers)
        run, jitter = self.device.run, self._costs.jitter
        launch = partial(run, cost_s, jitter, work, halfway, call="step")
        return self.poison.step(self.device.process, batch, launch) if self._is_alone else launch()

    def _halfway(
        self, batch: Sequence[StepSequence], before: _Launched, on_layers: OnLayers
    ) -> None:
        """The first layer is computed."""
        for sequence in map(before.known, batch):
            if sequence.request_id not in before.failed and PENDING not in sequence.token_ids:
                self._store(sequence, self._records(sequence, self._prefix(sequence)), last_layer=0)
        on_layers(1)

    def _forward(
        self, batch: Sequence[StepSequence], before: _Launched, now: _Launched
    ) -> StepResult:
        """All prefixes are read before anything is written, as one forward does per layer.

        `before`: the step launched before this one.
        """
        known = [before.known(sequence) for sequence in batch]
        for sequence in known:
            if sequence.request_id not in before.failed:
                self._copy(sequence)
        prefixes = [self._prefix(sequence) for sequence in known]
        outcomes = [
            StepFailure("the step before has failed")
            if sequence.request_id in before.failed
            else self._run(sequence, prefix)
            for sequence, prefix in zip(known, prefixes, strict=True)
        ]
        drafts: dict[int, list[int]] = {}
        for place, (sequence, outcome) in enumerate(zip(batch, outcomes, strict=True)):
            now.note(sequence, outcome)
            last = outcome[-1] if isinstance(outcome, tuple) else outcome
            if sequence.num_wanted and isinstance(last, TokenLogprobs):
                drafts[place] = [last.token_id] * sequence.num_wanted  # as good as any
        return StepResult(outcomes, self.device.elapsed_s, drafts)

    def _run(self, sequence: StepSequence, prefix: bytes) -> Outcome:
        self.poison.meet_in_step(self.device.process, sequence)
        start, table = sequence.start, sequence.block_table[self._num_state_blocks :]
        needed = start + len(sequence.token_ids)
        if PENDING in sequence.token_ids:
            return StepFailure("it waits for a token that the previous step did not sample")
        if sequence.adapter and sequence.adapter not in self.held:
            self.found(f"{sequence.request_id}: a step with an adapter that is not held")
            return StepFailure("its adapter is not held here")
        if needed > self.kv_layout.rows.room(len(table)):
            return StepFailure(f"{needed} tokens do not fit {len(table)} blocks")
        unseen, own = {*self.kv_layout.rows.behind(start)}, list(sequence.block_table)
        if unseen:  # of which some may have another owner
            own = [block for at, block in enumerate(own) if at not in unseen]
        self.check_leased(f"{sequence.request_id} in a step", own)
        written = self._blocks_of(table, range(start, needed))
        written.update(sequence.block_table[: self._num_state_blocks])
        self.check_private(sequence.request_id, written)
        if (indices := prefix[12::RECORD_NBYTES]) != _INDEX_LOW[:start]:
            at = next(at for at in range(start) if indices[at] != _INDEX_LOW[at])
            (block, *_) = self._blocks_of(table, [at])
            self.found(f"{sequence.request_id}: KV of another text in block {block}, token {at}")
        if self.row_contract is not None and self.row_contract.max_uncut and cuts_one(sequence):
            return StepFailure("a chunk that ends in a picture")
        if golden.IMAGE_TOKEN in sequence.token_ids:
            rows = rows_by_position(sequence.spans)
            bare = [start + at for at in placeholders(sequence) if not rows.get(at)]
            if bare:
                self.found(f"{sequence.request_id}: placeholders {bare} are without their rows")
        records = self._records(sequence, prefix)
        self._store(sequence, records, last_layer=NUM_LAYERS - 1)
        kv = prefix + b"".join(records)
        if not sequence.num_drafts:
            self._advance(sequence, prefix, kv[len(prefix) :])
        params, prompt = sequence.sample, _scores(sequence, records)
        if params is None:
            return ChunkScores(prompt) if prompt else None

        def sample(at: int) -> TokenLogprobs | StepFailure:
            known = kv[: (needed - sequence.num_drafts + at) * RECORD_NBYTES]
            said = [*sequence.output_ids, *sequence.drafts[:at]] if at else sequence.output_ids
            past = Past(known, sequence.output_index + at, sequence.prompt_ids, said)
            try:
                token = sampler.sample(past, params)
            except ValueError as error:
                return StepFailure(str(error), by_rules=True)
            return token.with_prompt(prompt) if prompt else token

        if not sequence.num_drafts:
            return sample(0)
        said = verify(sequence.drafts, sample)
        if isinstance(said, tuple):
            self._advance(sequence, prefix, kv[len(prefix) :][: len(said) * RECORD_NBYTES])
        return said

    def _records(self, sequence: StepSequence, prefix: bytes) -> list[bytes]:
        """Of the chunk's tokens."""
        start = sequence.start
        rows, changed = rows_by_position(sequence.spans), sequence.adapter.encode()
        last = prefix[-RECORD_NBYTES:]
        records = []
        for at, token_id in enumerate(sequence.token_ids):
            if sequence.positions is None:
                rope = golden.linear_key(start + at + sequence.rope_delta)
            else:
                rope = golden.rope_key(sequence.positions, at)
            last = golden.record(last, start + at, token_id, rope, rows.get(at, b"") + changed)
            records.append(last)
        return records

    def _copy(self, sequence: StepSequence) -> None:
        """Blocks of states, before anything of the step is read."""
        for pair in sequence.copies:
            self.check_leased(f"{sequence.request_id}, its state in a step", pair)
            self.check_private(sequence.request_id, pair[1:])
            source, target = self.kv_views(pair)
            target[:] = source


def _scores(sequence: StepSequence, records: Sequence[bytes]) -> tuple[TokenLogprobs, ...]:
    """Made of what is ahead of each token, as everything here is."""
    targets = sequence.scoring.targets if sequence.scoring is not None else ()
    return tuple(
        sampler.score_of(record, target) for target, record in zip(targets, records, strict=False)
    )
