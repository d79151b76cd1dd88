"""The language model of one device: one forward over a mixed batch of prefill chunks and decodes.

Theory of operation
-------------------
The engine holds weights and the KV pool and no request.  A
step checks every sequence alone (what is wrong with one must not cost the others), flattens the
good ones into one row of T tokens, splices embedding rows over their placeholders, runs the decoder
stack through the paged attention seam, takes logits only where a token is to be sampled, and
samples.

Rows wider than the hidden size carry deepstack levels side by side; level d is added to the hidden
states behind decoder layer d, at the places that the chunk's rows cover.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from epd.engine import attention
from epd.engine.attention import Extent
from epd.engine.base import (
    EngineError,
    EngineStats,
    MediaLayout,
    RopePositions,
    Rows,
    RowSpan,
    StepFailure,
    StepResult,
    StepSequence,
)
from epd.engine.executor import DeviceExecutor
from epd.engine.grammar import Grammars
from epd.engine.kv_pool import KvPool
from epd.engine.models.base import ModelAdapter
from epd.engine.sampler import SampleRequest, sample
from epd.messages import KvLayout, RowContract, TokenLogprobs

Outcome = TokenLogprobs | None | StepFailure


class TorchLanguageEngine:
    """`LanguageEngine` over a transformers decoder stack."""

    kv_layout: KvLayout
    num_blocks: int
    row_contract: RowContract | None
    max_context: int

    def __init__(
        self,
        adapter: ModelAdapter,
        model: Any,
        executor: DeviceExecutor,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.kv_layout = adapter.kv_layout(dtype, block_size)
        self.num_blocks = num_blocks
        self.row_contract = adapter.row_contract(dtype) if adapter.has_vision else None
        self.max_context = adapter.max_context
        self.pool = KvPool(self.kv_layout, num_blocks, dtype, device)
        self.stats = EngineStats()
        self._adapter = adapter
        self._executor = executor
        self._stack: Any = adapter.language_model(model)
        self._embedding: torch.nn.Embedding = self._stack.embed_tokens
        self._multi_axis = adapter.rope_positions(1, ()).positions is not None
        self._dtype = dtype
        self._device = torch.device(device)
        self._grammars = Grammars(adapter.checkpoint.directory, self._embedding.num_embeddings)
        attention.register()

    # --- port ---------------------------------------------------------------------------------

    def rope_positions(self, num_tokens: int, items: Sequence[MediaLayout]) -> RopePositions:
        """int64 `[3, num_tokens]` and the decode delta; None for linear positions.

        Raises ValueError when an item does not fit the prompt.
        """
        return self._adapter.rope_positions(num_tokens, items)

    def attach_kv(self, buffer: memoryview) -> None:
        """Place the KV pool into `num_blocks * block_nbytes` bytes.  Once, before any step."""
        self.pool.attach(buffer)

    def kv_views(self, blocks: Sequence[int]) -> list[memoryview]:
        """The bytes of blocks, `block_nbytes` each, without a copy."""
        return self.pool.views(blocks)

    async def step(self, batch: Sequence[StepSequence]) -> StepResult:
        """One forward, then sampling; one outcome per sequence, in order.  Raises EngineError."""
        return await self._executor.launch(self.run, list(batch))

    # --- on the launch thread --------------------------------------------------------------------

    def run(self, batch: Sequence[StepSequence]) -> StepResult:
        """`step`, on the calling thread."""
        started = time.perf_counter()
        outcomes: list[Outcome] = [self._fault(sequence) for sequence in batch]
        good = [i for i, fault in enumerate(outcomes) if fault is None]
        if good:
            try:
                with torch.inference_mode():
                    logits, sampled = self._logits([batch[i] for i in good], good)
                    requests = [self._request(batch[i]) for i in sampled]
                    tokens = sample(logits, requests) if sampled else []
            except Exception as error:
                raise EngineError(f"a step failed: {type(error).__name__}: {error}") from error
            for i, outcome in zip(sampled, tokens, strict=True):
                outcomes[i] = outcome
        elapsed_s = time.perf_counter() - started
        self.stats.steps += 1
        self.stats.tokens += sum(len(batch[i].token_ids) for i in good)
        self.stats.busy_s += elapsed_s
        return StepResult(outcomes, elapsed_s)

    def logits(self, batch: Sequence[StepSequence]) -> torch.Tensor:
        """Logits float32 `[n, vocabulary]` of the n sequences with `sample` set, without sampling.

        For tests and accuracy studies; on the calling thread, and sequences must be sound.
        """
        with torch.inference_mode():
            return self._logits(batch, list(range(len(batch))))[0]

    def warm_up(self) -> None:
        """One small forward in a pool of its own: first touch of weights and code."""
        pool = self.pool
        self.pool = KvPool(self.kv_layout, 1, self._dtype, str(self._device))
        try:
            tokens = [0] * min(8, self.kv_layout.block_size)
            sequence = StepSequence("warm-up", tokens, 0, [0], None)
            with torch.inference_mode():
                self._logits([sequence], [0])
            self._grammars.warm_up()
        finally:
            self.pool = pool

    def _request(self, sequence: StepSequence) -> SampleRequest:
        params = sequence.sample
        assert params is not None
        allowed = None
        if params.grammar:
            allowed = partial(
                self._grammars.allowed, sequence.request_id, params.grammar, sequence.output_ids
            )
        return SampleRequest(
            params, sequence.output_index, sequence.prompt_ids, sequence.output_ids, allowed
        )

    def _fault(self, sequence: StepSequence) -> StepFailure | None:
        """What makes this sequence unfit to run, if anything."""
        count = len(sequence.token_ids)
        total = sequence.start + count
        blocks = -(-total // self.kv_layout.block_size)
        table = sequence.block_table
        vocabulary = self._embedding.num_embeddings
        if count == 0:
            return StepFailure("the chunk has no tokens")
        if total > self.max_context:
            return StepFailure(f"{total} tokens where the model takes {self.max_context}")
        if len(table) < blocks:
            return StepFailure(f"{len(table)} KV blocks where {total} tokens need {blocks}")
        if min(table) < 0 or max(table) >= self.num_blocks:
            return StepFailure(f"a KV block outside the pool of {self.num_blocks}")
        if min(sequence.token_ids) < 0 or max(sequence.token_ids) >= vocabulary:
            return StepFailure(f"a token outside the vocabulary of {vocabulary}")
        if sequence.positions is not None and (
            len(sequence.positions) != 3 or any(len(axis) != count for axis in sequence.positions)
        ):
            return StepFailure(f"positions must be 3 x {count}")
        for span in sequence.spans:
            if fault := self._span_fault(span, count):
                return StepFailure(fault)
        return None

    def _span_fault(self, span: RowSpan, count: int) -> str:
        if self.row_contract is None:
            return "this model takes no images"
        if span.at < 0 or span.count < 1 or span.at + span.count > count:
            return f"rows [{span.at}, {span.at + span.count}) outside the chunk of {count} tokens"
        if isinstance(span.rows, Rows):
            held, rest = span.rows.num_rows, 0
        else:
            nbytes = [memoryview(view).nbytes for view in span.rows]
            held = sum(nbytes) // self.row_contract.row_nbytes
            rest = sum(n % self.row_contract.row_nbytes for n in nbytes)
        if rest or span.row_start < 0 or span.row_start + span.count > held:
            return (
                f"rows [{span.row_start}, {span.row_start + span.count}) of an item that holds "
                f"{held} whole rows"
            )
        return ""

    def _logits(
        self, batch: Sequence[StepSequence], names: Sequence[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits of the sequences that sample, and their `names`."""
        extents = [Extent(s.start, len(s.token_ids), s.block_table) for s in batch]
        self.pool.clear(attention.fresh_blocks(extents, self.kv_layout.block_size))
        ids = np.concatenate([np.asarray(s.token_ids, dtype=np.int64) for s in batch])
        embeds = self._embedding(torch.from_numpy(ids).to(self._device))
        extra = self._splice(embeds, batch)
        output = self._stack(
            inputs_embeds=embeds[None],
            position_ids=self._positions(batch),
            past_key_values=None,
            use_cache=False,
            paged=attention.plan(extents, self.pool),
            **extra,
        )
        ends = np.cumsum([extent.count for extent in extents]) - 1
        wanted = [i for i, sequence in enumerate(batch) if sequence.sample is not None]
        hidden = output.last_hidden_state[0, torch.from_numpy(ends[wanted])]
        return self.model.lm_head(hidden).float(), [names[i] for i in wanted]

    def _positions(self, batch: Sequence[StepSequence]) -> torch.Tensor:
        """int64 `[3, 1, T]`, or `[1, T]` for linear positions."""
        axes: list[np.ndarray[Any, Any]] = []
        for sequence in batch:
            if sequence.positions is None:
                first = sequence.start + sequence.rope_delta
                line = np.arange(first, first + len(sequence.token_ids))
                axes.append(np.broadcast_to(line, (3, len(line))))
            else:
                axes.append(np.asarray(sequence.positions, dtype=np.int64))
        positions = torch.from_numpy(np.concatenate(axes, axis=1)).to(self._device)
        return positions[:, None] if self._multi_axis else positions[:1]

    def _splice(self, embeds: torch.Tensor, batch: Sequence[StepSequence]) -> dict[str, Any]:
        """Put rows over placeholders, in place; gives the deepstack arguments, if any."""
        hidden = embeds.shape[-1]
        placed: list[tuple[int, torch.Tensor]] = []
        first = 0
        for sequence in batch:
            placed += [(first + span.at, self._rows(span)) for span in sequence.spans]
            first += len(sequence.token_ids)
        for at, rows in placed:
            embeds[at : at + len(rows)] = rows[:, :hidden]
        if not placed or self.row_contract is None or not self.row_contract.num_deepstack:
            return {}
        visual = torch.zeros(1, len(embeds), dtype=torch.bool, device=self._device)
        placed.sort(key=lambda entry: entry[0])
        for at, rows in placed:
            visual[0, at : at + len(rows)] = True
        deepstack = torch.cat([rows[:, hidden:] for _, rows in placed])
        return {
            "visual_pos_masks": visual,
            "deepstack_visual_embeds": list(deepstack.split(hidden, dim=-1)),
        }

    def _rows(self, span: RowSpan) -> torch.Tensor:
        """The rows of a span, `[count, row_width]`, from one tensor or from byte views."""
        stop = span.row_start + span.count
        if isinstance(span.rows, Rows):
            return span.rows.tensor[span.row_start : stop].to(self._device)
        assert self.row_contract is not None
        contract = self.row_contract
        rows = torch.empty(span.count, contract.row_width, dtype=self._dtype)
        target = rows.view(torch.uint8).numpy()
        first = 0  # index of the first row of the view among the item's rows
        for view in span.rows:
            held = np.frombuffer(view, dtype=np.uint8).reshape(-1, contract.row_nbytes)
            low, high = max(first, span.row_start), min(first + len(held), stop)
            if low < high:
                at = low - span.row_start
                target[at : at + high - low] = held[low - first : high - first]
            first += len(held)
        return rows.to(self._device)
