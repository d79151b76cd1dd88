"""Weights that are stored in eight bits.

Theory of operation
-------------------
A weight lies as e4m3 beside its scales: one for each block of it (`quant_method` fp8, as DeepSeek
and Qwen publish), or one for each output channel or all of it (compressed-tensors'
float-quantized, modelopt's FP8).  Experts that are stored as one tensor have blocks in each of
them.  `--quantization fp8` makes eight bits of what is read again, with a scale for each channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from epd.engine.checkpoint import Checkpoint, Settings, TensorEntry

DTYPE = "F8_E4M3"
NAME = "eight bits"
ITEM_NBYTES = 1
SUFFIXES = ("_scale_inv", "_scale")  # of a weight's name: its scales


def settings_of(config: Settings) -> Settings:
    """How config.json says that weights are stored; some say it of the text part alone."""
    found = config.get("quantization_config")
    return found or (config.get("text_config") or {}).get("quantization_config") or {}


def shape_of(stored: tuple[int, ...]) -> tuple[int, ...]:
    return stored


def fault(checkpoint: Checkpoint, stored: str) -> str:
    """Why a weight cannot be read; empty: it can."""
    tensors = checkpoint.tensors
    scales = _scale_name(tensors, stored)
    if scales is None:
        return "has no scales beside it"
    found, shape = tensors[scales].shape, tensors[stored].shape
    rows = shape[:1]
    if len(shape) == 2 and found in ((), (1,), rows, (*rows, 1)):
        return ""
    block = _block(checkpoint.config)
    blocks = tuple(-(-n // b) for n, b in zip(shape[-2:], block, strict=False))
    if len(shape) not in (2, 3) or len(block) != 2 or found != (*shape[:-2], *blocks):
        return f"has scales of shape {list(found)}, which fit neither channels nor blocks"
    return ""


def widened(
    checkpoint: Checkpoint,
    stored: str,
    tensor_of: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
) -> torch.Tensor:
    """What a weight means."""
    name = _scale_name(checkpoint.tensors, stored)
    assert name is not None  # as was looked at before
    weight, scales = tensor_of(stored), tensor_of(name).float()
    rows = len(weight)
    if scales.numel() == 1:
        scales = scales.view(1, 1)
    elif scales.numel() == rows and scales.shape in ((rows,), (rows, 1)):
        scales = scales.view(rows, 1)
    else:
        for dim, size in zip((-2, -1), _block(checkpoint.config), strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return (weight.float() * scales).to(dtype)


def _scale_name(tensors: Mapping[str, TensorEntry], stored: str) -> str | None:
    return next((stored + s for s in SUFFIXES if stored + s in tensors), None)


def _block(config: Settings) -> tuple[int, ...]:
    return tuple(settings_of(config).get("weight_block_size") or ())
