"""Captured passes of a draft layer over one token of each sequence, fed back on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from epd.engine.language.flat_batch import BatchShape, FlatBatch, FlatSequence, header_size
from epd.engine.language.graphs import Integers, OnePlace, Recorder, least

Draft = Callable[[torch.Tensor, torch.Tensor, FlatBatch], torch.Tensor]


class DraftGraphs:
    """Graphs of `draft`, which maps hidden states, places of tokens and a batch to drafts."""

    def __init__(
        self,
        draft: Draft,
        hidden: torch.Tensor,
        rooms: Sequence[BatchShape],
        block_size: int,
        max_blocks: int,
        record: Recorder,
    ) -> None:
        """`hidden`: memory for as many as the largest room; rooms are rising."""
        self._hidden, self._at = hidden, hidden.new_zeros(len(hidden), dtype=torch.int32)
        self._rooms = {room.num_tokens: room for room in rooms}
        header = header_size(rooms[-1])
        self._integers = Integers(header, max_blocks, block_size, 1, hidden.device, ())
        place = OnePlace()
        self._graphs = {}
        for size, room in reversed(self._rooms.items()):
            self._integers.fill([], room)
            inputs = hidden[:size], self._at[:size], self._integers.view(room)
            self._graphs[size] = record(partial(lambda *those: place(draft(*those)), *inputs))

    def replay(
        self, sequences: Sequence[FlatSequence], hidden: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor | None:
        """int64 `[n, drafts]`, valid until the next replay; None: no graph fits."""
        size = least(list(self._rooms), len(sequences))
        if size is None or not self._integers.fill(sequences, self._rooms[size]):
            return None
        self._hidden[: len(hidden)].copy_(hidden)
        self._at[: len(at)].copy_(at)
        replay, drafts = self._graphs[size]
        replay()
        return drafts[: len(sequences)]
