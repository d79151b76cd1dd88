"""Attention of a vision tower: each patch over its own segment of the row that a batch is.

A segment is an image, a frame or a window.  On a GPU one kernel takes all segments of a batch
(`kernels/triton_segments`), whatever their number and lengths, so a shape that was never seen costs
what any other does.  Elsewhere segments of one length are one call of torch's attention.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from epd.engine.device.copies import upload

ALIGNED_NBYTES = 16  # of a row of patches, for the kernel's copies


class SegmentAttention:
    """Shared by the layers of a tower, on its launch thread."""

    def __init__(self) -> None:
        self._tiles: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the last bounds

    @functools.cached_property
    def kernels(self) -> Any:
        from epd.engine.kernels import triton_segments  # only where there is a GPU

        return triton_segments

    def __call__(self, qkv: torch.Tensor, bounds: torch.Tensor, scaling: float) -> torch.Tensor:
        """`[T, num_heads * D]`.

        qkv `[T, 3, num_heads, D]`, contiguous; bounds: cumulative lengths from 0, on the host.
        """
        if self.is_tiled(qkv):
            return self.kernels.attend_segments(qkv, self._tiles_of(bounds, qkv), scaling)
        return attend_plainly(qkv, bounds.tolist(), scaling)

    def is_tiled(self, qkv: torch.Tensor) -> bool:
        """Whether one kernel takes all segments of these."""
        return qkv.is_cuda and qkv.itemsize == 2 and qkv[0].nbytes % ALIGNED_NBYTES == 0

    def preset(self, bounds: torch.Tensor, tiles: torch.Tensor) -> None:
        """For these very bounds the tiles are what lies there when the kernel runs."""
        self._tiles = [(bounds, tiles)]

    def _tiles_of(self, bounds: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """Made once for a batch, not for each layer; with windows there are two sets of bounds."""
        for known, tiles in self._tiles:
            if known is bounds:
                return tiles
        tiles = upload(self.kernels.tiles_of(bounds.tolist(), qkv.shape[-1]), qkv.device)
        self._tiles = [*self._tiles[-1:], (bounds, tiles)]
        return tiles


def attend_plainly(qkv: torch.Tensor, bounds: list[int], scaling: float) -> torch.Tensor:
    """The same, on any device."""
    _, _, num_heads, head_dim = qkv.shape
    parts = []
    lengths = (end - start for start, end in itertools.pairwise(bounds))
    at = 0
    for length, group in itertools.groupby(lengths):
        count = len(list(group))
        end = at + length * count
        query, key, value = (
            part[at:end].view(count, length, num_heads, head_dim).transpose(1, 2)
            for part in qkv.unbind(1)
        )
        attended = scaled_dot_product_attention(query, key, value, scale=scaling)
        parts.append(attended.transpose(1, 2).reshape(end - at, -1))
        at = end
    return parts[0] if len(parts) == 1 else torch.cat(parts)
