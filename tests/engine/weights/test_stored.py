"""Weights as publishers store them: four bits, experts one by one, experts in eight bits."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from epd.config import EngineConfig
from epd.engine.adapter import adapter_for
from epd.engine.device.memory_plan import held_nbytes
from epd.engine.factory import build_executor, build_language
from epd.engine.sharding import WHOLE, Collectives, Shard
from epd.engine.weights.loading import load_stage
from epd.engine.weights.packed_linear import PackedLinear
from epd.model_files.checkpoint import ModelError, read_checkpoint
from tests.engine.driver import Driver
from tests.engine.language.test_decoder import fuse
from tests.engine.weights.packings import (
    COMPRESSED,
    FOUR,
    GROUPS,
    INT4,
    WAYS,
    Tensors,
    drawn,
    int4,
)  # fmt: skip
from tests.engine.weights.test_loading import edit_weights
from tests.engine.weights.test_stored_fp8 import WAYS as EIGHT
from tests.engine.weights.test_stored_fp8 import parameters, stored


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
    edit_weights(
        directory,
        lambda t: [
            t.pop(n)
            for n in meanings
            if n + "_packed" in t or n.removesuffix("weight") + "qweight" in t
        ],
    )
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
    assert "21 weights" in told and "GiB as stored; they become float32 and take" in told


def kept_as(kind: str, source: Path, target: Path) -> tuple[Path, Tensors]:
    if kind not in EIGHT:
        return packed(kind, source, target)
    directory = stored(source, target, *EIGHT[kind])
    return directory, parameters(directory)


@pytest.mark.parametrize("kind", [*WAYS, *EIGHT])
async def test_linear_layers_keep_them(
    kind: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """In no more memory than they are stored in; logits are those of what they mean, through
    transformers' layers and fused ones."""
    directory, meanings = kept_as(kind, model_dir("qwen3_vl"), tmp_path / "m")
    config = EngineConfig(threads=1, kv_nbytes=1 << 20)
    executor = build_executor(config)
    wide = build_language(directory, replace(config, dequantize=True), executor)
    assert not any(isinstance(module, PackedLinear) for module in wide.model.modules())
    kept, fused = (build_language(directory, config, executor) for _ in range(2))
    held = {n: m.weight for n, m in kept.model.named_modules() if isinstance(m, PackedLinear)}
    for name, weight in held.items():
        assert torch.equal(weight.widened(), meanings[f"{name}.weight"]), name
        assert all(tensor.is_contiguous() for tensor in weight.tensors().values()), name
    entries = read_checkpoint(directory).tensors
    small = [entry for name, entry in entries.items() if any(part in name for part in held)]
    nbytes = sum(entry.data_offsets[1] - entry.data_offsets[0] for entry in small)
    gains = sum(weight.gains.nbytes for weight in held.values() if weight.gains is not None)
    # a scale of the whole is held for each channel, and zeros and places of columns are bytes
    assert len(held) == 21 and sum(w.nbytes for w in held.values()) <= 1.1 * nbytes + gains
    before = held_nbytes(fused.model)
    fused.forward = fuse(fused)  # which lays products side by side
    assert held_nbytes(fused.model) <= before
    found = []
    for language in (wide, kept, fused):
        serving = Driver(directory, None, language)
        request = await serving.request("r", list(range(3, 40)), max_tokens=1)
        found += language.logits([request.next_step(4096)])
        serving.release([request])
    for logits in found[1:]:
        assert float((logits - found[0]).norm() / found[0].norm()) < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [*WAYS, *EIGHT])
def test_a_rank_keeps_its_part(
    kind: str, rank: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """At the borders of blocks and groups, or it is said which weight cannot be shared out."""
    directory, _ = kept_as(kind, model_dir("qwen3_vl"), tmp_path / "m")
    adapter = adapter_for(read_checkpoint(directory))
    shard = Shard(rank, 2, Collectives())
    load = partial(load_stage, adapter, "language", torch.float32, "cpu", shard=shard)
    if kind in ("gptq", "gptq v2", "int4 of all kinds", "blocks", "mxfp4"):
        with pytest.raises(ModelError, match=r"cannot be shared out.*(order|share a scale)"):
            load(keeping=lambda model: adapter.language_model(model).layers)
        return
    kept = load(keeping=lambda model: adapter.language_model(model).layers)
    expected = dict(load().named_parameters())
    held = {n: m.weight for n, m in kept.named_modules() if isinstance(m, PackedLinear)}
    assert len(held) == 21
    for name, weight in held.items():
        assert torch.equal(weight.widened(), expected[f"{name}.weight"]), name


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
        ("int4 of all kinds", None, "weight_scale", "four bits and has no scales"),
        ("gptq", FOUR | {"bits": 3}, "", "not read.*gptq"),
        ("gptq", None, "scales", "GPTQ.*lacks scales or zeros"),
        ("awq", {"quant_method": "awq", "bits": 4, "version": "gemv"}, "", "not read.*awq"),
        ("awq", None, "qzeros", "AWQ.*lacks scales or zeros"),
        ("mxfp4", None, "weight_scale", "MXFP4 and lacks a scale"),
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


def kimi(source: Path, target: Path) -> tuple[Path, Tensors]:
    """Experts one by one, in integers of four bits, of which the text's part of config.json
    tells; and what they mean."""
    directory = shutil.copytree(source, target)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["quantization_config"] = INT4
    (directory / "config.json").write_text(json.dumps(config))
    meanings: Tensors = {}

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            packed, meanings[name] = int4(name, tensors.pop(name))
            tensors.update(packed)

    edit_weights(directory, change)
    return directory, meanings


def test_kimi_as_it_is_published(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    directory, meanings = kimi(model_dir("kimi_k25"), tmp_path / "m")
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
