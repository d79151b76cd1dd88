"""Rows of eight bits: e4m3 numbers, and a scale for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of its numbers
SMALLEST_MAXIMUM = 1e-12  # of a row: the scale of a row of zeros


class Scaled(NamedTuple):
    """Rows of e4m3, each with a scale: what they mean is `values * scales`."""

    values: torch.Tensor  # [..., H]
    scales: torch.Tensor  # float32 [..., 1]


def scaled(x: torch.Tensor) -> Scaled:
    """`[..., H]` in eight bits: the largest of a row becomes the largest that there is."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_MAXIMUM) * (1 / LARGEST)
    return Scaled((wide * scales.reciprocal()).clamp(-LARGEST, LARGEST).to(FP8), scales)
