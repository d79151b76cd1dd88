"""LoRA adapters of a vision tower's linear layers, mixed in one batch of images.

Theory of operation
-------------------
Layers are those of `language/lora`.  A tower's product has rows of the batch's images in their
order.  Each image has its share of the patches: patches, merged ones, or patches with a mark for
each tile.  So the place of each row follows from the number of rows.  Families of which this is so
have `adapts_tower`.  An adapter that would change another tower is refused.

A captured run is over any images, so the places of its patches lie in memory that it reads.

Adapters come and go between batches, never between the slices of one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from epd.config import EngineConfig
from epd.engine.base import Patches
from epd.engine.device.copies import to_device
from epd.engine.language.lora import Bank
from epd.engine.sharding import Shard

if TYPE_CHECKING:
    from epd.engine.adapter import ModelAdapter


class TowerBank(Bank):
    WHERE = "the vision tower's linear layers that adapters may change here"

    def begin_batch(self, batch: Sequence[Patches]) -> None:
        """Of these images, in this order.  Raises LookupError."""
        self.places = None
        if any(patches.adapter for patches in batch):
            if not {patches.adapter for patches in batch} <= {"", *self.held}:
                raise LookupError("its adapter is not held here")
            places = [self._places.get(patches.adapter, -1) for patches in batch]
            self.begin_run(
                to_device(places, torch.int32, self._device), [p.num_patches for p in batch]
            )

    def begin_run(self, places: torch.Tensor | None, counts: Sequence[int]) -> None:
        """Over parts of a batch, of so many patches each."""
        self.places, self._counts = places, counts
        self._given: dict[int, torch.Tensor] = {}  # by the number of rows

    def places_of(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.places is None:
            return None
        if (rows := x.numel() // x.shape[-1]) not in self._given:
            shares = [divmod(count * rows, sum(self._counts)) for count in self._counts]
            if any(rest for _, rest in shares):
                raise ValueError(f"{rows} rows are not shared out as the patches of the images")
            if len(set(shares)) == 1:  # a run that is captured must not send numbers
                self._given[rows] = self.places[:, None].expand(-1, shares[0][0]).flatten()
            else:
                repeats = to_device([share for share, _ in shares], torch.int32, self._device)
                self._given[rows] = self.places.repeat_interleave(repeats, output_size=rows)
        return self._given[rows]

    @staticmethod
    def is_own(*, is_seen: bool) -> bool:
        return is_seen


def bank_of(
    adapter: ModelAdapter, model: nn.Module, config: EngineConfig, shard: Shard
) -> TowerBank:
    """Of a loaded model, with the adapters of the configuration.  Raises ModelError."""
    is_served = adapter.adapts_tower and shard.size == 1
    parts = {path: operator.attrgetter(path)(model) for path in adapter.family.vision}
    roots = {path: part for path, part in parts.items() if isinstance(part, nn.Module)}
    like = next(next(iter(roots.values())).parameters())
    return TowerBank(
        adapter.family, roots if is_served else {}, like, config.lora
    ).hold_from_start()
