"""The vision tower of a group of ranks: every rank has all of it and runs a part of each batch.

Theory of operation
-------------------
An image is one rank's work.  Towers are small beside language models, and images come in numbers:
so ranks share out images, not heads, and meet once for a batch, where tensor parallelism would meet
twice in each layer.  Who has which image follows from the numbers of patches alone, and how many
rows come of it from the batch; so nothing is agreed on but the gather itself, after which all ranks
have all rows.

No rank may stay away from the gather.  So an image that fails here does not raise: its rows are not
numbers, which fails it, alone, on every rank (fault F13).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from epd.engine.base import Patches
from epd.engine.sharding import Shard

logger = logging.getLogger(__name__)
Tower = Callable[[Sequence[Patches]], torch.Tensor]  # rows of all images, in order


def owners(batch: Sequence[Patches], size: int) -> list[int]:
    """The rank of each image: the largest first, each to whoever has fewest patches so far."""
    held = [0] * size
    found = [0] * len(batch)
    for index in sorted(range(len(batch)), key=lambda i: -batch[i].num_patches):
        found[index] = rank = held.index(min(held))
        held[rank] += batch[index].num_patches
    return found


class SharedTower:
    """`Tower` of a group; an item of another rank needs no pixels here."""

    def __init__(
        self, tower: Tower, shard: Shard, row_width: int, dtype: torch.dtype, device: str
    ) -> None:
        self._tower = tower
        self._shard = shard
        self._row_width = row_width
        self._like = torch.empty(0, dtype=dtype, device=device)

    def __call__(self, batch: Sequence[Patches]) -> torch.Tensor:
        ranks = owners(batch, self._shard.size)
        counts = [
            [p.num_rows for p, rank in zip(batch, ranks, strict=True) if rank == one]
            for one in range(self._shard.size)
        ]
        own = [p for p, rank in zip(batch, ranks, strict=True) if rank == self._shard.rank]
        most = max(sum(each) for each in counts)
        rows = self._like.new_zeros(most, self._row_width)
        if own:
            rows[: sum(counts[self._shard.rank])] = self._rows(own)
        gathered = self._shard.collectives.all_gather(rows, 0).split(most)
        parts = [
            iter(piece[: sum(each)].split(each))
            for piece, each in zip(gathered, counts, strict=True)
        ]
        return torch.cat([next(parts[rank]) for rank in ranks])

    def _rows(self, own: Sequence[Patches]) -> torch.Tensor:
        shape = (sum(patches.num_rows for patches in own), self._row_width)
        try:
            rows = self._tower(own)
            if rows.shape == shape:
                return rows
            raise ValueError(f"the tower gave {tuple(rows.shape)} where {shape} was expected")
        except Exception as error:  # any of them may be to blame
            if len(own) > 1:
                return torch.cat([self._rows([patches]) for patches in own])
            logger.warning("the vision tower failed: %s: %s", type(error).__name__, error)
            return self._like.new_full(shape, torch.nan)
