"""SmolLM2 with its linear layers in four bits, in each form in which publishers store them.

Every number is rounded to the nearest that its format has, as the simplest quantiser does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 64  # of four-bit integers; 128 does not divide a row of 576
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            }
        }
    },
}


def int4(name: str, weight: torch.Tensor) -> Tensors:
    """Eight integers in a word; a scale for each group."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(2) / 7.5).bfloat16()
    values = (grouped / scales[..., None].float()).round().clamp(-8, 7).flatten(1).long() + 8
    words = sum(values[:, at::8] << 4 * at for at in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    shape = torch.tensor(weight.shape)
    return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": shape}


def nvfp4(name: str, weight: torch.Tensor) -> Tensors:
    """As modelopt stores it: a scale for each 16 in eight bits, and one for all."""
    grouped = weight.unflatten(1, (-1, 16))
    whole = weight.abs().amax() / (448 * 6)
    scales = (grouped.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    values = (grouped / (scales.float() * whole).clamp(min=1e-12)[..., None]).flatten(1)
    middles = (FP4[1:] + FP4[:-1]) / 2
    codes = (torch.bucketize(values.abs(), middles) + 8 * (values < 0)).to(torch.uint8)
    beside = {f"{name}_scale": scales, f"{name}_scale_2": whole}
    return {name: codes[:, 0::2] + 16 * codes[:, 1::2]} | beside


def nvfp4_compressed(name: str, weight: torch.Tensor) -> Tensors:
    """The same as compressed-tensors stores it."""
    found = nvfp4(name, weight)
    whole = (1 / found[f"{name}_scale_2"]).view(1)
    scales = {f"{name}_scale": found[f"{name}_scale"], f"{name}_global_scale": whole}
    return {f"{name}_packed": found[name]} | scales


WAYS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], dict[str, Any]]] = {
    "int4": (int4, INT4),
    "NVFP4, modelopt": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "NVFP4, compressed-tensors": (
        nvfp4_compressed,
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
}


def stored(way: str, source: Path, target: Path) -> Path:
    """The checkpoint of `source` with its linear layers in this form, in the new `target`."""
    store, settings = WAYS[way]
    target.mkdir()
    for path in source.iterdir():
        if path.name != "model.safetensors":
            (target / path.name).symlink_to(path)
    found: Tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        found |= store(name, weight) if name.endswith("proj.weight") else {name: weight}
    tensors = {name: tensor.contiguous() for name, tensor in found.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").unlink()
    written = json.dumps(config | {"quantization_config": settings})
    (target / "config.json").write_text(written)
    return target
