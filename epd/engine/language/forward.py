"""From a batch of sequences to logits, as few kernels.

`FusedForward` runs stacks that fit `FusedDecoder` and, on CUDA, replays captured graphs where a
step fits one.  Others run through transformers' own code (`seam`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from epd.engine.base import StepSequence
from epd.engine.device.copies import to_device, upload
from epd.engine.language.decode_parts import parts_at_once
from epd.engine.language.drafts.made import Made
from epd.engine.language.drafts.replay import Replay, of_held
from epd.engine.language.flat_batch import (
    FlatBatch,
    FlatSequence,
    Ints,
    by_kind,
    chunks_of,
    pack,
    shape_of,
    view,
)
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.row_splice import RowSplicer, pictures_of

if TYPE_CHECKING:
    from epd.engine.language.decoder import Decoder
    from epd.engine.language.drafts.layer import DraftLayer
    from epd.engine.language.graphs import DecodeGraphs, PartsRecorder, PromptGraphs
    from epd.engine.language.lora import Bank
    from epd.engine.language.row_splice import AddedRows
    from epd.engine.language.scoring import Head, Scores

# Tokens of a prompt that are as many decodes, where its rows are latent: so few read them as they
# lie, and expanding all of them would be more work.
FEW_TOKENS = 8
MAX_SAMPLED = 4096  # rows of a step whose tokens stay on the device for the next


class Forward(Protocol):
    """One forward; `pool` may be exchanged between steps."""

    pool: KvPool
    bank: Bank | None  # of adapters, where there may be some

    def __call__(
        self, batch: Sequence[StepSequence], sources: Sequence[int]
    ) -> tuple[torch.Tensor, list[Scores]]:
        """Logits `[n, vocabulary]`, in the head's precision and the batch's order: a row for each
        sequence that samples, and one more for each of its drafts.  Then the scores of those with a
        `scoring`.

        `sources`: per sequence the row of `sampled` that holds its one token; -1: it has its ids.
        """

    def keep(self, tokens: torch.Tensor) -> None:
        """The tokens that this step samples, for the next one to read."""

    def replay(self, held: torch.Tensor) -> None:
        """Of the sequences of this step that have drafts, `held` tokens count, int32 `[n]`: their
        states are those behind these."""

    def propose(
        self, batch: Sequence[StepSequence], tokens: torch.Tensor, held: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Behind a step that has sampled `tokens`: drafts of those that get some, int64
        `[n, most wanted]`, where the model has a layer for them.  `held`: as for `replay`."""

    def begin_anew(self) -> None:
        """Hold nothing of the pool any more, for another one is to come."""


def sampled_places(batch: Sequence[StepSequence], ends: Sequence[int]) -> list[int]:
    """Where in the row of tokens the step samples; `ends`: each sequence's last token."""
    return [
        place
        for sequence, end in zip(batch, ends, strict=True)
        if sequence.sample is not None
        for place in range(end - sequence.num_drafts, end + 1)
    ]


def scores_of(
    head: Head, hidden: torch.Tensor, batch: Sequence[StepSequence], ends: Sequence[int]
) -> list[Scores]:
    """`hidden`: of all tokens of the step; `ends`: each sequence's last token."""
    scores = []
    for sequence, end in zip(batch, ends, strict=True):
        if sequence.scoring is not None:
            from epd.engine.language.scoring import Scores

            start = end + 1 - len(sequence.token_ids)
            rows = hidden[start : start + len(sequence.scoring.targets)]
            scores.append(Scores(head, rows, sequence.scoring))
    return scores


class FusedForward:
    """A decoder over flat batches; decodes come first, whatever the order of the batch."""

    def __init__(
        self,
        model: Any,
        stack: Any,
        decoder: Decoder,
        pool: KvPool,
        splicer: RowSplicer | None,
        *,
        multi_axis: bool,
        sees_both_ways: bool = False,
    ) -> None:
        """`sees_both_ways`: rows of a picture, in layers with a window."""
        self.pool = pool
        self.bank: Bank | None = None
        self.graphs: DecodeGraphs | None = None  # once captured
        self.prompt_graphs: PromptGraphs | None = None
        self._head: Head = model.lm_head
        self._embedding = stack.embed_tokens
        self._decoder = decoder
        self._splicer = splicer
        self._multi_axis = multi_axis
        self._sees_both_ways = sees_both_ways
        self._others = pool.layout.kinds[1:]  # kinds of rows behind the first, which has no window
        assert not any(kind.window for kind in pool.layout.kinds[:1]), pool.layout.kinds
        self.device = self._device = stack.embed_tokens.weight.device
        self._tile_size = 64 if stack.embed_tokens.weight.dtype == torch.float32 else 128
        self._sampled = torch.zeros(MAX_SAMPLED, dtype=torch.int32, device=self._device)
        self._tables: dict[int, tuple[Any, tuple[Ints, ...]]] = {}
        self._as_decodes = FEW_TOKENS if pool.layout.num_parts == 1 else 1
        self._replay: Replay | None = None  # of states, where drafts are expected
        self._last: FlatBatch | None = None  # the step that was launched last
        self._firsts: list[int] = []  # of its sequences with drafts, the first decode of each
        self.draft_layer: DraftLayer | None = None
        self._made: Made | None = None  # of the last step, where there is one

    def expect_drafts(self, num_decodes: int, num_drafts: int) -> None:
        """In steps of so many decodes, among them tokens of sequences with so many drafts."""
        if self.draft_layer is not None:
            self.draft_layer.num_drafts = num_drafts
        if layers := self._decoder.replays:
            self._replay = layers[0].expect_drafts(layers, num_decodes)

    def propose(
        self, batch: Sequence[StepSequence], tokens: torch.Tensor, held: torch.Tensor | None
    ) -> torch.Tensor | None:
        made, self._made = self._made, None
        if self.draft_layer is None or made is None:
            return None
        if not any(s.is_followed for s in batch):
            self.draft_layer.leave_out(made.flat, self.pool)
            return None
        pairs = [(s, self._flat(s, -1)) for s in batch]
        return self.draft_layer.propose(made, pairs, tokens, held, self.pool)

    def replay(self, held: torch.Tensor) -> None:
        if self._replay is not None and self._last is not None:
            self._replay(of_held(self._last, self._firsts, held), self.pool)

    def begin_anew(self) -> None:
        self.pool, self.graphs, self.prompt_graphs = self.pool.like(1), None, None
        if self.draft_layer is not None:
            self.draft_layer.graphs = None
        torch.cuda.empty_cache()  # what torch has of it counts as taken

    def capture(self, record: PartsRecorder, max_running: int, max_prompt_tokens: int) -> None:
        """Steps of decodes and, up to so many tokens, those with prompts; with the pool that is
        there.  Nothing, where the layers cannot be captured.

        Steps with prompts are recorded in parts, one for each group of layers whose KV leaves by
        itself."""
        from epd.engine.language.graphs import DecodeGraphs, GraphRooms, OnePlace, PromptGraphs

        if not self._decoder.can_be_captured:
            return
        layout, num_others = self.pool.layout, len(self._others)
        size, states = self._block_size, layout.num_state_blocks
        max_indices = max(4 * self.pool.num_blocks, 1 << 16)
        with torch.inference_mode():
            if max_prompt_tokens and self._decoder.captures_prompts:
                self.prompt_graphs = PromptGraphs(
                    partial(self._cut_layers, record.cut),
                    self._embedding.weight[:1],
                    self._splicer.num_deepstack if self._splicer is not None else 0,
                    GraphRooms(
                        max_prompt_tokens,
                        max_running,
                        self._tile_size,
                        states,
                        self._at_once(True),
                        num_others,
                        adapters=self.bank is not None,
                    ),
                    size,
                    self._tile_size,
                    max_indices,
                    record,
                    self._others,
                )
            layer, hidden = self.draft_layer, OnePlace()

            def logits(flat: FlatBatch) -> torch.Tensor:
                rows = self._layers(self._embeds(flat), flat, ())
                return self._head(rows if layer is None else hidden(rows))

            def follow(flat: FlatBatch) -> torch.Tensor:
                assert layer is not None
                count = len(flat.ids)
                return layer.follow(self._sampled[:count], hidden.memory[:count], flat, self.pool)

            self.graphs = DecodeGraphs(
                logits,
                self._device,
                size,
                max_running,
                max_indices,
                record,
                states,
                self._at_once(False),
                self._others,
                follow if layer is not None else None,
                adapters=self.bank is not None,
            )
            if layer is not None and layer.num_drafts:
                layer.capture(record, self.pool, max_running, max_indices)

    def keep(self, tokens: torch.Tensor) -> None:
        self._sampled[: len(tokens)].copy_(tokens)

    def __call__(
        self, batch: Sequence[StepSequence], sources: Sequence[int]
    ) -> tuple[torch.Tensor, list[Scores]]:
        order = sorted(range(len(batch)), key=lambda i: not self._is_decodes(batch[i]))
        parts = [part for i in order for part in self._parts(batch[i], sources[i])]
        ordered = [batch[i] for i in order]
        stops = np.cumsum([len(s.token_ids) for s in ordered]).tolist()
        ends = [stop - 1 for _, stop in sorted(zip(order, stops, strict=True))]
        drafted = [(end, s) for end, s in zip(ends, batch, strict=True) if s.num_drafts]
        self._firsts = [end - s.num_drafts for end, s in drafted]
        adapters = self.bank is not None and any(s.adapter for s in batch)
        if self.graphs is not None and all(
            len(s.token_ids) == 1 + s.num_drafts and s.sample is not None and not s.spans
            for s in ordered
        ):
            logits = self.graphs.replay(parts, adapters=adapters)
            if logits is not None:
                self._last = self.graphs.last
                if self.draft_layer is not None:
                    self._made = Made(self._last, logits, logits, ends, ends, self.graphs.follow)
                return logits, []
        flat, embeds, hidden = self._hidden(parts, ordered, adapters=int(adapters))
        self._last = flat
        sampled = sampled_places(batch, ends)
        if self.draft_layer is not None:
            self._made = Made(flat, embeds, hidden, ends, sampled)
        wanted = to_device(sampled, torch.int64, self._device)
        return self._head(hidden[wanted]), scores_of(self._head, hidden, batch, ends)

    def _hidden(
        self, parts: list[FlatSequence], batch: list[StepSequence], *, adapters: int
    ) -> tuple[FlatBatch, torch.Tensor, torch.Tensor]:
        """The batch on the device, what the first layer read (where the draft layer reads it, too),
        and hidden states."""
        counts = [len(part.ids) for part in parts]
        if self.prompt_graphs is not None:
            needed = shape_of(counts, self._tile_size)._replace(adapters=adapters)
            flat = self.prompt_graphs.fill(parts, needed)
            if flat is not None:
                embeds = self._embeds(flat)
                added = self._splice(embeds, batch)
                told = self._parts_told()
                return flat, embeds, self.prompt_graphs.replay(flat, embeds, added, told)
        num_states, at_once = self.pool.layout.num_state_blocks, self._at_once(max(counts) > 1)
        room = shape_of(counts, self._tile_size, num_states, at_once)
        room = room._replace(num_others=len(self._others), adapters=adapters)
        data, shape = pack(parts, self._block_size, self._tile_size, room, self._others)
        ints, chunks = upload(data, self._device), chunks_of(parts)
        flat = view(ints, shape, self._tile_size, chunks, self._others)
        embeds = self._embeds(flat)
        added = self._splice(embeds, batch)
        first = embeds if self.draft_layer is None else embeds.clone()
        return flat, first, self._layers(embeds, flat, added)

    def _embeds(self, flat: FlatBatch) -> torch.Tensor:
        known = self._sampled[flat.sources.clamp(min=0)]
        torch.where(flat.sources >= 0, known, flat.ids, out=flat.ids)  # layers may read them, too
        return self._decoder.embed(flat.ids)

    def _splice(self, embeds: torch.Tensor, batch: Sequence[StepSequence]) -> list[AddedRows]:
        return self._splicer.splice(embeds, batch) if self._splicer is not None else []

    def _layers(
        self, embeds: torch.Tensor, flat: FlatBatch, added: Sequence[AddedRows]
    ) -> torch.Tensor:
        positions = flat.positions[:, None] if self._multi_axis else flat.positions[:1]
        if self.bank is not None:
            self.bank.places = flat.adapters if flat.shape.adapters else None
        return self._decoder.forward(embeds, positions, flat, self.pool, added)

    def _cut_layers(
        self,
        cut: Callable[[], None],
        embeds: torch.Tensor,
        flat: FlatBatch,
        added: Sequence[AddedRows],
    ) -> torch.Tensor:
        """`_layers`; `cut` is called between the groups of layers whose KV leaves by itself."""
        before, self.pool.on_layers = self.pool.on_layers, lambda num_layers: cut()
        try:
            return self._layers(embeds, flat, added)
        finally:
            self.pool.on_layers = before

    def _parts_told(self) -> Callable[[int], None]:
        """Called with the number of each part of a captured step but the first, before its
        launch."""
        tell, per_slot = self.pool.on_layers, self.pool.layout.layers_per_slot
        return lambda number: tell(number * per_slot) if tell is not None else None

    def _at_once(self, beside_prompts: bool) -> int:
        return parts_at_once(self.pool.layout, beside_prompts=beside_prompts)

    def _parts(self, sequence: StepSequence, source: int) -> list[FlatSequence]:
        """One, or one for each of its tokens: their rows are written before any is read."""
        whole = self._flat(sequence, source)
        if len(whole.ids) == 1 or not self._is_decodes(sequence):
            return [whole]
        at = whole.positions
        run = -len(whole.ids) if sequence.num_drafts else len(whole.ids)
        return [
            replace(
                whole,
                ids=[token],
                start=whole.start + n,
                positions=at + n if isinstance(at, int) else at[:, n : n + 1],
                run=0 if n else run,
            )
            for n, token in enumerate(whole.ids)
        ]

    def _is_decodes(self, sequence: StepSequence) -> bool:
        """Whether each of its tokens is one; of its drafts, each is."""
        count = len(sequence.token_ids)
        return count == 1 + sequence.num_drafts or count <= self._as_decodes

    def _flat(self, sequence: StepSequence, source: int) -> FlatSequence:
        positions = sequence.positions
        if positions is None:
            positions = sequence.start + sequence.rope_delta
        first = self.pool.layout.num_state_blocks
        table, *others = self._table(sequence.block_table)
        return FlatSequence(
            sequence.token_ids,
            sequence.start,
            table[first:],
            positions,
            source,
            table[:first],
            tuple(others),
            pictures_of(sequence) if self._sees_both_ways else (),
            self.bank.place(sequence) if self.bank is not None else -1,
        )

    @property
    def _block_size(self) -> int:
        """Of the first kind of rows."""
        layout = self.pool.layout
        return layout.kinds[0].block_size if layout.kinds else layout.block_size

    def _table(self, table: Any) -> tuple[Ints, ...]:
        """A block table as integers, of each kind of rows; one that is the same object as before is
        not read again."""
        found = self._tables.get(id(table))
        if found is not None and found[0] is table:
            return found[1]
        if len(self._tables) > MAX_SAMPLED:
            self._tables.clear()
        each = by_kind(np.asarray(table, dtype=np.int32), self.pool.layout)
        if isinstance(table, tuple):
            self._tables[id(table)] = (table, each)
        return each
