"""From a batch of sequences to logits through transformers' own code, on any device.

It runs a stack without states of sequences: transformers' layers, with paged attention behind its
seam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from epd.engine.base import StepSequence
from epd.engine.device.copies import to_device
from epd.engine.language import attention
from epd.engine.language.attention import Extent
from epd.engine.language.forward import sampled_places, scores_of
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.row_splice import RowSplicer

if TYPE_CHECKING:
    from epd.engine.language.lora import Bank
    from epd.engine.language.row_splice import AddedRows
    from epd.engine.language.scoring import Head, Scores


class SeamForward:
    """transformers' decoder stack over the paged attention seam."""

    def __init__(
        self,
        model: Any,
        stack: Any,
        pool: KvPool,
        splicer: RowSplicer | None,
        *,
        multi_axis: bool,
    ) -> None:
        self.pool = pool
        self.bank: Bank | None = None
        self._head: Head = model.lm_head
        self._stack = stack
        self._splicer = splicer
        self._multi_axis = multi_axis
        self._device = stack.embed_tokens.weight.device
        self._sampled: list[int] = []
        attention.register()

    def keep(self, tokens: torch.Tensor) -> None:
        self._sampled = tokens.tolist()

    def replay(self, held: torch.Tensor) -> None:
        """There are no states."""

    def propose(
        self, batch: Sequence[StepSequence], tokens: torch.Tensor, held: torch.Tensor | None
    ) -> None:
        """There is no layer for drafts."""

    def begin_anew(self) -> None:
        self.pool = self.pool.like(1)

    def __call__(
        self, batch: Sequence[StepSequence], sources: Sequence[int]
    ) -> tuple[torch.Tensor, list[Scores]]:
        if self.bank is not None:
            self.bank.begin(batch)
        extents = [Extent(s.start, len(s.token_ids), s.block_table) for s in batch]
        self.pool.clear(attention.fresh_blocks(extents, self.pool.layout.block_size))
        known = [
            s.token_ids if row < 0 else [self._sampled[row]]
            for s, row in zip(batch, sources, strict=True)
        ]
        ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in known])
        embeds = self._stack.embed_tokens(torch.from_numpy(ids).to(self._device))
        added = self._splicer.splice(embeds, batch) if self._splicer is not None else []
        output = self._stack(
            inputs_embeds=embeds[None],
            position_ids=self._positions(batch),
            past_key_values=None,
            use_cache=False,
            paged=attention.plan(extents, self.pool),
            **_deepstack(added, embeds),
        )
        ends: list[int] = (np.cumsum([extent.count for extent in extents]) - 1).tolist()
        wanted = to_device(sampled_places(batch, ends), torch.int64, self._device)
        hidden = output.last_hidden_state[0]
        return self._head(hidden[wanted]), scores_of(self._head, hidden, batch, ends)

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


def _deepstack(added: list[AddedRows], embeds: torch.Tensor) -> dict[str, Any]:
    """The arguments under which transformers takes deepstack rows, if there are any."""
    if not added:
        return {}
    visual = torch.zeros(1, len(embeds), dtype=torch.bool, device=embeds.device)
    added = sorted(added, key=lambda addition: addition.at)
    for addition in added:
        visual[0, addition.at : addition.at + addition.rows.shape[1]] = True
    levels = torch.cat([addition.rows for addition in added], dim=1)
    return {"visual_pos_masks": visual, "deepstack_visual_embeds": list(levels)}
