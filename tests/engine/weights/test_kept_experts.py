"""Experts of a mixture in few bits stay so, and answer as what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from epd.config import EngineConfig
from epd.engine.adapter import adapter_for
from epd.engine.factory import build_executor, build_language
from epd.engine.language.experts import PackedExperts
from epd.engine.sharding import Collectives, Shard
from epd.engine.weights.loading import load_stage
from epd.model_files.checkpoint import ModelError, read_checkpoint
from tests.engine.driver import Driver
from tests.engine.weights.packings import Tensors
from tests.engine.weights.test_loading import edit_weights
from tests.engine.weights.test_stored import apart, experts, kept_as, kimi  # noqa: F401

KINDS = ("nvfp4", "nvfp4 in two levels", "int4", "awq", "channels", "one", "blocks")


def mixture(kind: str, source: Path, target: Path) -> Path:
    """Of which each expert is stored in this format; blocks are as high as no expert ends in."""
    if kind != "blocks":
        return kept_as(kind, source, target)[0]
    directory, _ = kept_as("channels", source, target)

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            if tensors[name].dtype == torch.float8_e4m3fn:
                rows, columns = tensors[name].shape
                scales = torch.rand(-(-rows // 16), -(-columns // 16)) / 448
                tensors[f"{name}_scale_inv"] = scales
                del tensors[f"{name}_scale"]

    edit_weights(directory, change)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", KINDS)
async def test_a_mixture_keeps_them(kind: str, apart: Path, tmp_path: Path) -> None:  # noqa: F811
    """In the memory that they are stored in; logits are those of what they mean."""
    directory = mixture(kind, apart, tmp_path / "m")
    config = EngineConfig(threads=1, kv_nbytes=1 << 20)
    executor = build_executor(config)
    wide = build_language(directory, replace(config, dequantize=True), executor)
    kept = build_language(directory, config, executor)
    assert not any(isinstance(module, PackedExperts) for module in wide.model.modules())
    held = {n: m for n, m in kept.model.named_modules() if isinstance(m, PackedExperts)}
    expected = experts(directory)
    for name, module in held.items():
        for part, weight in module.weights.items():
            assert torch.equal(weight.widened(), expected[f"{name}.{part}"]), name
    assert len(held) == 3
    entries = read_checkpoint(directory).tensors.items()
    small = [entry for name, entry in entries if ".experts." in name]
    nbytes = sum(entry.data_offsets[1] - entry.data_offsets[0] for entry in small)
    weights = [weight for module in held.values() for weight in module.weights.values()]
    gains = sum(weight.gains.nbytes for weight in weights if weight.gains is not None)
    gains += sum(weight.scales.nbytes for weight in weights) if kind == "one" else 0
    assert sum(weight.nbytes for weight in weights) <= 1.1 * nbytes + gains
    found = []
    for language in (wide, kept):
        serving = Driver(directory, None, language)
        request = await serving.request("r", list(range(3, 40)), max_tokens=1)
        found.append(language.logits([request.next_step(4096)]))
        serving.release([request])
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["int4", "channels", "nvfp4", "awq"])
def test_a_rank_keeps_its_part_of_each(
    kind: str,
    rank: int,
    apart: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """16 or 32 of the 48 rows and columns of each expert."""
    adapter = adapter_for(read_checkpoint(mixture(kind, apart, tmp_path / "m")))
    shard = Shard(rank, 2, Collectives())
    load = partial(load_stage, adapter, "language", torch.float32, "cpu", shard=shard)
    kept = load(keeping=lambda model: adapter.language_model(model).layers)
    expected = dict(load().named_parameters())
    held = {n: m for n, m in kept.named_modules() if isinstance(m, PackedExperts)}
    assert len(held) == 3
    for name, module in held.items():
        for part, weight in module.weights.items():
            assert torch.equal(weight.widened(), expected[f"{name}.{part}"]), name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gptq", "gate_up_proj cannot stay.*order of their own; use --dequantize"),
        ("rows", "gate_up_proj cannot stay.*32 rows share a scale; use --dequantize"),
    ],
)
def test_what_cannot_stay_is_named(
    kind: str,
    message: str,
    apart: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    directory, _ = kept_as("blocks" if kind == "rows" else kind, apart, tmp_path / "m")
    config = EngineConfig(threads=1, kv_nbytes=1 << 20)
    with pytest.raises(ModelError, match=message):
        build_language(directory, config, build_executor(config))


async def test_kimi_keeps_its_experts(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """As it is published: one by one, in integers of four bits, beside one for all tokens."""
    directory, _ = kimi(model_dir("kimi_k25"), tmp_path / "m")
    engine = EngineConfig(threads=1, kv_nbytes=1 << 20)
    found = []
    for dequantize in (True, False):
        executor = build_executor(engine)
        language = build_language(directory, replace(engine, dequantize=dequantize), executor)
        held = [m for m in language.model.modules() if isinstance(m, PackedExperts)]
        assert len(held) == (0 if dequantize else 2)
        serving = Driver(directory, None, language)
        request = await serving.request("r", list(range(3, 40)), max_tokens=1)
        found.append(language.logits([request.next_step(4096)]))
        serving.release([request])
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 1e-4
