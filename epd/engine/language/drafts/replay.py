"""States of sequences with drafts: written as soon as the tokens that hold are counted.

Theory of operation
-------------------
A state is overwritten by each token (`state_kinds`), so a rejected draft could not be taken out of
it.  A step reads the states of such a sequence and writes none.  Each layer keeps what its tokens
bring to the state, a few kilobytes each.  When the tokens behind the drafts are chosen, `num_held`
finds on the device how many hold, and these run once more through all layers at once, now to write.
A state is read once more, where a copy behind each token would be written for each of them.
So whatever reads the pool behind a step finds states of accepted tokens alone, as without drafts:
another step, a hand-over, a snapshot.  The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from epd.engine.device.copies import to_device
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.products import Foreign

Replay = Callable[[FlatBatch, KvPool], None]  # writes the states behind the runs of these decodes


@runtime_checkable
class Replays(Protocol):
    """A mixer with states of sequences."""

    @staticmethod
    def expect_drafts(layers: Sequence[Foreign], num_decodes: int) -> Replay:
        """Let all layers of a stack have memory for what so many tokens of a step bring."""


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


def of_held(flat: FlatBatch, firsts: Sequence[int], held: torch.Tensor) -> FlatBatch:
    """What layers replay: of the sequences whose decodes begin at `firsts`, so many tokens."""
    runs = torch.zeros_like(flat.runs)
    runs[to_device(firsts, torch.int64, runs.device)] = held
    shape = flat.shape._replace(num_tiles=0)
    return replace(flat, shape=shape, runs=runs, seq_lens=flat.seq_lens[: len(runs)])
