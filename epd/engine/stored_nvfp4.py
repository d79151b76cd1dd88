"""Weights that are stored in NVFP4.

Theory of operation
-------------------
Two numbers of four bits (e2m1: a sign, two bits of exponent, one of mantissa) share a byte, the
first in its lower half.  Each 16 of a row have a scale in e4m3, and the whole weight has one in
float32: modelopt multiplies by it (`weight_scale_2`), compressed-tensors divides by it
(`weight_global_scale`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd.engine.checkpoint import Checkpoint

DTYPE = "U8"
NAME = "NVFP4"
ITEM_NBYTES = 1
GROUP = 16
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FACTOR, _DIVISOR = "_scale_2", "_global_scale"


def shape_of(stored: tuple[int, ...]) -> tuple[int, ...]:
    return (*stored[:-1], 2 * stored[-1])


def fault(checkpoint: Checkpoint, stored: str) -> str:
    """Why a weight cannot be read; empty: it can."""
    tensors, weight = checkpoint.tensors, stored.removesuffix("_packed")
    scales = tensors.get(weight + "_scale")
    whole = [tensors[weight + s] for s in (_FACTOR, _DIVISOR) if weight + s in tensors]
    if scales is None or not whole:
        return "lacks a scale beside it"
    shape = shape_of(tensors[stored].shape)
    if len(shape) != 2:
        return f"has {len(shape)} dimensions, and only matrices are read"
    if scales.dtype != "F8_E4M3" or scales.shape != (shape[0], shape[1] / GROUP):
        return f"has scales of shape {list(scales.shape)} in {scales.dtype}, which do not fit"
    if len(whole) > 1 or whole[0].shape not in ((), (1,)):
        return "has more than one scale of the whole"
    return ""


def widened(
    checkpoint: Checkpoint,
    stored: str,
    tensor_of: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """What a weight means."""
    weight = stored.removesuffix("_packed")
    if weight + _FACTOR in checkpoint.tensors:
        whole = tensor_of(weight + _FACTOR).float()
    else:
        whole = 1 / tensor_of(weight + _DIVISOR).float()
    packed = tensor_of(stored)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    known = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)], device=packed.device)
    values = known[codes]
    scales = tensor_of(weight + "_scale").float() * whole
    return (values.unflatten(-1, (-1, GROUP)) * scales[..., None]).flatten(-2).to(dtype)
