"""Formats of weights that are stored in fewer bits: their shapes, what lacks, and what they mean.

Theory of operation
-------------------
Each format becomes `Packed`: numbers of four or eight bits beside their scales, which products
read and which is as small as what is stored.  Of most formats that is a view.

*Eight bits*: a weight lies as e4m3 beside its scales.  There is one for each block (`quant_method`
fp8, as DeepSeek and Qwen publish), for each output channel, or for all of it (compressed-tensors'
float-quantized, modelopt's FP8).  Experts that are stored as one tensor have blocks in each of
them.  `--quantization fp8` makes eight bits of what is read again, with a scale for each channel.

*Integers of four bits* (compressed-tensors' pack-quantized): eight numbers of a row share a word of
32 bits, the first in its lowest bits, each with 8 added to it.  Some of a row's numbers have a
scale in common: a group of them, or all.  A group can have a zero of its own.  AWQ and GPTQ store
the transposed weight: AWQ packs outputs, even ones before odd ones, and GPTQ packs inputs.  Where
the most important inputs were rounded first, each input names its group (`g_idx`).  Columns are put
in the order of their groups here, and a product reads its inputs so.

*NVFP4*: two numbers of four bits (e2m1: a sign, two bits of exponent, one of mantissa) share a
byte, the first in its lower half.  Each 16 of a row have a scale in e4m3, and the whole weight has
one in float32: modelopt multiplies by it (`weight_scale_2`), compressed-tensors divides
(`weight_global_scale`).  *MXFP4*: the same numbers, 32 of which have a power of two as a scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from epd.model_files.checkpoint import Checkpoint, Settings, TensorEntry

if TYPE_CHECKING:
    import torch

    from epd.engine.kernels.packed import Packed

TensorOf: TypeAlias = "Callable[[str], torch.Tensor]"  # reads a tensor by name


def settings_of(config: Settings) -> Settings:
    """The settings of stored weights in config.json; some have them in the text part alone."""
    found = config.get("quantization_config")
    return found or (config.get("text_config") or {}).get("quantization_config") or {}


def _weights(config: Settings) -> list[Settings]:
    """Of each group of layers that compressed-tensors names."""
    groups = settings_of(config).get("config_groups") or {}
    return [group.get("weights") or {} for group in groups.values()]


class Bits(ABC):
    dtype: str  # of the stored tensor
    name: str
    item_nbytes: int
    per_item = 1  # numbers that share an item
    suffix = ""  # that the stored tensor's name has
    has_fp8 = False  # numbers or scales of e4m3, which Ampere lacks

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the weight that a stored tensor of this shape holds."""
        return (
            (*stored[:-1], self.per_item * stored[-1]) if self.per_item > 1 and stored else stored
        )

    @abstractmethod
    def block_of(self, config: Settings, columns: int) -> tuple[int, int]:
        """Rows and columns that have a scale in common, where config.json alone is there."""

    def has_zeros(self, config: Settings) -> bool:
        return False

    @abstractmethod
    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        """Why a weight cannot be read; empty: it can."""

    @abstractmethod
    def packed(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed:
        """A weight, in the form that products read."""


class EightBits(Bits):
    dtype, name, item_nbytes, has_fp8 = "F8_E4M3", "eight bits", 1, True
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

    def packed(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed:
        from epd.engine.kernels.packed import Packed

        name = self._scale_name(checkpoint.tensors, stored)
        assert name is not None  # as was looked at before
        weight, scales = tensor_of(stored), tensor_of(name)
        rows, columns = weight.shape[-2:]
        if scales.numel() == 1:
            scales = scales.float().view(1, 1).repeat(rows, 1)
        elif scales.numel() == rows and scales.shape in ((rows,), (rows, 1)):
            scales = scales.view(rows, 1)
        else:
            block, across = self._block(checkpoint.config)
            return Packed("fp8", weight, scales, (block, across))
        return Packed("fp8", weight, scales, (1, columns))

    def _scale_name(self, tensors: Mapping[str, TensorEntry], stored: str) -> str | None:
        return next((stored + s for s in self._SUFFIXES if stored + s in tensors), None)

    def block_of(self, config: Settings, columns: int) -> tuple[int, int]:
        rows, across = self._block(config) or (1, columns)
        return rows, across

    def _block(self, config: Settings) -> tuple[int, ...]:
        found = [settings_of(config).get("weight_block_size")]
        found += [its.get("block_structure") for its in _weights(config)]
        return tuple(next(filter(None, found), ()))


class Integers(Bits):
    def block_of(self, config: Settings, columns: int) -> tuple[int, int]:
        settings = settings_of(config)
        found = [settings.get("group_size"), settings.get("q_group_size")]
        found += [its.get("group_size") for its in _weights(config)]
        return 1, next((size for size in found if size and size > 0), columns)


class FourBits(Integers):
    dtype, name, item_nbytes, per_item = "I32", "integers of four bits", 4, 8
    suffix = "_packed"

    def has_zeros(self, config: Settings) -> bool:
        return any(its.get("symmetric") is False for its in _weights(config))

    @staticmethod
    def is_read(group: Settings) -> bool:
        """Whether a group of config.json's quantization is of the kind that is read."""
        its = group.get("weights") or {}
        return (its.get("num_bits"), its.get("type")) == (4, "int") and its.get("strategy") in (
            "group",
            "channel",
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
        zeros = tensors.get(weight + "_zero_point")
        if zeros is not None and (zeros.dtype, zeros.shape) != ("I32", (shape[0] / 8, groups)):
            return f"has zeros of shape {list(zeros.shape)} in {zeros.dtype}, which do not fit"
        return ""

    def packed(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed:
        import torch

        weight, tensors = stored.removesuffix("_packed"), checkpoint.tensors
        numbers, scales = tensor_of(stored).view(torch.uint8), tensor_of(weight + "_scale")
        zeros = index = None
        if weight + "_zero_point" in tensors:
            zeros = _eighths(tensor_of(weight + "_zero_point"), 0)
        if weight + "_g_idx" in tensors:
            index = tensor_of(weight + "_g_idx")
        return _grouped(numbers, scales, zeros, index)


class _Transposed(Integers):
    """Packed as `[in, out]`."""

    dtype, item_nbytes, per_item, suffix = "I32", 4, 8, ".qweight"

    def has_zeros(self, config: Settings) -> bool:
        return True

    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        weight, tensors = stored.removesuffix("qweight"), checkpoint.tensors
        scales, zeros = tensors.get(weight + "scales"), tensors.get(weight + "qzeros")
        if scales is None or zeros is None:
            return "lacks scales or zeros beside it"
        rows, columns = self.shape_of(tensors[stored].shape)
        groups = scales.shape[0]
        if scales.shape != (groups, rows) or not groups or columns % groups:
            return f"has scales of shape {list(scales.shape)}, which do not fit"
        if (zeros.dtype, zeros.shape) != ("I32", (groups, rows / 8)):
            return f"has zeros of shape {list(zeros.shape)} in {zeros.dtype}, which do not fit"
        return ""

    def packed(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed:
        weight, tensors = stored.removesuffix("qweight"), checkpoint.tensors
        codes = self._codes(tensor_of(stored)).t()
        numbers = codes[:, 0::2] | codes[:, 1::2] << 4
        zeros = self._zeros(tensor_of(weight + "qzeros"), settings_of(checkpoint.config)).t()
        index = tensor_of(weight + "g_idx") if weight + "g_idx" in tensors else None
        scales = tensor_of(weight + "scales").t().contiguous()
        return _grouped(numbers, scales, zeros.contiguous(), index)

    @abstractmethod
    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        """uint8 `[in, out]`."""

    @abstractmethod
    def _zeros(self, words: torch.Tensor, settings: Settings) -> torch.Tensor:
        """uint8 `[groups, out]`."""


class Awq(_Transposed):
    name = "AWQ's integers of four bits"
    _PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs of a word

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (8 * stored[1], stored[0]) if len(stored) == 2 else stored

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return _eighths(words, 1, self._PLACES)

    def _zeros(self, words: torch.Tensor, settings: Settings) -> torch.Tensor:
        return _eighths(words, 1, self._PLACES)


class Gptq(_Transposed):
    name = "GPTQ's integers of four bits"

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (stored[1], 8 * stored[0]) if len(stored) == 2 else stored

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        return _eighths(words, 0)

    def _zeros(self, words: torch.Tensor, settings: Settings) -> torch.Tensor:
        """The first release of the format has one less than what it means."""
        less = int(settings.get("checkpoint_format") != "gptq_v2")
        return _eighths(words, 1) + less


class FloatFour(Bits):
    """Numbers of e2m1, some of which have a scale in common."""

    dtype, item_nbytes, per_item = "U8", 1, 2
    _GROUP: int
    _SCALES: tuple[str, ...]

    def block_of(self, config: Settings, columns: int) -> tuple[int, int]:
        return 1, self._GROUP

    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        tensors, weight = checkpoint.tensors, stored.removesuffix("_packed")
        scales = tensors.get(weight + "_scale")
        if scales is None:
            return "lacks a scale beside it"
        shape = self.shape_of(tensors[stored].shape)
        if len(shape) != 2:
            return f"has {len(shape)} dimensions, and only matrices are read"
        if scales.dtype not in self._SCALES or scales.shape != (shape[0], shape[1] / self._GROUP):
            return f"has scales of shape {list(scales.shape)} in {scales.dtype}, which do not fit"
        return ""


class Nvfp4(FloatFour):
    name, has_fp8 = "NVFP4", True
    _GROUP, _SCALES = 16, ("F8_E4M3",)
    _FACTOR, _DIVISOR = "_scale_2", "_global_scale"

    def fault(self, checkpoint: Checkpoint, stored: str) -> str:
        tensors, weight = checkpoint.tensors, stored.removesuffix("_packed")
        named = (weight + suffix for suffix in (self._FACTOR, self._DIVISOR))
        whole = [tensors[name] for name in named if name in tensors]
        if not whole:
            return "lacks a scale beside it"
        if len(whole) > 1 or whole[0].shape not in ((), (1,)):
            return "has more than one scale of the whole"
        return super().fault(checkpoint, stored)

    def packed(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed:
        from epd.engine.kernels.packed import Packed

        weight = stored.removesuffix("_packed")
        if weight + self._FACTOR in checkpoint.tensors:
            whole = tensor_of(weight + self._FACTOR).float()
        else:
            whole = 1 / tensor_of(weight + self._DIVISOR).float()
        numbers = tensor_of(stored)
        gains = whole.view(1, 1).repeat(len(numbers), 1)
        return Packed("fp4", numbers, tensor_of(weight + "_scale"), (1, self._GROUP), gains=gains)


class Mxfp4(FloatFour):
    name = "MXFP4"
    _GROUP, _SCALES = 32, ("U8", "F8_E8M0")

    def packed(self, checkpoint: Checkpoint, stored: str, tensor_of: TensorOf) -> Packed:
        import torch

        from epd.engine.kernels.packed import Packed

        scales = tensor_of(stored.removesuffix("_packed") + "_scale").view(torch.float8_e8m0fnu)
        return Packed("fp4", tensor_of(stored), scales, (1, self._GROUP))


def _eighths(
    words: torch.Tensor, dim: int, places: tuple[int, ...] = tuple(range(8))
) -> torch.Tensor:
    """uint8: numbers of four bits that share words of 32 along an axis, each at its place."""
    import torch

    each = [(words >> 4 * at & 15).to(torch.uint8) for at in places]
    return torch.stack(each, dim + 1).flatten(dim, dim + 1)


def _grouped(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    index: torch.Tensor | None,
) -> Packed:
    """Integers of four bits; `index`: the group of each column, in no order.  Raises ValueError
    where groups have several sizes."""
    import torch

    from epd.engine.kernels.packed import Packed

    columns, groups = 2 * numbers.shape[1], scales.shape[1]
    block, order = (1, columns // groups), None
    if index is not None:
        inner = torch.arange(columns, device=index.device) // block[1]
        if not torch.equal(index, inner.to(index)):
            order = index.argsort(stable=True)
            if not torch.equal(index[order], inner.to(index)):
                raise ValueError("groups of columns have several sizes")
            codes = torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)[:, order]
            numbers, order = codes[:, 0::2] | codes[:, 1::2] << 4, order.int()
    return Packed("int4", numbers.contiguous(), scales, block, zeros, order=order)


EIGHT_BITS, FOUR_BITS, NVFP4, MXFP4 = EightBits(), FourBits(), Nvfp4(), Mxfp4()
AWQ, GPTQ = Awq(), Gptq()
