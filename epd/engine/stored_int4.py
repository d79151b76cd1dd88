"""Weights that are stored as integers of four bits (compressed-tensors' pack-quantized).

Theory of operation
-------------------
Eight numbers of a row share a word of 32 bits, the first in its lowest bits, each with 8 added to
it.  Some of a row's numbers have a scale in common: a group of them, or all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd.engine.checkpoint import Checkpoint, Settings

DTYPE = "I32"
NAME = "integers of four bits"
ITEM_NBYTES = 4
_PER_WORD = 8


def is_read(group: Settings) -> bool:
    """Whether a group of config.json's quantization is of the kind that is read."""
    weights = group.get("weights") or {}
    return (
        (weights.get("num_bits"), weights.get("type"), weights.get("symmetric")) == (4, "int", True)
        and not weights.get("actorder")
        and weights.get("strategy") in ("group", "channel")
    )


def shape_of(stored: tuple[int, ...]) -> tuple[int, ...]:
    return (*stored[:-1], _PER_WORD * stored[-1])


def fault(checkpoint: Checkpoint, stored: str) -> str:
    """Why a weight cannot be read; empty: it can."""
    weight, tensors = stored.removesuffix("_packed"), checkpoint.tensors
    scales, shape = tensors.get(weight + "_scale"), shape_of(tensors[stored].shape)
    if scales is None:
        return "has no scales beside it"
    if len(shape) != 2:
        return f"has {len(shape)} dimensions, and only matrices are read"
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    if scales.shape[0] != shape[0] or not groups or shape[1] % groups:
        return f"has scales of shape {list(scales.shape)}, which fit neither channels nor groups"
    return ""


def widened(
    checkpoint: Checkpoint,
    stored: str,
    tensor_of: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """What a weight means."""
    words = tensor_of(stored)
    values = torch.stack([(words >> 4 * at) & 15 for at in range(_PER_WORD)], -1).flatten(-2) - 8
    scales = tensor_of(stored.removesuffix("_packed") + "_scale").float()
    grouped = values.float().unflatten(-1, (scales.shape[1], -1))
    return (grouped * scales[..., None]).flatten(-2).to(dtype)
