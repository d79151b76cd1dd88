"""Weights that are stored in fewer bits than they are computed in: which are read, and how.

Theory of operation
-------------------
config.json names a format, and a tensor's stored dtype shows whether it has it: e4m3 with scales,
or numbers of four bits that share a word or a byte (`stored_formats`).  A weight becomes what it
means, in the dtype that is computed with, since no product of this engine takes what is stored;
loading logs the cost.  What config.json does not name is refused, and so is a weight whose scales
are missing or do not fit: read in another way it would give wrong answers.

Scales of inputs and of the KV cache are not needed: they are found as inputs come.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from epd.engine.weights.stored_formats import (
    EIGHT_BITS,
    FOUR_BITS,
    NVFP4,
    Bits,
    TensorOf,
    settings_of,
)
from epd.model_files.checkpoint import Checkpoint, ModelError, Settings, TensorEntry

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PLAIN = ("F32", "BF16", "F16", "F64")
_KINDS: tuple[Bits, ...] = (EIGHT_BITS, FOUR_BITS, NVFP4)
_BITS = {bits.dtype: bits for bits in _KINDS}
_FORMATS: dict[str, Bits] = {  # of compressed-tensors
    "float-quantized": EIGHT_BITS,
    "naive-quantized": EIGHT_BITS,
    "pack-quantized": FOUR_BITS,
    "nvfp4-pack-quantized": NVFP4,
}
_ALGORITHMS: dict[str, Bits] = {"FP8": EIGHT_BITS, "NVFP4": NVFP4}  # of modelopt
_BESIDE = (
    "_scale_inv", "_scale_2", "_scale", "_global_scale", "_shape", "_packed",
)  # fmt: skip
_OF_INPUTS = (".input_scale", ".input_global_scale")


def check(checkpoint: Checkpoint) -> None:
    """Raises ModelError where a directory is quantised in a way that is not read."""
    settings = settings_of(checkpoint.config)
    if not settings:
        return
    stored = {entry.dtype for entry in checkpoint.tensors.values()}
    named = _named(settings)
    if not named or (stored and not {module.dtype for module in named} <= stored):
        what = [settings.get(key) for key in ("quant_method", "quant_algo", "format")]
        raise ModelError(
            f"{checkpoint.directory} is quantised in a way that this engine does not read "
            f"({', '.join(str(word) for word in what if word) or 'unnamed'}); use the bfloat16 "
            "checkpoint, or one of e4m3 with scales for blocks or channels, of NVFP4, or of "
            "symmetric integers of four bits"
        )


def shape_of(checkpoint: Checkpoint, stored: str) -> tuple[int, ...]:
    """Of the weight that a tensor holds."""
    entry = checkpoint.tensors[stored]
    bits = _bits_of(checkpoint, entry)
    return entry.shape if bits is None else bits.shape_of(entry.shape)


def fault(checkpoint: Checkpoint, stored: str) -> str:
    """Why a tensor cannot be read; empty: it can."""
    entry = checkpoint.tensors[stored]
    bits = _bits_of(checkpoint, entry)
    if bits is not None:
        told = bits.fault(checkpoint, stored)
        return told and f"is stored in {bits.name} and {told}"
    if entry.dtype in PLAIN:
        return ""
    if entry.dtype == EIGHT_BITS.dtype:
        return "is stored in eight bits and config.json does not say how"
    return f"is stored as {entry.dtype}; weights must be one of {', '.join(PLAIN)}"


def is_beside(tensors: Mapping[str, TensorEntry], stored: str) -> bool:
    """Whether a tensor only describes how another is stored."""
    weights = [stored.removesuffix(s) for s in _BESIDE if stored.endswith(s)]
    weights += [stored.removesuffix(s) + ".weight" for s in _OF_INPUTS if stored.endswith(s)]
    weights += [name + "_packed" for name in weights]
    return any(name in tensors and tensors[name].dtype in _BITS for name in weights)


def read(
    checkpoint: Checkpoint, stored: str, tensor_of: TensorOf, dtype: torch.dtype
) -> torch.Tensor | None:
    """What a weight means; None: it is stored as it is.  `tensor_of`: reads a tensor by name."""
    bits = _bits_of(checkpoint, checkpoint.tensors[stored])
    if bits is None:
        return None
    return bits.widened(checkpoint, stored, tensor_of).to(dtype)


def log_cost(checkpoint: Checkpoint, stored: Iterable[str], dtype: torch.dtype) -> None:
    """What is widened, of the whole weights, and how much memory it takes for that."""
    sizes: dict[str, tuple[int, int, int]] = {}
    for name in stored:
        entry = checkpoint.tensors[name]
        bits = _bits_of(checkpoint, entry)
        if bits is not None:
            count, narrow, wide = sizes.get(bits.name, (0, 0, 0))
            narrow += math.prod(entry.shape) * bits.item_nbytes
            wide += math.prod(bits.shape_of(entry.shape)) * dtype.itemsize
            sizes[bits.name] = count + 1, narrow, wide
    for kind, (count, narrow, wide) in sizes.items():
        logger.info(
            "%s: %d weights are stored in %s, which no product here takes; they become %s and "
            "take %.3f GiB instead of %.3f", checkpoint.directory, count, kind,
            str(dtype).removeprefix("torch."), wide / 2**30, narrow / 2**30,
        )  # fmt: skip


def _bits_of(checkpoint: Checkpoint, entry: TensorEntry) -> Bits | None:
    """How a tensor is stored, if config.json names that; None: as it is, or in a way unknown."""
    bits = _BITS.get(entry.dtype)
    named = _named(settings_of(checkpoint.config))
    return bits if bits is not None and bits in named else None


def _named(settings: Settings) -> list[Bits]:
    """What a quantization_config names; nothing: a part of it is unknown."""
    method = settings.get("quant_method")
    if method == "fp8":
        return [EIGHT_BITS]
    if method == "modelopt":
        algorithm = _ALGORITHMS.get(str(settings.get("quant_algo")))
        return [algorithm] if algorithm is not None else []
    if method != "compressed-tensors":
        return []
    groups = (settings.get("config_groups") or {}).values()
    formats = {str(group.get("format") or settings.get("format")) for group in groups}
    found = [_FORMATS.get(name) for name in sorted(formats or {str(settings.get("format"))})]
    known = [module for module in found if module is not None]
    if len(known) < len(found):
        return []
    if FOUR_BITS in known and not all(map(FOUR_BITS.is_read, groups)):
        return []
    return known
