"""Checkpoints that are stored in eight bits: which ones are read, and how.

Theory of operation
-------------------
A weight lies as e4m3 beside its scales: one for each block of it (`quant_method` fp8, as DeepSeek
and Qwen publish), or one for each output channel or all of it (compressed-tensors'
float-quantized).  It becomes what it means, in the dtype that is computed with; `--quantization
fp8` makes eight bits of that again, with a scale for each channel.  Scales of inputs are not
needed: they are found as inputs come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from epd.engine.checkpoint import Checkpoint, ModelError, TensorEntry

DTYPE = "F8_E4M3"
SUFFIXES = ("_scale_inv", "_scale")  # of a weight's name: its scales
INPUT_SUFFIX = ".input_scale"
_METHODS = ("fp8", "compressed-tensors")


def check(checkpoint: Checkpoint) -> None:
    """Raises ModelError where a directory says that it is quantised in a way that is not read."""
    settings = checkpoint.config.get("quantization_config")
    if not settings:
        return
    stored = {entry.dtype for entry in checkpoint.tensors.values()}
    if settings.get("quant_method") not in _METHODS or (stored and DTYPE not in stored):
        raise ModelError(
            f"{checkpoint.directory} is quantised in a way that this engine does not read; use the "
            "bfloat16 checkpoint, or one of e4m3 with scales for blocks or channels"
        )


def scale_name(tensors: Mapping[str, TensorEntry], stored: str) -> str | None:
    """Where the scales of a weight are; None: it has none."""
    return next((stored + s for s in SUFFIXES if stored + s in tensors), None)


def is_scale(tensors: Mapping[str, TensorEntry], stored: str) -> bool:
    """Whether a tensor only tells how another is scaled."""
    weights = [stored.removesuffix(s) for s in SUFFIXES if stored.endswith(s)]
    if stored.endswith(INPUT_SUFFIX):
        weights.append(stored.removesuffix(INPUT_SUFFIX) + ".weight")
    return any(name in tensors and tensors[name].dtype == DTYPE for name in weights)


def fault(checkpoint: Checkpoint, stored: str) -> str:
    """Why a weight of eight bits cannot be read; empty: it can."""
    tensors = checkpoint.tensors
    scales = scale_name(tensors, stored)
    if scales is None:
        return "has no scales beside it"
    found, shape = tensors[scales].shape, tensors[stored].shape
    rows = shape[:1]
    if len(shape) != 2:
        return f"has {len(shape)} dimensions, and only matrices are read in eight bits"
    if found in ((), (1,), rows, (*rows, 1)):
        return ""
    block = _block(checkpoint.config)
    if len(block) != 2 or found != tuple(-(-n // b) for n, b in zip(shape, block, strict=True)):
        return f"has scales of shape {list(found)}, which fit neither channels nor blocks"
    return ""


def widened(
    weight: torch.Tensor, scales: torch.Tensor, config: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """What a weight of eight bits means."""
    scales, rows = scales.float(), len(weight)
    if scales.numel() == 1:
        scales = scales.view(1, 1)
    elif scales.numel() == rows and scales.shape in ((rows,), (rows, 1)):
        scales = scales.view(rows, 1)
    else:
        for dim, size in enumerate(_block(config)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return (weight.float() * scales).to(dtype)


def _block(config: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(config.get("quantization_config", {}).get("weight_block_size") or ())
