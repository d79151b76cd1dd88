"""Weights as publishers store them: four bits, experts one by one, experts in eight bits."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.engine.adapter import adapter_for
from epd.engine.sharding import WHOLE, Collectives, Shard
from epd.engine.weights.loading import load_stage
from epd.model_files.checkpoint import ModelError, read_checkpoint
from tests.engine.weights.test_loading import edit_weights
from tests.engine.weights.test_stored_fp8 import parameters, stored

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


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nvfp4": (nvfp4, MODELOPT),
    "nvfp4 in two levels": (nvfp4_compressed, COMPRESSED),
    "int4": (int4, INT4),
}


def packed(
    kind: str, source: Path, target: Path, settings: dict[str, Any] | None = None
) -> tuple[Path, Tensors]:
    """A directory whose linear layers are packed, and what they mean."""
    way, usual = WAYS[kind]
    meanings: Tensors = {}

    def written(name: str, weight: torch.Tensor) -> Tensors:
        tensors, meanings[name] = way(name, weight)
        return tensors

    directory = stored(source, target, written, usual if settings is None else settings)
    edit_weights(directory, lambda t: [t.pop(n) for n in meanings if n + "_packed" in t])
    return directory, meanings


@pytest.mark.parametrize("kind", WAYS)
def test_four_bits_are_what_they_mean(
    kind: str, model_dir: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, meanings = packed(kind, model_dir("qwen3_vl"), tmp_path / "m")
    plain = parameters(model_dir("qwen3_vl"))
    with caplog.at_level(logging.INFO):
        found = parameters(directory)
    assert found.keys() == plain.keys() and len(meanings) == 21
    for name, weight in found.items():
        assert torch.equal(weight, meanings.get(name, plain[name])), name
    (told,) = [r.getMessage() for r in caplog.records if "become float32" in r.getMessage()]
    assert "21 weights" in told and "GiB instead of" in told


@pytest.mark.parametrize(
    ("kind", "settings", "change", "message"),
    [
        ("nvfp4", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "", "not read.*W4A8_AWQ"),
        ("nvfp4", {"quant_method": "bitsandbytes"}, "", "not read.*bitsandbytes"),
        ("nvfp4", {}, "", "is stored as U8"),
        ("nvfp4", None, "weight_scale", "NVFP4 and lacks a scale"),
        ("nvfp4", None, "weight_scale_2", "NVFP4 and lacks a scale"),
        ("nvfp4 in two levels", None, "weight_global_scale", "NVFP4 and lacks a scale"),
        ("int4", None, "weight_scale", "four bits and has no scales"),
        (
            "int4",
            INT4 | {"config_groups": {"group_0": {"weights": GROUPS | {"symmetric": False}}}},
            "",
            "not read.*pack-quantized",
        ),
        (
            "int4",
            INT4 | {"config_groups": {"group_0": {"weights": GROUPS | {"num_bits": 8}}}},
            "",
            "not read.*pack-quantized",
        ),
        ("int4", COMPRESSED, "", "not read.*nvfp4"),
    ],
)
def test_what_cannot_be_read_is_told(
    kind: str,
    settings: dict[str, Any] | None,
    change: str,
    message: str,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    directory, _ = packed(kind, model_dir("qwen3_vl"), tmp_path / "m", settings)
    if change:
        name = f"model.language_model.layers.0.mlp.up_proj.{change}"
        edit_weights(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=message):
        parameters(directory)


def test_scales_of_another_group_size_are_told(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    directory, _ = packed("nvfp4", model_dir("qwen3_vl"), tmp_path / "m")
    name = "model.language_model.layers.0.mlp.up_proj.weight_scale"
    edit_weights(directory, lambda t: t.update({name: t[name][:, ::2].contiguous()}))
    with pytest.raises(ModelError, match="which do not fit"):
        parameters(directory)


# --- experts --------------------------------------------------------------------------------------


def one_by_one(tensors: Tensors) -> None:
    """Experts as most publishers store them; those of the tiny model are transposed."""
    for name in [name for name in tensors if ".mlp.experts." in name]:
        joint = tensors.pop(name).transpose(1, 2)
        prefix, _, kind = name.rpartition(".")
        for expert, weight in enumerate(joint):
            if kind == "down_proj":
                parts = {"down_proj": weight}
            else:
                parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            for part, rows in parts.items():
                tensors[f"{prefix}.{expert}.{part}.weight"] = rows.contiguous()


def experts(directory: Path, shard: Shard = WHOLE) -> Tensors:
    adapter = adapter_for(read_checkpoint(directory))
    return dict(
        load_stage(adapter, "language", torch.float32, "cpu", shard=shard).named_parameters()
    )


@pytest.fixture(scope="module")
def apart(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny mixture with each expert by itself."""
    target = tmp_path_factory.mktemp("apart") / "m"
    directory = stored(model_dir("qwen3_vl_moe"), target, lambda name, weight: {name: weight}, {})
    edit_weights(directory, one_by_one)
    return directory


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2, Collectives()), Shard(1, 2, Collectives())])
def test_experts_one_by_one_are_put_together(
    shard: Shard, apart: Path, model_dir: Callable[[str], Path]
) -> None:
    joint, found = experts(model_dir("qwen3_vl_moe"), shard), experts(apart, shard)
    assert joint.keys() == found.keys()
    for name, weight in joint.items():
        assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: t.pop(n), "lacks 1 tensors.*layers.1.mlp.experts.gate_up_proj"),
        (
            lambda t, n: t.update({n.replace(".3.", ".4."): t[n].clone()}),
            "no place for.*experts.4.up",
        ),
        (lambda t, n: t.update({n: t[n][1:].clone()}), "has shape"),
    ],
)
def test_an_expert_too_few_too_many_or_too_small(
    change: Callable[[Tensors, str], object], message: str, apart: Path, tmp_path: Path
) -> None:
    directory = stored(apart, tmp_path / "m", lambda name, weight: {name: weight}, {})
    name = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"
    edit_weights(directory, lambda tensors: change(tensors, name))
    with pytest.raises(ModelError, match=message):
        experts(directory)


def test_experts_of_four_bits(apart: Path, tmp_path: Path) -> None:
    directory, meanings = packed("nvfp4", apart, tmp_path / "m")
    found = experts(directory)
    prefix = "model.language_model.layers.2.mlp.experts"
    for expert in range(4):
        parts = [meanings[f"{prefix}.{expert}.{n}_proj.weight"] for n in ("gate", "up")]
        assert torch.equal(found[f"{prefix}.gate_up_proj"][expert], torch.cat(parts))


def test_kimi_as_it_is_published(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts one by one, in integers of four bits, of which the text's part of config.json
    tells."""
    directory = shutil.copytree(model_dir("kimi_k25"), tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["quantization_config"] = INT4
    (directory / "config.json").write_text(json.dumps(config))
    meanings: Tensors = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            packed, meanings[name] = int4(name, tensors.pop(name))
            tensors.update(packed)

    edit_weights(directory, change)
    found = experts(directory)
    (prefix,) = {name.partition("1.mlp.experts.")[0] for name in meanings if "1.mlp.exp" in name}
    for expert in range(8):
        gate, up, down = (
            meanings[f"{prefix}1.mlp.experts.{expert}.{part}_proj.weight"]
            for part in ("gate", "up", "down")
        )
        held = "model.language_model.layers.1.mlp.experts."
        assert torch.equal(found[held + "gate_up_proj"][expert], torch.cat((gate, up)))
        assert torch.equal(found[held + "down_proj"][expert], down)


def test_what_routes_tokens_stays_in_float32(model_dir: Callable[[str], Path]) -> None:
    adapter = adapter_for(read_checkpoint(model_dir("kimi_k25")))
    model = load_stage(adapter, "language", torch.bfloat16, "cpu")
    named = {n: b.dtype for n, b in model.named_buffers() if n.endswith("correction_bias")}
    assert set(named.values()) == {torch.float32} and len(named) == 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_joint_experts_in_eight_bits(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Blocks of 16 in each expert, stored transposed as the wide ones are."""
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    directory = stored(
        model_dir("qwen3_vl_moe"), tmp_path / "m", lambda name, weight: {name: weight}, settings
    )
    meanings: Tensors = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            values = tensors[name].to(torch.float8_e4m3fn)
            blocks = [-(-size // 16) for size in values.shape[1:]]
            scales = torch.rand(len(values), *blocks, generator=drawn(name))
            wide = scales.repeat_interleave(16, 1).repeat_interleave(16, 2)
            wide = wide[:, : values.shape[1], : values.shape[2]]
            meanings[name] = (values.float() * wide).transpose(1, 2)
            tensors.update({name: values, f"{name}_scale_inv": scales})

    edit_weights(directory, change)
    found = experts(directory)
    assert len(meanings) == 6
    for name, weight in meanings.items():
        assert torch.equal(found[name], weight), name
