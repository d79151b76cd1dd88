"""The vision tower of a group of ranks: every rank has all of it and runs a part of each batch.

Theory of operation
-------------------
An image is one rank's work.  Towers are small beside language models, and images come in numbers:
so ranks share out images, not heads.  They meet once for a batch; tensor parallelism would meet
twice in each layer.  The rank of an image follows from the numbers of patches alone, and the number
of its rows from the batch.  So nothing is agreed on but the calls in which ranks meet.

The first rank prepares all images.  Pixels of those that are not its own go to all ranks, one image
after the other: between GPUs that costs less than a layer of the tower.  Behind the tower one
gather gives all rows to all ranks.  Between them no rank needs another, so a run can let steps in
(`slices`).

No rank may stay away from that.  So an image that fails here does not raise: its rows are not
numbers, which fails it, alone, on every rank (fault F13).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from epd.engine.base import Patches
from epd.engine.sharding import Shard
from epd.shares import owners

logger = logging.getLogger(__name__)
Tower = Callable[[Sequence[Patches]], torch.Tensor]  # rows of all images, in order


def kind_of(pixels: Any) -> list[Any]:
    """The name of their type, and their shape; at other ranks it is this already."""
    if isinstance(pixels, torch.Tensor):
        return [str(pixels.dtype), *pixels.shape]
    return list(pixels)


class SharedTower:
    """`Tower` of a group.  Ranks behind the first have only the kind of an image's pixels
    (`kind_of`)."""

    def __init__(
        self,
        tower: Tower,
        upload: Callable[[torch.Tensor], torch.Tensor],
        end: Callable[[], None],
        shard: Shard,
        row_width: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        """`upload`: pixels to the device.  `end` returns when it is time to join the rows."""
        self._tower = tower
        self._upload = upload
        self._end = end
        self._shard = shard
        self._row_width = row_width
        self._like = torch.empty(0, dtype=dtype, device=device)

    def __call__(self, batch: Sequence[Patches]) -> torch.Tensor:
        ranks = owners([p.num_patches for p in batch], self._shard.size)
        counts = [
            [p.num_rows for p, rank in zip(batch, ranks, strict=True) if rank == one]
            for one in range(self._shard.size)
        ]
        shared = [self._shared(p) if rank else p for p, rank in zip(batch, ranks, strict=True)]
        own = [p for p, rank in zip(shared, ranks, strict=True) if rank == self._shard.rank]
        most = max(sum(each) for each in counts)
        rows = self._like.new_zeros(most, self._row_width)
        if own:
            rows[: sum(counts[self._shard.rank])] = self._rows(own)
        self._end()
        gathered = self._shard.collectives.all_gather(rows, 0).split(most)
        parts = [
            iter(piece[: sum(each)].split(each))
            for piece, each in zip(gathered, counts, strict=True)
        ]
        return torch.cat([next(parts[rank]) for rank in ranks])

    def _shared(self, patches: Patches) -> Patches:
        """With its pixels, from the first rank."""
        if self._shard.rank == 0:
            pixels = self._upload(patches.pixels).contiguous()
        else:
            name, *shape = kind_of(patches.pixels)
            dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
            pixels = torch.empty(shape, dtype=dtype, device=self._like.device)
        return replace(patches, pixels=self._shard.collectives.broadcast(pixels))

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
