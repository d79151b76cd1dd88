"""Drafts by a layer of the checkpoint's own (multi-token prediction).

Theory of operation
-------------------
The layer reads the hidden state of a token, which the model has made, and the embedding of the
token that follows.  It gives the hidden state of the one behind that.  It has attention, so it has
rows of its own in the pool: one more layer of the same layout (`ModelAdapter.paged_rows`), which a
prompt's blocks have too.  So hand-over, migration and prefix cache hold them as any layer's.

Behind each step, with or without drafts, it runs once over all tokens of the step (`propose`).  The
token that follows is there for each: of the chunk, of the prompt, or as the step has sampled it.
Its row behind a rejected draft is written again by the next step, like those of other layers.  For
sequences with drafts it goes on alone, from its own draft, a token at a time.  All of that is
launched on the device before the step ends; the host gets the drafts with the tokens.  Behind
decodes both are captured.

A draft changes no answer, so a row that the layer lacks costs drafts alone.  The last row of a
block that the prefix cache has found may have been made with another token behind it.  Where drafts
do not pay, steps leave the layer out (`StepSequence.is_followed`), and its rows are zeros.

Source: DeepSeek-V3's report; layout of Qwen3-Next (`mtp.*`), or of DeepSeek-V3 (`Family.told`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch

from epd.engine.base import StepSequence
from epd.engine.device.copies import to_device, upload
from epd.engine.language.decode_parts import parts_at_once
from epd.engine.language.decoder import FusedDecoder
from epd.engine.language.drafts.made import Made
from epd.engine.language.flat_batch import FlatBatch, FlatSequence, pack, shape_of, view
from epd.engine.language.graphs import DecodeGraphs, Recorder
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.mixers import MixerFamily
from epd.engine.language.products import Foreign


class DraftLayer:
    """One layer behind a model, which shares its embedding and head."""

    def __init__(
        self,
        model: Foreign,
        stack: Foreign,
        kernels: Foreign,
        family: MixerFamily,
        *,
        multi_axis: bool,
    ) -> None:
        """model.mtp has `fc`, two norms before it, `layers` and `norm`."""
        module = model.mtp
        like = SimpleNamespace(
            embed_tokens=stack.embed_tokens,
            rotary_emb=stack.rotary_emb,
            norm=module.norm,
            layers=module.layers,
        )
        self._decoder = FusedDecoder(like, kernels, family)
        self._kernels = kernels
        norms = module.pre_fc_norm_embedding, module.pre_fc_norm_hidden
        self._norms = [family.fused_norm(norm) for norm in norms]
        self._join = module.fc
        self._head = model.lm_head
        self.num_drafts = 0  # at once, of a sequence
        self._multi_axis = multi_axis
        self.graphs: DecodeGraphs | None = None

    def capture(self, record: Recorder, pool: KvPool, max_sequences: int, max_indices: int) -> None:
        """What it drafts for up to so many sequences."""
        embeds = self._decoder.embed.weight
        hidden = embeds.new_zeros(max_sequences, embeds.shape[1])
        self._inputs = hidden, hidden.new_zeros(max_sequences, dtype=torch.int32)

        def draft(flat: FlatBatch) -> torch.Tensor:
            hidden, at = (part[: len(flat.ids)] for part in self._inputs)
            return self._draft(hidden, at, flat, pool)

        sizes = pool.layout.block_size, max_sequences, max_indices, record, 0, _at_once(pool)
        self.graphs = DecodeGraphs(draft, hidden.device, *sizes)

    def follow(
        self, tokens: torch.Tensor, hidden: torch.Tensor, flat: FlatBatch, pool: KvPool
    ) -> torch.Tensor:
        """`[T, H]` behind these tokens, each of which follows one of the batch."""
        return self._run(self._decoder.embed(tokens), self._known(hidden), flat, pool)

    def leave_out(self, flat: FlatBatch, pool: KvPool) -> None:
        """Nobody is to be drafted: in place of its rows nothing, and no former tenant's."""
        pool.blank(pool.layout.num_layers - 1, flat.slots)

    def propose(
        self,
        made: Made,
        batch: Sequence[tuple[StepSequence, FlatSequence]],
        tokens: torch.Tensor,
        held: torch.Tensor | None,
        pool: KvPool,
    ) -> torch.Tensor | None:
        """Its rows of the step's tokens, and int64 `[n, drafts]` of those that get some.

        `tokens`: sampled at `made.sampled`; `held`: of sequences with drafts, tokens that hold."""
        device = tokens.device
        if made.follow is not None:
            hidden = made.follow()
        else:
            following = made.embeds.roll(-1, 0)
            self._put(following, made.sampled, tokens)
            ends = [end for (s, _), end in zip(batch, made.ends, strict=True) if s.sample is None]
            if ends:
                known = [s.next_id for s, _ in batch if s.sample is None]
                self._put(following, ends, to_device(known, torch.int64, device))
            hidden = self._run(following, self._known(made.hidden), made.flat, pool)
        wishing = [i for i, (s, _) in enumerate(batch) if s.num_wanted and s.sample is not None]
        if not wishing:
            return None
        more = torch.zeros(len(batch), dtype=torch.int32, device=device)
        drafted = [i for i, (s, _) in enumerate(batch) if s.num_drafts]
        if held is not None:
            more[to_device(drafted, torch.int64, device)] = held - 1
        more = more[to_device(wishing, torch.int64, device)]
        firsts = [made.ends[i] - batch[i][0].num_drafts for i in wishing]
        hidden = hidden[to_device(firsts, torch.int64, device) + more]
        behind = [_behind(*batch[i], self.num_drafts, pool) for i in wishing]
        sequences = [batch[i][0] for i in wishing]
        starts = [s.start + len(s.token_ids) - s.num_drafts for s in sequences]
        at = to_device(starts, torch.int32, device) + more
        if self.graphs is not None and len(behind) <= len(self._inputs[0]):
            for place, part in zip(self._inputs, (hidden, at), strict=True):
                place[: len(part)].copy_(part)
            drafts = self.graphs.replay(behind)
            if drafts is not None:
                return drafts
        room = shape_of([1] * len(behind), 1, 0, _at_once(pool))
        data, shape = pack(behind, pool.layout.block_size, 1, room)
        return self._draft(hidden, at, view(upload(data, device), shape, 1), pool)

    def _draft(
        self, hidden: torch.Tensor, at: torch.Tensor, flat: FlatBatch, pool: KvPool
    ) -> torch.Tensor:
        """Behind hidden states `[n, H]`, whose next tokens have the places `at`: int64
        `[n, drafts]`."""
        drafts = [self._best(hidden)]
        for number in range(self.num_drafts - 1):
            batch = _at(flat, at + number, pool.layout.block_size)
            hidden = self._run(self._decoder.embed(drafts[-1]), hidden, batch, pool)
            drafts.append(self._best(hidden))
        return torch.stack(drafts, 1)

    def _known(self, hidden: torch.Tensor) -> torch.Tensor:
        """What it begins with, by the model's hidden states."""
        return hidden

    def _best(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden).argmax(-1)

    def _put(self, embeds: torch.Tensor, places: Sequence[int], tokens: torch.Tensor) -> None:
        index = to_device(places, torch.int64, embeds.device)
        embeds[index] = self._decoder.embed(tokens)

    def _run(
        self, embeds: torch.Tensor, hidden: torch.Tensor, flat: FlatBatch, pool: KvPool
    ) -> torch.Tensor:
        pairs = zip((embeds, hidden), self._norms, strict=True)
        rows = torch.cat([self._kernels.norm(x, *norm) for x, norm in pairs], -1)
        places = flat.positions[:, None] if self._multi_axis else flat.positions[:1]
        return self._decoder.forward(self._join(rows), places, flat, pool)


def _at_once(pool: KvPool) -> int:
    return parts_at_once(pool.layout, beside_prompts=False)


def _behind(
    sequence: StepSequence, flat: FlatSequence, num_drafts: int, pool: KvPool
) -> FlatSequence:
    """The last token that may be drafted, if its table has room for it; `positions`: what is to be
    added to a token's place."""
    end = sequence.start + len(sequence.token_ids) + num_drafts
    start = min(end, len(flat.table) * pool.layout.block_size) - 1
    return FlatSequence([0], start, flat.table, sequence.rope_delta)


def _at(flat: FlatBatch, at: torch.Tensor, block_size: int) -> FlatBatch:
    """A token of each sequence of `_behind`, whose place is on the device alone.  Where a table has
    no room for it, it is computed and not written.  Parts of keys end with it, or have none."""
    kept = torch.minimum(at, flat.seq_lens - 1)
    blocks = flat.indices[(flat.indptr[:-1] + kept // block_size).long()]
    slots = torch.where(at == kept, blocks * block_size + kept % block_size, -1)
    parts = flat.parts.clone()
    ends = (kept + 1)[parts[:, 0].clamp(min=0).long()]
    parts[:, 2] = torch.minimum(parts[:, 2], ends)
    positions = flat.positions + at
    return replace(flat, slots=slots, seq_lens=kept + 1, parts=parts, positions=positions)
