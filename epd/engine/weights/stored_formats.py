"""Formats of weights that are stored in fewer bits: their shapes, what lacks, and what they mean.

Theory of operation
-------------------
*Eight bits*: a weight lies as e4m3 beside its scales.  There is one for each block (`quant_method`
fp8, as DeepSeek and Qwen publish), for each output channel, or for all of it (compressed-tensors'
float-quantized, modelopt's FP8).  Experts that are stored as one tensor have blocks in each of
them.  `--quantization fp8` makes eight bits of what is read again, with a scale for each channel.

*Integers of four bits* (compressed-tensors' pack-quantized): eight numbers of a row share a word of
32 bits, the first in its lowest bits, each with 8 added to it.  Some of a row's numbers have a
scale in common: a group of them, or all.

*NVFP4*: two numbers of four bits (e2m1: a sign, two bits of exponent, one of mantissa) share a
byte, the first in its lower half.  Each 16 of a row have a scale in e4m3, and the whole weight has
one in float32: modelopt multiplies by it (`weight_scale_2`), compressed-tensors divides
(`weight_global_scale`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from epd.model_files.checkpoint import Checkpoint, Settings, TensorEntry

if TYPE_CHECKING:
    import torch

TensorOf: TypeAlias = "Callable[[str], torch.Tensor]"  # reads a tensor by name


def settings_of(config: Settings) -> Settings:
    """The settings of stored weights in config.json; some have them in the text part alone."""
    found = config.get("quantization_config")
    return found or (config.get("text_config") or {}).get("quantization_config") or {}


class Bits(ABC):
    dtype: str  # of the stored tensor
    name: str
    item_nbytes: int
    per_item = 1  # numbers that share an item

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the weight that a stored tensor of this shape holds."""
        return (
            (*stored[:-1], self.per_item * stored[-1]) if self.per_item > 1 and stored else stored
        )

    @abstractmethod
    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        """Why a weight cannot be read; empty: it can."""

    @abstractmethod
    def widened(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> torch.Tensor:
        """What a weight means, in float32."""


class EightBits(Bits):
    dtype, name, item_nbytes = "F8_E4M3", "eight bits", 1
    _SUFFIXES = ("_scale_inv", "_scale")  # of a weight's name: its scales

    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        tensors = checkpoint.tensors
        scales = self._scale_name(tensors, stored)
        if scales is None:
            return "has no scales beside it"
        found, shape = tensors[scales].shape, tensors[stored].shape
        rows = shape[:1]
        if len(shape) == 2 and found in ((), (1,), rows, (*rows, 1)):
            return ""
        block = self._block(checkpoint.config)
        blocks = tuple(-(-n // b) for n, b in zip(shape[-2:], block, strict=False))
        if len(shape) not in (2, 3) or len(block) != 2 or found != (*shape[:-2], *blocks):
            return f"has scales of shape {list(found)}, which fit neither channels nor blocks"
        return ""

    def widened(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> torch.Tensor:
        name = self._scale_name(checkpoint.tensors, stored)
        assert name is not None  # as was looked at before
        weight, scales = tensor_of(stored), tensor_of(name).float()
        rows = len(weight)
        if scales.numel() == 1:
            scales = scales.view(1, 1)
        elif scales.numel() == rows and scales.shape in ((rows,), (rows, 1)):
            scales = scales.view(rows, 1)
        else:
            for dim, size in zip((-2, -1), self._block(checkpoint.config), strict=True):
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        return weight.float() * scales

    def _scale_name(self, tensors: Mapping[str, TensorEntry], stored: str) -> str | None:
        return next((stored + s for s in self._SUFFIXES if stored + s in tensors), None)

    def _block(self, config: Settings) -> tuple[int, ...]:
        return tuple(settings_of(config).get("weight_block_size") or ())


class FourBits(Bits):
    dtype, name, item_nbytes, per_item = "I32", "integers of four bits", 4, 8

    @staticmethod
    def is_read(group: Settings) -> bool:
        """Whether a group of config.json's quantization is of the kind that is read."""
        its = group.get("weights") or {}
        return (
            (its.get("num_bits"), its.get("type"), its.get("symmetric")) == (4, "int", True)
            and not its.get("actorder")
            and its.get("strategy") in ("group", "channel")
        )

    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        weight, tensors = stored.removesuffix("_packed"), checkpoint.tensors
        scales, shape = tensors.get(weight + "_scale"), self.shape_of(tensors[stored].shape)
        if scales is None:
            return "has no scales beside it"
        if len(shape) != 2:
            return f"has {len(shape)} dimensions, and only matrices are read"
        groups = scales.shape[1] if len(scales.shape) == 2 else 0
        if not groups or scales.shape[0] != shape[0] or shape[1] % groups:
            return (
                f"has scales of shape {list(scales.shape)}, which fit neither channels nor groups"
            )
        return ""

    def widened(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> torch.Tensor:
        import torch

        words = tensor_of(stored)
        values = torch.stack([(words >> 4 * at) & 15 for at in range(8)], -1).flatten(-2) - 8
        scales = tensor_of(stored.removesuffix("_packed") + "_scale").float()
        grouped = values.float().unflatten(-1, (scales.shape[1], -1))
        return (grouped * scales[..., None]).flatten(-2)


class Nvfp4(Bits):
    dtype, name, item_nbytes, per_item = "U8", "NVFP4", 1, 2
    _GROUP = 16
    _POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    _FACTOR, _DIVISOR = "_scale_2", "_global_scale"

    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        tensors, weight = checkpoint.tensors, stored.removesuffix("_packed")
        scales = tensors.get(weight + "_scale")
        named = (weight + suffix for suffix in (self._FACTOR, self._DIVISOR))
        whole = [tensors[name] for name in named if name in tensors]
        if scales is None or not whole:
            return "lacks a scale beside it"
        shape = self.shape_of(tensors[stored].shape)
        if len(shape) != 2:
            return f"has {len(shape)} dimensions, and only matrices are read"
        if scales.dtype != "F8_E4M3" or scales.shape != (shape[0], shape[1] / self._GROUP):
            return f"has scales of shape {list(scales.shape)} in {scales.dtype}, which do not fit"
        if len(whole) > 1 or whole[0].shape not in ((), (1,)):
            return "has more than one scale of the whole"
        return ""

    def widened(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> torch.Tensor:
        import torch

        weight = stored.removesuffix("_packed")
        if weight + self._FACTOR in checkpoint.tensors:
            whole = tensor_of(weight + self._FACTOR).float()
        else:
            whole = 1 / tensor_of(weight + self._DIVISOR).float()
        packed = tensor_of(stored)
        codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
        signed = [*self._POSITIVE, *(-value for value in self._POSITIVE)]
        values = torch.tensor(signed, device=packed.device)[codes]
        scales = tensor_of(weight + "_scale").float() * whole
        return (values.unflatten(-1, (-1, self._GROUP)) * scales[..., None]).flatten(-2)


EIGHT_BITS, FOUR_BITS, NVFP4 = EightBits(), FourBits(), Nvfp4()
