"""The language model of one device: one forward over a mixed batch of prefill chunks and decodes.

Theory of operation
-------------------
The engine holds weights and the KV pool and no request.  A step checks every sequence alone, so
that one with a fault fails alone.  It runs one forward over the good ones, takes logits only where
a token is to be sampled, and samples.

In a group each rank runs all steps over its shard of the model.  The first rank alone chooses
tokens, so ranks cannot disagree, and it alone has log-probabilities and failures of sequences.

A step has two halves.  The first runs on the launch thread and queues everything the device is to
do; it waits for nothing.  The second (`Deferred.finish`) turns what has arrived in host memory into
outcomes, once the device has passed the step.  Between them the next step may be launched already.
A sequence whose token is still on its way has PENDING in its place; the device takes the token from
the sampler's memory.  Only a grammar needs that token here: the launch thread waits for it, with
the forward of this step queued already, so that the device does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.adapter_list import WithBank
from epd.engine.base import (
    Buffer,
    ChunkScores,
    EngineError,
    MediaLayout,
    OnLayers,
    Outcome,
    RopePositions,
    RowMemory,
    StepFailure,
    StepResult,
    StepSequence,
    verify,
)
from epd.engine.device.copies import to_host
from epd.engine.device.executor import Deferred, DeviceExecutor
from epd.engine.device.stopwatch import Stopwatch
from epd.engine.language.drafts.replay import num_held
from epd.engine.language.forward import Forward
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.logit_rules import Bits, SampleRequest
from epd.engine.language.sampler import Draft, SampledStep, SentTokens
from epd.engine.language.step_check import StepCheck
from epd.engine.sharding import WHOLE, Shard
from epd.messages import TokenLogprobs
from epd.model_files.grammar import Grammars

if TYPE_CHECKING:
    from epd.engine.language.kv_hop import KvHop
    from epd.engine.language.row_lift import RowLift
    from epd.engine.language.scoring import Scores


class TorchLanguageEngine(WithBank):
    row_memory: RowMemory  # once attached

    def __init__(
        self,
        adapter: ModelAdapter,
        model: Any,
        forward: Forward,
        executor: DeviceExecutor,
        dtype: torch.dtype = torch.float32,
        num_landing_blocks: int = 0,
        kv_leaving_nbytes: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        self.loaded = adapter, model, forward  # all that needs no plan of memory
        self._adapter, self.model, self.forward = self.loaded
        self.kv_layout = forward.pool.layout
        self.num_blocks = forward.pool.num_blocks
        self.row_contract = adapter.row_contract(dtype) if adapter.has_vision else None
        self.max_context = adapter.max_context
        self.kv_in_place = executor.streams is None
        self._hop: KvHop | None = None
        if executor.streams is not None:
            from epd.engine.language.kv_hop import KvHop

            self._hop = KvHop(forward.pool, executor.streams, kv_leaving_nbytes)
        self.detach = (self._hop or forward.pool).detach  # what a life has attached
        self.kv_memory = forward.pool.lies_in
        self.num_landing_blocks = self.num_blocks if self.kv_in_place else num_landing_blocks
        self._executor = executor
        self._shard = shard
        vocabulary = adapter.language_model(model).embed_tokens.num_embeddings
        self.bank = forward.bank
        self._check = StepCheck(
            self.max_context,
            self.kv_layout.rows,
            self.kv_layout.num_state_blocks,
            self.num_blocks,
            vocabulary,
            self.row_contract,
            self.bank,
        )
        self._grammars = Grammars(adapter.checkpoint.directory, vocabulary)
        self._dtype = dtype
        self._lift: RowLift | None = None
        self._last = SampledStep()

    @property
    def pool(self) -> KvPool:
        return self.forward.pool

    # --- port ---------------------------------------------------------------------------------

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        """int64 `[3, num_tokens]` and the decode delta; None for linear positions.

        Raises ValueError when an item does not fit the prompt.
        """
        return self._adapter.rope_positions(num_tokens, items)

    def attach_kv(self, buffer: memoryview) -> None:
        if self._hop is not None:
            self._hop.attach(buffer)
        else:
            self.pool.attach(buffer)

    def attach_rows(self, memory: RowMemory) -> None:
        self.row_memory = memory
        if self._hop is not None:
            self._hop.attach_rows(memory.buffer)
            if self.row_contract is not None and self._shard.size == 1:
                from epd.engine.language.row_lift import RowLift

                at = self._executor, self._executor.streams
                self._lift = RowLift(self.row_contract, self._dtype, *at, memory.buffer.nbytes)

    def lift_rows(self, rows: object) -> object:
        if self._lift is None or not isinstance(rows, list):
            return rows
        return self._lift(rows)

    async def fetch_kv(
        self, slots: Sequence[int], *, in_place: bool, heads: range | None = None
    ) -> Sequence[Buffer]:
        """The bytes of slots that are final, to be sent; on a GPU a copy in host memory, or where
        they lie (`KvSource`).  Heads are copied, on a GPU in its memory if that can be sent."""
        if self._hop is None:
            return self.pool.slot_views(slots) if heads is None else [self._heads(slots, heads)]
        if in_place and heads is None:
            return [self._hop.source(slots)]
        fetch: Any = self._hop.fetch
        if heads is not None:
            fetch = partial(self._hop.fetch_heads, heads=heads, in_place=in_place)
        return list(await self._executor.launch_brief(fetch, tuple(slots)))

    async def land_kv(
        self, memory: Buffer, slots: Sequence[int], blocks: Sequence[int], *, by_head: bool = False
    ) -> None:
        if self._hop is not None:
            land: Any = partial(self._hop.land, by_head=by_head)
            await self._executor.launch_brief(land, memory, tuple(slots), tuple(blocks))
        elif by_head:
            from epd.groups.device.kv_heads import put_blocks

            index = torch.tensor(blocks)
            put_blocks(self.pool, index, self.pool.memory[torch.tensor(slots)])

    async def fetch_state(
        self, blocks: Sequence[int], heads: range, *, in_place: bool
    ) -> Sequence[Buffer]:
        from epd.groups.device.state_moves import take_states

        if (hop := self._hop) is None:
            taken = take_states(self.pool, torch.tensor(blocks), heads)
            return [memoryview(taken.view(-1).numpy())]
        fetched: asyncio.Future[list[Buffer]] = self._executor.launch_brief(
            lambda: hop.fetch_state(blocks, heads, in_place=in_place)
        )
        return await fetched

    async def land_state(
        self,
        memory: Buffer,
        slots: Sequence[int],
        blocks: Sequence[int],
        pieces: Sequence[tuple[range, int]],
    ) -> None:
        from epd.groups.device.state_moves import put_states

        if (hop := self._hop) is not None:
            landed: asyncio.Future[None] = self._executor.launch_brief(
                lambda: hop.land_state(memory, slots, blocks, pieces)
            )
            await landed
        else:
            came = self.pool.memory[torch.tensor(slots)].view(-1)  # a copy
            put_states(self.pool, torch.tensor(blocks), came, pieces)

    def _heads(self, slots: Sequence[int], heads: range) -> memoryview:
        from epd.groups.device.kv_heads import take_heads

        return memoryview(take_heads(self.pool, torch.tensor(slots), heads).numpy()).cast("B")

    def step(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Awaitable[StepResult]:
        if on_layers is None:
            return self._executor.launch(self._launch, list(batch))
        loop, told = asyncio.get_running_loop(), on_layers

        def launched(num_layers: int) -> None:
            self._executor.mark(loop, partial(told, num_layers))

        return self._executor.launch(self._launch, list(batch), launched)

    # --- on the launch thread --------------------------------------------------------------------

    def run(self, batch: Sequence[StepSequence]) -> StepResult:
        """`step`, on the calling thread, waiting for the device."""
        launched = self._launch(batch)
        if self.pool.memory.is_cuda:
            torch.cuda.synchronize()
        return launched.finish()

    def _launch(
        self, batch: Sequence[StepSequence], on_layers: OnLayers | None = None
    ) -> Deferred[StepResult]:
        """`on_layers(n)` is called when the first n layers' KV is launched."""
        self.pool.on_layers = on_layers
        try:
            return self._launch_step(batch)
        finally:
            self.pool.on_layers = None

    def _launch_step(self, batch: Sequence[StepSequence]) -> Deferred[StepResult]:
        watch = Stopwatch(on_gpu=not self.kv_in_place)
        outcomes: list[Outcome] = []
        last, self._last = self._last, SampledStep()  # a step that raises has sampled nothing
        for sequence in batch:
            fault = self._check.fault(sequence, last.rows)
            outcomes.append(StepFailure(fault) if fault else None)
        good = [i for i, fault in enumerate(outcomes) if fault is None]
        asked = [i for i in good if batch[i].sample is not None]
        draft: Draft | SentTokens | None = None
        scores: list[Scores] = []
        held = proposed = None
        if good:
            try:
                with torch.inference_mode():
                    logits, scores = self._logits([batch[i] for i in good], last.rows)
                    if asked:
                        draft = self._draft(logits, [batch[i] for i in asked], last)
                        self.forward.keep(draft.tokens)
                        held = self._settle(draft, [batch[i] for i in asked])
                    tokens = draft.tokens if draft is not None else logits.argmax(-1)  # none
                    made = self.forward.propose([batch[i] for i in good], tokens, held)
                    proposed = to_host(made) if made is not None else None
            except Exception as error:
                raise EngineError(f"a step failed: {type(error).__name__}: {error}") from error
        watch.stop()

        def finish() -> StepResult:
            if draft is not None:
                outcome, row = draft.finish(), 0
                for i in asked:
                    outcomes[i] = _said(batch[i], row, outcome)
                    row += 1 + batch[i].num_drafts
            scored = [i for i in good if batch[i].scoring is not None]
            for i, found in zip(scored, scores, strict=True):
                outcomes[i] = _with_prompt(outcomes[i], found.finish())
            wishing = [i for i in asked if batch[i].num_wanted]
            drafts = proposed.tolist() if proposed is not None else []
            made = {i: ids[: batch[i].num_wanted] for i, ids in zip(wishing, drafts, strict=False)}
            return StepResult(outcomes, watch.elapsed_s(), made)

        return Deferred(finish)

    def _draft(
        self, logits: torch.Tensor, batch: Sequence[StepSequence], last: SampledStep
    ) -> Draft | SentTokens:
        """Of the sequences that sample.  Those with drafts are not in `last` for the next step:
        which of their tokens is the last is open.  The first rank draws and sends the tokens to the
        others."""
        rows: dict[str, int] = {}
        count = 0
        for sequence in batch:
            if not sequence.num_drafts:
                rows[sequence.request_id] = count
            count += 1 + sequence.num_drafts
        broadcast = self._shard.collectives.broadcast
        if self._shard.rank:
            self._last = SampledStep(rows)
            return SentTokens(
                broadcast(torch.empty(count, dtype=torch.int64, device=logits.device))
            )
        requests = [request for sequence in batch for request in self._requests(sequence, last)]
        draft = Draft(logits, requests, last.draft.tokens if last.draft is not None else None)
        broadcast(draft.tokens)
        is_asked = any(request.allowed is not None for request in requests)
        self._last = SampledStep(rows, draft, self._executor.here() if is_asked else None)
        return draft

    def _settle(
        self, draft: Draft | SentTokens, batch: Sequence[StepSequence]
    ) -> torch.Tensor | None:
        """States of those with drafts are written behind the count of those that hold.  Gives of
        how many tokens each holds, int32, where anything on the device asks."""
        drafted, row = [], 0
        for sequence in batch:
            if sequence.num_drafts:
                drafted.append((row, sequence))
            row += 1 + sequence.num_drafts
        if not (drafted and (self.kv_layout.tensors or self._adapter.has_drafts)):
            return None
        if isinstance(draft, Draft):
            drafts = [(row, sequence.drafts) for row, sequence in drafted]
            held = num_held(draft.tokens, draft.is_sound(), drafts)
        else:
            held = draft.tokens.new_empty(len(drafted), dtype=torch.int32)
        self._shard.collectives.broadcast(held)
        self.forward.replay(held)
        return held

    def _logits(
        self, batch: Sequence[StepSequence], sampled: Mapping[str, int] = MappingProxyType({})
    ) -> tuple[torch.Tensor, list[Scores]]:
        self.pool.copy([pair for sequence in batch for pair in sequence.copies])
        sources = [sampled[s.request_id] if s.is_pending else -1 for s in batch]
        return self.forward(batch, sources)

    def logits(self, batch: Sequence[StepSequence]) -> torch.Tensor:
        """Logits float32 `[n, vocabulary]` of the sequences with `sample` set, without sampling: a
        row for each, and one more for each of its drafts.

        For tests and accuracy studies; on the calling thread, and sequences must be sound.
        """
        with torch.inference_mode():
            return self._logits(batch)[0].float()

    def warm_up(self) -> None:
        """One small forward in a pool of its own: first touch of weights and code."""
        pool = self.pool
        layout = self.kv_layout
        table = list(range(layout.num_state_blocks + layout.rows.count(layout.block_size)))
        self.forward.pool = pool.like(len(table))
        try:
            tokens = [0] * min(8, layout.block_size)
            with torch.inference_mode():
                self._logits([StepSequence("warm-up", tokens, 0, table, None, adapter="nobody's")])
            self._grammars.warm_up()
        finally:
            self.forward.pool = pool

    def _requests(self, sequence: StepSequence, last: SampledStep) -> Iterator[SampleRequest]:
        """One for each row of logits; its output is the sequence's and the drafts before it."""
        params, drafts = sequence.sample, sequence.drafts
        assert params is not None
        pending = last.rows[sequence.request_id] if sequence.is_pending else -1
        for at in range(1 + sequence.num_drafts):
            said = [*sequence.output_ids, *drafts[:at]] if at else sequence.output_ids
            allowed = None
            if params.grammar:
                allowed = partial(self._allowed, sequence, said, last, pending)
            index = sequence.output_index + at
            yield SampleRequest(params, index, sequence.prompt_ids, said, allowed, pending)

    def _allowed(
        self, sequence: StepSequence, said: Sequence[int], last: SampledStep, pending: int
    ) -> Bits:
        """The tokens that a grammar admits behind `said`; waits for the token that is on its
        way."""
        params = sequence.sample
        assert params is not None
        if pending >= 0:
            said = [*said, last.token(pending)]
        ends = params.stop_token_ids
        return self._grammars.allowed(sequence.request_id, params.grammar, said, ends)


def _with_prompt(outcome: Outcome, prompt: tuple[TokenLogprobs, ...]) -> Outcome:
    """What a chunk of a prompt came to, with the scores of its tokens."""
    if outcome is None:
        return ChunkScores(prompt)
    if isinstance(outcome, TokenLogprobs):
        return outcome.with_prompt(prompt)
    return outcome


def _said(
    sequence: StepSequence, row: int, outcome: Callable[[int], TokenLogprobs | StepFailure]
) -> Outcome:
    """Of a sequence whose first sampled row is `row`."""
    if not sequence.num_drafts:
        return outcome(row)
    return verify(sequence.drafts, lambda at: outcome(row + at))
