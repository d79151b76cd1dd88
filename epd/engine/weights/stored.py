"""Weights that are stored in fewer bits than they are computed in: which are read, and how.

Theory of operation
-------------------
config.json names a format, and a tensor's stored dtype shows whether it has it: e4m3 with scales,
or numbers of four bits that share a word or a byte (`stored_formats`).  Linear layers of a decoder
keep them so (`packed_linear`).  Elsewhere a weight would become what it means, in the dtype that is
computed with, and take several times the memory: that is refused, unless `--dequantize` is given.
Loading logs the memory of each format.  What config.json does not name is refused, and so is a
weight whose scales are missing or do not fit: read in another way it would give wrong answers.

Scales of inputs and of the KV cache are not needed: they are found as inputs come.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from epd.engine.weights.stored_formats import (
    AWQ,
    EIGHT_BITS,
    FOUR_BITS,
    GPTQ,
    MXFP4,
    NVFP4,
    Bits,
    TensorOf,
    settings_of,
)
from epd.model_files.checkpoint import Checkpoint, ModelError, Settings, TensorEntry

if TYPE_CHECKING:
    import torch

    from epd.engine.kernels.packed import Packed

logger = logging.getLogger(__name__)

PLAIN = ("F32", "BF16", "F16", "F64")
_FACTORS = ".kv_b_proj."  # of latents: multiplied as matrices, so they are wide
_FORMATS: dict[str, Bits] = {  # of compressed-tensors
    "float-quantized": EIGHT_BITS,
    "naive-quantized": EIGHT_BITS,
    "pack-quantized": FOUR_BITS,
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
}
_SMALL = {bits.dtype for bits in (EIGHT_BITS, FOUR_BITS, NVFP4)}
_ALGORITHMS: dict[str, Bits] = {"FP8": EIGHT_BITS, "NVFP4": NVFP4}  # of modelopt
_BESIDE = (
    "_scale_inv", "_scale_2", "_scale", "_global_scale", "_shape", "_zero_point", "_g_idx",
    "_packed",
)  # fmt: skip
_BESIDE_WORDS = (".qzeros", ".scales", ".g_idx")
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
            "checkpoint, or one of e4m3 with scales for blocks or channels, of NVFP4, of MXFP4, or "
            "of integers of four bits (compressed-tensors, AWQ, GPTQ)"
        )


def shape_of(checkpoint: Checkpoint, stored: str) -> tuple[int, ...]:
    """Of the weight that a tensor holds."""
    entry = checkpoint.tensors[stored]
    bits = _bits_of(checkpoint, stored)
    return entry.shape if bits is None else bits.shape_of(entry.shape)


def fault(checkpoint: Checkpoint, stored: str) -> str:
    """Why a tensor cannot be read; empty: it can."""
    entry = checkpoint.tensors[stored]
    bits = _bits_of(checkpoint, stored)
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
    weights += [stored.removesuffix(s) + ".qweight" for s in _BESIDE_WORDS if stored.endswith(s)]
    return any(name in tensors and tensors[name].dtype in _SMALL for name in weights)


def read(checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed | None:
    """A weight in few bits; None: it is stored as it is.  `tensor_of`: reads a tensor by name."""
    bits = _bits_of(checkpoint, stored)
    return None if bits is None else bits.packed(checkpoint, stored, tensor_of)


def stays(checkpoint: Checkpoint, stored: str, *, fp8: bool) -> bool:
    """Whether a tensor is a weight in fewer bits that products read; `fp8`: e4m3, too."""
    bits = _bits_of(checkpoint, stored)
    return bits is not None and (fp8 or not bits.has_fp8)


def settle(
    checkpoint: Checkpoint,
    kept: Iterable[str],
    widened: Iterable[str],
    dtype: torch.dtype,
    *,
    may_widen: bool,
) -> None:
    """Log the memory of whole weights by their format, as stored and as they become.  Raises
    ModelError where some would become wide, and may not; factors of latents always do."""
    word = str(dtype).removeprefix("torch.")
    for names, is_kept in ((kept, True), (widened, False)):
        each: dict[str, list[str]] = {}
        for name in names:
            if (bits := _bits_of(checkpoint, name)) is not None:
                each.setdefault(bits.name, []).append(name)
        for kind, found in each.items():
            refused = [] if is_kept or may_widen else [n for n in found if _FACTORS not in n]
            found = refused or found
            narrow = sizes(checkpoint, found)[kind] / 2**30
            shapes = [shape_of(checkpoint, name) for name in found]
            wide = sum(map(math.prod, shapes)) * dtype.itemsize / 2**30
            if refused:
                raise ModelError(
                    f"{checkpoint.directory}: {len(found)} weights in {kind} ({found[0]}) cannot "
                    f"stay so here: in {word} they would take {wide:.3f} GiB, not {narrow:.3f}; "
                    "use a checkpoint that leaves them in 16 bits, or let them with --dequantize"
                )
            logger.info(
                "%s: %d weights in %s stay so and take %.3f GiB; in %s they would take %.3f"
                if is_kept
                else "%s: %d weights in %s take %.3f GiB as stored; they become %s and take %.3f",
                checkpoint.directory, len(found), kind, narrow, word, wide,
            )  # fmt: skip


def sizes(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, int]:
    """Bytes by format of tensors in few bits, with all that lies beside them."""
    found: dict[str, int] = {}
    tensors = checkpoint.tensors
    for name in names:
        bits = _bits_of(checkpoint, name)
        if bits is not None:
            stem = name.removesuffix(bits.suffix)
            parts = {name, *(stem + suffix for suffix in (*_BESIDE, *_BESIDE_WORDS))}
            ends = (tensors[part].data_offsets for part in parts if part in tensors)
            found[bits.name] = found.get(bits.name, 0) + sum(end - begin for begin, end in ends)
    return found


def format_of(config: Settings, name: str) -> Bits | None:
    """The format that config.json names for a weight of a linear layer; None: it stays as it is."""
    settings, module = settings_of(config), name.removesuffix(".weight")
    for left in settings.get("ignore") or settings.get("modules_to_not_convert") or ():
        if re.match(left[3:], module) if left.startswith("re:") else left in module:
            return None
    return next(iter(_named(settings)), None)


def least_nbytes(config: Settings) -> float:
    """Of a number of a layer, in the formats that config.json names; 0: it names none."""
    return min(
        (bits.item_nbytes / bits.per_item for bits in _named(settings_of(config))), default=0
    )


def _bits_of(checkpoint: Checkpoint, stored: str) -> Bits | None:
    """How a tensor is stored, if config.json names that; None: as it is, or in a way unknown."""
    dtype = checkpoint.tensors[stored].dtype
    if dtype not in _SMALL:
        return None
    named = _named(settings_of(checkpoint.config))
    fits = (bits for bits in named if bits.dtype == dtype and stored.endswith(bits.suffix))
    return next(fits, None)


def _named(settings: Settings) -> list[Bits]:
    """What a quantization_config names; nothing: a part of it is unknown."""
    method = settings.get("quant_method")
    if method == "fp8":
        return [EIGHT_BITS]
    if method == "modelopt":
        algorithm = _ALGORITHMS.get(str(settings.get("quant_algo")))
        return [algorithm] if algorithm is not None else []
    if method == "awq":
        return [AWQ] if _four(settings) and settings.get("version", "gemm") == "gemm" else []
    if method == "gptq":
        return [GPTQ] if _four(settings) else []
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


def _four(settings: Settings) -> bool:
    return settings.get("bits", settings.get("w_bit")) == 4
