"""States of sequences with drafts: written as soon as the tokens that hold are counted.

Theory of operation
-------------------
A state is overwritten by each token (`state_kinds`), so a rejected draft could not be taken out of
it.  A step reads the states of such a sequence and writes none.  Each layer keeps what its tokens
bring to the state (`Replays`), a few kilobytes each.  When the tokens behind the drafts are chosen,
`num_held` finds on the device how many hold, and every layer runs those once more, now to write.
So whatever reads the pool behind a step finds states of accepted tokens alone, as without drafts:
another step, a hand-over, a snapshot.  The host waits for nothing.

The tokens that hold are the first of a sequence's chunk.  In `of_held` they are a sequence, and the
rest of the chunk is one more, which is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from epd.engine.device.copies import to_device, upload
from epd.engine.language.flat_batch import (
    BatchShape,
    FlatBatch,
    FlatSequence,
    header_size,
    view,
)
from epd.engine.language.kv_pool import KvPool


@runtime_checkable
class Replays(Protocol):
    """A mixer with states of sequences."""

    def expect_drafts(self, num_tokens: int) -> None:
        """Have memory for what so many tokens of a step bring to states."""

    def replay(self, held: FlatBatch, pool: KvPool) -> None:
        """Write the states behind the tokens of the last step that hold."""


def num_held(
    tokens: torch.Tensor, is_sound: torch.Tensor, drafts: Sequence[tuple[int, Sequence[int]]]
) -> torch.Tensor:
    """int32 `[n]`: tokens of each chunk that are computed for good, as in `engine.base.verify`.

    tokens and is_sound `[rows]`: chosen by the step, and which rows have not failed; drafts: of
    each sequence its first row, and what was drafted behind it."""
    most = max(len(ids) for _, ids in drafts)
    padded = [(*ids, *[-1] * (most - len(ids))) for _, ids in drafts]
    drafted = to_device(padded, tokens.dtype, tokens.device)
    first = to_device([row for row, _ in drafts], torch.int64, tokens.device)
    rows = first[:, None] + torch.arange(most, device=tokens.device)
    last = len(tokens) - 1
    holds = tokens[rows.clamp(max=last)] == drafted
    holds &= is_sound[(rows + 1).clamp(max=last)]
    return (1 + holds.cumprod(1).sum(1)).int()


def of_held(sequences: Sequence[FlatSequence], held: torch.Tensor, tile_size: int) -> FlatBatch:
    """What layers replay: of these sequences, whose chunks follow each other, the first `held`
    tokens each."""
    counts = np.array([len(s.ids) for s in sequences])
    tiles = [(2 * i, at) for i, n in enumerate(counts) for at in range(0, int(n), tile_size)]
    count = len(sequences)
    shape = BatchShape(0, 2 * count, 0, len(tiles), len(sequences[0].state), num_replayed=1)
    data = np.zeros(header_size(shape) + 1, np.int32)
    f = view(data, shape, tile_size)
    f.tiles[:] = tiles
    f.states[:] = -1
    f.states[::2] = [s.state for s in sequences]
    f.deferred[1::2] = 2
    ends = counts.cumsum()
    f.cu_q[0:-1:2], f.cu_q[1::2], f.cu_q[-1] = ends - counts, ends - counts, ends[-1]
    f.seq_lens[::2] = [s.start for s in sequences]
    flat = view(upload(data, held.device), shape, tile_size)
    flat.cu_q[1::2] += held
    flat.seq_lens[::2] += held
    return flat
