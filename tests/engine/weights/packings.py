"""Weights as publishers pack them, of any numbers, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Way = Callable[[str, torch.Tensor], Tensors]
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": GROUPS}},
}


def drawn(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(len(name))


def nvfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Any numbers, and what they mean, one by one."""
    rows, columns = weight.shape
    codes = torch.randint(16, (rows, columns), generator=drawn(name), dtype=torch.uint8)
    scales = torch.rand(rows, columns // 16, generator=drawn(name)).to(torch.float8_e4m3fn)
    factor = torch.tensor(0.5)
    meaning = torch.empty(rows, columns)
    for at in range(columns):
        values = torch.tensor([float(E2M1[code]) for code in codes[:, at].tolist()])
        meaning[:, at] = values * scales[:, at // 16].float() * factor
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    beside = {"_scale": scales, "_scale_2": factor}
    tensors = {name: packed, **{name + suffix: tensor for suffix, tensor in beside.items()}}
    return tensors | {name.removesuffix("weight") + "input_scale": torch.ones(())}, meaning


def nvfp4_compressed(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, meaning = nvfp4(name, weight)
    inputs = name.removesuffix("weight") + "input_global_scale"
    return {
        name + "_packed": tensors[name],
        name + "_scale": tensors[name + "_scale"],
        name + "_global_scale": 1 / tensors[name + "_scale_2"].view(1),
        inputs: torch.ones(1),
    }, meaning


def int4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    values = torch.randint(-8, 8, (rows, columns), generator=drawn(name))
    scales = torch.rand(rows, columns // 8, generator=drawn(name)).bfloat16()
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for at in range(8):
        words |= (values[:, at::8] + 8) << 4 * at
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    meaning = values.float() * scales.float().repeat_interleave(8, 1)
    shape = torch.tensor([rows, columns])
    return {name + "_packed": words, name + "_scale": scales, name + "_shape": shape}, meaning


def words(codes: torch.Tensor, dim: int, places: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight numbers of four bits to a word, each at its place."""
    groups = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    found = sum(groups[..., at] << 4 * place for at, place in enumerate(places))
    found = torch.where(found >= 1 << 31, found - (1 << 32), found)
    return found.int().movedim(-1, dim).contiguous()


def int4_of_all_kinds(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """With zeros, and groups of columns in no order."""
    rows, columns = weight.shape
    draw = drawn(name)
    codes = torch.randint(16, (rows, columns), generator=draw)
    groups = torch.randperm(columns, generator=draw) // 8
    scales = torch.rand(rows, columns // 8, generator=draw).bfloat16()
    zeros = torch.randint(16, (rows, columns // 8), generator=draw)
    meaning = (codes - zeros[:, groups]).float() * scales[:, groups].float()
    return {
        name + "_packed": words(codes, 1),
        name + "_scale": scales,
        name + "_zero_point": words(zeros, 0),
        name + "_g_idx": groups.int(),
    }, meaning


def transposed(
    name: str, weight: torch.Tensor, packed_dim: int, places: Sequence[int], less: int, draw: Any
) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    codes = torch.randint(16, (columns, rows), generator=draw)
    zeros = torch.randint(less, 16, (columns // 8, rows), generator=draw)
    scales = torch.rand(columns // 8, rows, generator=draw).half()
    groups = torch.arange(columns) // 8
    if packed_dim == 0:
        groups = groups[torch.randperm(columns, generator=draw)]
    meaning = (codes - zeros[groups]).float() * scales[groups].float()
    root = name.removesuffix("weight")
    tensors = {"qweight": words(codes, packed_dim, places), "scales": scales}
    tensors["qzeros"] = words(zeros - less, 1, places)
    if packed_dim == 0:
        tensors["g_idx"] = groups.int()
    return {root + kind: tensor for kind, tensor in tensors.items()}, meaning.t().contiguous()


def gptq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return transposed(name, weight, 0, range(8), 1, drawn(name))


def gptq_v2(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return transposed(name, weight, 0, range(8), 0, drawn(name))


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The order in which its makers put outputs into a word: 0 2 4 6 1 3 5 7."""
    places = [(0, 2, 4, 6, 1, 3, 5, 7).index(at) for at in range(8)]
    return transposed(name, weight, 1, places, 0, drawn(name))


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    codes = torch.randint(16, (rows, columns), generator=drawn(name), dtype=torch.uint8)
    powers = torch.randint(
        110, 130, (rows, columns // 32), generator=drawn(name), dtype=torch.uint8
    )
    values = torch.tensor(E2M1)[codes.int()]
    meaning = values * torch.exp2(powers.float() - 127).repeat_interleave(32, 1)
    packed = codes[:, 0::2] + 16 * codes[:, 1::2]
    return {name + "_packed": packed, name + "_scale": powers}, meaning


FOUR = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nvfp4": (nvfp4, MODELOPT),
    "nvfp4 in two levels": (nvfp4_compressed, COMPRESSED),
    "int4": (int4, INT4),
    "int4 of all kinds": (
        int4_of_all_kinds,
        INT4 | {"config_groups": {"group_0": {"weights": GROUPS | {"symmetric": False}}}},
    ),
    "gptq": (gptq, FOUR),
    "gptq v2": (gptq_v2, FOUR | {"checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}),
    "mxfp4": (mxfp4, COMPRESSED | {"format": "mxfp4-pack-quantized"}),
}
