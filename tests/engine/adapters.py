"""LoRA adapters of tiny checkpoints, written as PEFT writes them, and models that they are part of.

Independent of epd: modules are those of the transformers class, and a merged checkpoint has the
sum in its weights.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.reference import reference_model

LAYERS = r".*layers\.\d+\.(self_attn|mlp)\."  # of a decoder, where a tower has other names


def make_adapter(
    directory: Path,
    model_dir: Path,
    seed: int,
    targets: str = LAYERS + r"(q_proj|v_proj)",
    *,
    rank: int = 4,
    alpha: float = 8,
    **more: Any,
) -> Path:
    """Of each linear module whose name matches; `more`: fields of its config."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in reference_model(model_dir).named_modules():
        if isinstance(module, torch.nn.Linear) and re.fullmatch(targets, name):
            for letter, shape in (
                ("A", (rank, module.in_features)),
                ("B", (module.out_features, rank)),
            ):
                numbers = torch.randn(shape, generator=generator) * 0.2
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = numbers
    assert tensors
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config | more))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge(directory: Path, model_dir: Path, adapter: Path) -> Path:
    """A checkpoint with the adapter in its weights."""
    shutil.copytree(model_dir, directory)
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    root = config["r"] ** (0.5 if config.get("use_rslora") else 1)
    model = copy.deepcopy(reference_model(model_dir))
    for name, b in tensors.items():
        if name.endswith("lora_B.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            a = tensors[name.replace("lora_B", "lora_A")]
            model.get_submodule(module).weight.data += config["lora_alpha"] / root * b @ a
    model.save_pretrained(directory)
    return directory
