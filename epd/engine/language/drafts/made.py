"""What a step leaves to the layer that drafts behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from epd.engine.language.flat_batch import FlatBatch


class Made(NamedTuple):
    """A step that the layer follows."""

    flat: FlatBatch
    embeds: torch.Tensor  # [T, H], what the first layer read
    hidden: torch.Tensor  # [T, H]
    ends: Sequence[int]  # of each sequence's last token
    sampled: Sequence[int]  # where tokens are sampled
    follow: Callable[[], torch.Tensor] | None = None  # `DraftLayer.follow`, captured
