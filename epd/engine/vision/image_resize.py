"""Pillow's bicubic resize on tensors, byte for byte, on any device.

Theory of operation
-------------------
Pillow resizes one axis, rounds to bytes, and then resizes the other.  A pixel of the result is a
weighted sum over its neighbours in the source: four times as many as an axis shrinks by.  Weights
are fixed point with 22 bits behind the point.  All of it is integers here too, so no device's
arithmetic matters.

Which axis comes first depends on the sizes and on Pillow, and is seen where the filter overshoots 0
or 255: at edges of full contrast.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from typing import Any

import numpy as np
import torch

from epd.engine.device.copies import upload

PRECISION = 22


def resized(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """uint8 `[frames, height, width, 3]` of another size."""
    tall, narrow = images.shape[1:3]
    axes = ((2, width), (1, height))
    first = height_first((tall, narrow), (height, width))
    for axis, size in axes[::-1] if first else axes:
        if images.shape[axis] != size:
            images = _along(images, axis, size)
    return images


def height_first(size: tuple[int, int], to: tuple[int, int]) -> bool:
    """Whether Pillow resizes the height first, both (height, width).  Before its version 13 never;
    since then where the height loses more than twice as many pixels as the width.  Seen in what it
    gives, for thousands of sizes."""
    if _pillow() < 13:
        return False
    return to[0] < size[0] and size[0] - to[0] > 2 * (size[1] - to[1])


@functools.cache
def _pillow() -> int:
    return int(importlib.metadata.version("pillow").partition(".")[0])


def _along(images: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    places, weights = _taps(images.shape[axis], size, images.device)
    shape = [1, 1, 1, 1]
    shape[axis] = size
    total: Any = 1 << (PRECISION - 1)  # rounds
    for place, weight in zip(places, weights, strict=True):
        total = images.index_select(axis, place) * weight.view(shape) + total
    return (total >> PRECISION).clamp_(0, 255).to(torch.uint8)


@functools.lru_cache(maxsize=128)
def _taps(size: int, to: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pixel of an axis of `to` the neighbours among `size`, and their weights: int64 and
    int32 `[taps, to]`."""
    scale = size / to
    wide = max(scale, 1.0)
    support = 2 * wide  # of the bicubic filter
    center = (np.arange(to) + 0.5) * scale
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    last = np.minimum((center + support + 0.5).astype(np.int64), size)
    places = first + np.arange(2 * math.ceil(support) + 1)[:, None]
    weights = np.where(places < last, _bicubic((places - center + 0.5) * (1 / wide)), 0.0)
    weights /= weights.cumsum(0)[-1]
    fixed = np.trunc(weights * (1 << PRECISION) + np.copysign(0.5, weights)).astype(np.int32)
    known = fixed.any(1)
    places = np.minimum(places, size - 1)
    return upload(places[known], device), upload(fixed[known], device)


def _bicubic(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    x = np.abs(x)
    near = ((-0.5 + 2) * x - (-0.5 + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
