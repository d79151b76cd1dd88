"""Checkpoints in eight bits load as what they mean, and what cannot be read is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.config import EngineConfig
from epd.engine.adapter import adapter_for
from epd.engine.factory import build_language
from epd.engine.weights.fp8 import Fp8Linear
from epd.engine.weights.loading import load_stage
from epd.model_files.checkpoint import ModelError, read_checkpoint
from tests.engine.weights.test_loading import edit_weights

BLOCK = (32, 16)
BLOCKS = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def is_linear(name: str) -> bool:
    return "language_model.layers." in name and name.endswith("proj.weight")


def in_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK[0]) * BLOCK[0], -(-columns // BLOCK[1]) * BLOCK[1])
    padded[:rows, :columns] = weight.float()
    tiles = padded.unflatten(0, (-1, BLOCK[0])).unflatten(2, (-1, BLOCK[1]))
    scales = tiles.abs().amax((1, 3)).clamp(min=1e-6) / 448
    values = (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return {name: values.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def in_channels(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight.float() / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    inputs = name.removesuffix(".weight") + ".input_scale"
    return {name: values, f"{name}_scale": scales, inputs: torch.ones(1)}


def as_one(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax().view(1) / 448
    return {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


WAYS: dict[str, tuple[Callable[[str, torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "blocks": (in_blocks, BLOCKS),
    "channels": (in_channels, CHANNELS),
    "one": (as_one, CHANNELS),
}


def stored(
    source: Path, target: Path, way: Callable[..., Any], settings: dict[str, Any] | None
) -> Path:
    directory = shutil.copytree(source, target)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if is_linear(name)]:
            tensors.update(way(name, tensors[name]))

    edit_weights(directory, change)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


def parameters(directory: Path) -> dict[str, torch.Tensor]:
    adapter = adapter_for(read_checkpoint(directory))
    return dict(load_stage(adapter, "language", torch.float32, "cpu").named_parameters())


@pytest.mark.parametrize("kind", WAYS)
def test_weights_are_what_they_mean(
    kind: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    way, settings = WAYS[kind]
    plain = parameters(model_dir("qwen3_vl"))
    directory = stored(model_dir("qwen3_vl"), tmp_path / "m", way, settings)
    for name, found in parameters(directory).items():
        if is_linear(name):
            assert not torch.equal(found, plain[name])
            peak = plain[name].abs().amax()  # a step is an eighth of a number, a half of it is lost
            assert bool(((found - plain[name]).abs() <= plain[name].abs() / 15 + peak / 400).all())
        else:
            assert torch.equal(found, plain[name])
    config = EngineConfig(threads=1, kv_nbytes=1 << 20, quantization="fp8")
    model = build_language(directory, config).model
    assert any(isinstance(module, Fp8Linear) for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "settings", "change", "message"),
    [
        ("channels", {"quant_method": "gptq", "bits": 4}, None, "is quantised in a way"),
        ("channels", CHANNELS, ".weight_scale", "is stored in eight bits and has no scales beside"),
        ("blocks", BLOCKS | {"weight_block_size": [64, 64]}, None, "fit neither channels nor"),
        ("blocks", BLOCKS | {"weight_block_size": None}, None, "fit neither channels nor"),
    ],
)
def test_what_cannot_be_read_is_told(
    kind: str,
    settings: dict[str, Any],
    change: str | None,
    message: str,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    directory = stored(model_dir("qwen3_vl"), tmp_path / "m", WAYS[kind][0], settings)
    if change is not None:
        name = "model.language_model.layers.0.mlp.up_proj" + change
        edit_weights(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=message):
        parameters(directory)
