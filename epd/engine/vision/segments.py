"""Attention of a vision tower: each patch over its own segment of the row that a batch is.

A segment is an image, a frame or a window.  On a GPU one kernel takes all segments of a batch,
whatever their number and lengths, so a shape that was never seen costs what any other does.
"""

from __future__ import annotations

import torch

from epd.engine.device.copies import upload
from epd.engine.kernels import Kernels, kernels_for

ALIGNED_NBYTES = 16  # of a row of patches, for the kernel's copies


class SegmentAttention:
    """Shared by the layers of a tower, on its launch thread."""

    def __init__(self) -> None:
        self._listed: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the last bounds

    def kernels(self, qkv: torch.Tensor) -> Kernels:
        """Those that attend to these rows."""
        return kernels_for("cuda" if self.is_tiled(qkv) else "cpu")

    def __call__(self, qkv: torch.Tensor, bounds: torch.Tensor, scaling: float) -> torch.Tensor:
        """`[T, num_heads * D]`.

        qkv `[T, 3, num_heads, D]`, contiguous, overwritten; bounds: cumulative lengths from 0, on
        the host.
        """
        ops = self.kernels(qkv)
        out: torch.Tensor = ops.attend_segments(qkv, self._list(ops, bounds, qkv), scaling)
        return out

    def is_tiled(self, qkv: torch.Tensor) -> bool:
        """Whether one kernel takes all segments of these."""
        return qkv.is_cuda and qkv.itemsize == 2 and qkv[0].nbytes % ALIGNED_NBYTES == 0

    def preset(self, bounds: torch.Tensor, segments: torch.Tensor) -> None:
        """For these very bounds the segments are what lies there when the kernel runs."""
        self._listed = [(bounds, segments)]

    def _list(self, ops: Kernels, bounds: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """Made once for a batch, not for each layer; with windows there are two sets of bounds."""
        for known, segments in self._listed:
            if known is bounds:
                return segments
        segments = upload(ops.list_segments(bounds.tolist(), qkv.shape[-1]), qkv.device)
        self._listed = [*self._listed[-1:], (bounds, segments)]
        return segments
