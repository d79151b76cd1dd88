"""Attention of a vision tower over pictures of any size, by the backend that the shape deserves.

Theory of operation
-------------------
On a GPU torch has several attentions behind one function and may prefer cuDNN's, which is the
fastest for long segments on Hopper.  But cuDNN builds a plan for each new shape, on the thread that
launches, for tens to hundreds of milliseconds, while the device and every stream wait; and pictures
of users have any size.  So cuDNN is left a shape only where it pays: long segments, once the shape
has come so often that it will come again.  All others go to flash attention, which needs no plan.

Results differ by rounding, as between any two backends.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

LONG = 2048  # patches of a segment, from which attention is a good part of a tower's time
OFTEN = 400  # calls: a tower makes one for each layer, so some sixteen batches
MAX_SHAPES = 4096  # that are remembered
WITHOUT_PLANS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

Shape = tuple[int, int]  # segments, patches of each


class Shapes:
    """How often each shape has come; used by one thread, the launch thread."""

    def __init__(self) -> None:
        self._calls: dict[Shape, int] = {}

    def may_be_planned(self, shape: Shape) -> bool:
        """Whether a backend may prepare for this shape; counts the call."""
        if shape[1] < LONG:
            return False
        if shape not in self._calls and len(self._calls) >= MAX_SHAPES:
            self._calls.clear()
        calls = self._calls.get(shape, 0) + 1
        self._calls[shape] = calls
        return calls > OFTEN


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, shapes: Shapes
) -> torch.Tensor:
    """Each segment over itself: `[segments, heads, patches, head_dim]`, not causal."""
    shape = (query.shape[0], query.shape[2])
    if query.device.type != "cuda" or shapes.may_be_planned(shape):
        return scaled_dot_product_attention(query, key, value, scale=scale)
    with sdpa_kernel(list(WITHOUT_PLANS)):
        return scaled_dot_product_attention(query, key, value, scale=scale)
