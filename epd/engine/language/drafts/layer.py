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
launched on the device before the step ends; the host gets the drafts with the tokens.

A draft changes no answer, so a row that the layer lacks costs drafts alone.  The last row of a
block that the prefix cache has found may have been made with another token behind it.

Source: DeepSeek-V3's report; layout of Qwen3-Next (`mtp.*`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from epd.engine.base import StepSequence
from epd.engine.device.copies import to_device, upload
from epd.engine.language.decoder import FusedDecoder
from epd.engine.language.drafts.made import Made
from epd.engine.language.flat_batch import BatchShape, FlatBatch, FlatSequence, header_size, view
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.mixers import MixerFamily
from epd.engine.language.products import Foreign


class DraftLayer:
    """One layer behind a model, which shares its embedding and head."""

    def __init__(
        self, model: Foreign, stack: Foreign, kernels: Foreign, family: MixerFamily
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

    def propose(
        self,
        made: Made,
        batch: Sequence[tuple[StepSequence, FlatSequence]],
        tokens: torch.Tensor,
        held: torch.Tensor | None,
        pool: KvPool,
        *,
        multi_axis: bool,
    ) -> torch.Tensor | None:
        """Its rows of the step's tokens, and int64 `[n, most wanted]` of those with drafts.

        `tokens`: sampled at `made.sampled`; `held`: of sequences with drafts, tokens that hold."""
        following = made.embeds.roll(-1, 0)
        device = following.device
        self._put(following, made.sampled, tokens)
        ends = [end for (s, _), end in zip(batch, made.ends, strict=True) if s.sample is None]
        if ends:
            known = [s.next_id for s, _ in batch if s.sample is None]
            self._put(following, ends, to_device(known, torch.int64, device))
        positions = made.flat.positions
        places = positions[:, None] if multi_axis else positions[:1]
        hidden = self._run(following, made.hidden, places, made.flat, pool)
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
        drafts = [self._head(hidden).argmax(-1)]
        alone = _Alone([batch[i] for i in wishing], more, made.flat.tile_size, pool)
        for _ in range(1, max(batch[i][0].num_wanted for i in wishing)):
            places, flat = alone.next()
            places = places[:, None] if multi_axis else places[:1]
            hidden = self._run(self._decoder.embed(drafts[-1]), hidden, places, flat, pool)
            drafts.append(self._head(hidden).argmax(-1))
        return torch.stack(drafts, 1)

    def _put(self, embeds: torch.Tensor, places: Sequence[int], tokens: torch.Tensor) -> None:
        index = to_device(places, torch.int64, embeds.device)
        embeds[index] = self._decoder.embed(tokens)

    def _run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        flat: FlatBatch,
        pool: KvPool,
    ) -> torch.Tensor:
        pairs = zip((embeds, hidden), self._norms, strict=True)
        rows = torch.cat([self._kernels.norm(x, *norm) for x, norm in pairs], -1)
        return self._decoder.forward(self._join(rows), positions, flat, pool)


class _Alone:
    """Batches of one token of each sequence, behind the last one that holds; its place is on
    the device alone.  Where a table has no room for it, it is computed and not written."""

    def __init__(
        self,
        batch: Sequence[tuple[StepSequence, FlatSequence]],
        more: torch.Tensor,
        tile_size: int,
        pool: KvPool,
    ) -> None:
        """`more`: drafts that hold, int32 `[n]`."""
        self._size = size = pool.layout.block_size
        count, device = len(batch), more.device
        shape = BatchShape(count, count, 0, count)
        tables = [one.table for _, one in batch]
        ends = np.cumsum([0, *map(len, tables)])
        data = np.zeros(header_size(shape) + int(ends[-1]), np.int32)
        f = view(data, shape, tile_size)
        f.cu_q[:] = np.arange(count + 1)
        f.tiles[:, 0] = np.arange(count)
        f.indptr[:] = ends
        np.concatenate(tables, out=f.indices[:])
        f.seq_lens[:] = [s.start + len(s.token_ids) - s.num_drafts for s, _ in batch]
        f.slots[:] = [len(table) * size for table in tables]
        f.positions[:] = [s.rope_delta for s, _ in batch]
        self._flat = view(upload(data, device), shape, tile_size)
        self._at = self._flat.seq_lens + more
        self._room = self._flat.slots.clone()

    def next(self) -> tuple[torch.Tensor, FlatBatch]:
        """Positions int32 `[3, n]` of the next token of each, and the batch."""
        flat, at, size = self._flat, self._at, self._size
        self._at = at + 1
        inside = at < self._room
        kept = torch.minimum(at, self._room - 1)
        blocks = flat.indices[(flat.indptr[:-1] + kept // size).long()]
        slots = torch.where(inside, blocks * size + kept % size, -1)
        return flat.positions + at, replace(flat, slots=slots, seq_lens=kept + 1)
