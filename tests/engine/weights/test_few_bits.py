"""Few bits stay few, or are refused; without files they are made; one tensor at a time is read."""

from __future__ import annotations

import json
import logging
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import safetensors
import torch

from epd.cli.look.doctor import check_checkpoint
from epd.config import EngineConfig
from epd.engine.adapter import adapter_for
from epd.engine.factory import build_executor, build_language, build_vision
from epd.engine.kernels.packed import Packed
from epd.engine.language.experts import PackedExperts
from epd.engine.sharding import WHOLE, Collectives, Shard
from epd.engine.weights import dummies
from epd.engine.weights.loading import load_stage
from epd.engine.weights.open_file import of_rank
from epd.engine.weights.packed_linear import CALLED, PackedLinear
from epd.engine.weights.stored import format_of
from epd.groups.device.tensor_parallel import Cut
from epd.model_files.checkpoint import ModelError, read_checkpoint
from epd.model_files.config_sizes import PRODUCTS
from tests.engine.draft_models import DRAFTING, make_drafting
from tests.engine.driver import Driver
from tests.engine.weights.packings import WAYS
from tests.engine.weights.test_loading import edit_weights
from tests.engine.weights.test_stored import kept_as, one_by_one, packed
from tests.engine.weights.test_stored_fp8 import BLOCK, stored
from tests.engine.weights.test_stored_fp8 import WAYS as EIGHT

BLOCKS = {
    "config_groups": {"a": {"weights": {"strategy": "block", "block_structure": list(BLOCK)}}}
}


def build(build_stage: Any, directory: Path, **settings: Any) -> Any:
    config = EngineConfig(threads=1, kv_nbytes=1 << 20, **settings)
    return build_stage(directory, config, executor=build_executor(config))


def test_experts_that_would_become_wide_are_refused(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = stored(model_dir("qwen3_vl_moe"), tmp_path / "a", lambda n, w: {n: w}, {})
    edit_weights(plain, one_by_one)
    directory, _ = packed("nvfp4", plain, tmp_path / "m")
    name = "model.language_model.layers.0.mlp.experts.3.down_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        """Of one expert, one is not in few bits, so its layer's others cannot stay."""
        for beside in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{name}.{beside}"]
        tensors[f"{name}.weight"] = torch.zeros(64, 48)

    edit_weights(directory, change)
    message = r"NVFP4 \(.*experts.*cannot stay so here: in float32.*--dequantize"
    with pytest.raises(ModelError, match=message):
        build(build_language, directory)
    build(build_language, directory, dequantize=True)


def test_a_tower_that_would_become_wide_is_refused(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    way, settings = EIGHT["channels"]
    directory = stored(model_dir("qwen3_vl"), tmp_path / "m", way, settings)
    name = "model.visual.blocks.0.mlp.linear_fc1.weight"
    edit_weights(directory, lambda t: t.update(way(name, t[name])))
    build(build_language, directory)
    with pytest.raises(ModelError, match=r"1 weights in eight bits \(model.visual.*cannot stay"):
        build(build_vision, directory)
    build(build_vision, directory, dequantize=True)


def test_bytes_of_each_format_are_told(
    model_dir: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At start, and by `epd doctor`, with scales."""
    directory, _ = packed("int4", model_dir("qwen3_vl"), tmp_path / "m")
    tensors = read_checkpoint(directory).tensors
    small = [t for n, t in tensors.items() if "_packed" in n or "_scale" in n or "_shape" in n]
    nbytes = sum(t.data_offsets[1] - t.data_offsets[0] for t in small)
    found = check_checkpoint("model", str(directory))
    assert f"({nbytes / 1e9:.3g} in integers of four bits)" in found.detail
    with caplog.at_level(logging.INFO):
        build(build_language, directory)
    told = f"21 weights in integers of four bits stay so and take {nbytes / 2**30:.3f} GiB"
    assert any(told in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("family", "more"), [("glm4v", 1), ("kimi_k25", 3), ("gemma4", 2)])
async def test_all_that_layers_only_call_is_kept(
    family: str, more: int, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Products that some families have beside the usual ones; logits are those of wide weights."""
    way, settings = EIGHT["channels"]
    directory = stored(model_dir(family), tmp_path / "m", lambda n, w: {n: w}, settings)
    names = "|".join((*CALLED, "kv_b_proj"))  # which may become wide
    named = re.compile(rf"language_model\.(model\.)?\w+\.\d+\.(\w+\.)?({names})\.weight$")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if named.search(name)]:
            tensors.update(way(name, tensors[name]))

    edit_weights(directory, change)
    kept, wide = (build(build_language, directory, dequantize=it) for it in (False, True))
    held = {n.rpartition(".")[2] for n, m in kept.model.named_modules() if is_packed(m)}
    assert len(held - PRODUCTS) == more
    found = []
    for language in (kept, wide):
        serving = Driver(directory, None, language)
        request = await serving.request("r", list(range(3, 40)), max_tokens=1)
        found += language.logits([request.next_step(4096)])
    assert float((found[1] - found[0]).norm() / found[1].norm()) < 1e-4


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
async def test_a_layer_of_drafts_keeps_them(family: str, tmp_path: Path) -> None:
    """Of DeepSeek-V3 all but the factors of latents, in blocks, experts too: as it is published."""
    is_latent = family == "deepseek_v3"
    way, settings = EIGHT["blocks" if is_latent else "channels"]
    text = {"moe_intermediate_size": 2 * BLOCK[0]} if is_latent else {}
    plain = make_drafting(family, tmp_path / "a", agreeing=False, **text)
    directory = stored(plain, tmp_path / "m", way, settings)
    begin = "model.layers." if is_latent else "mtp.layers"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(begin) and "_proj" in n]:
            if "eh_proj" not in name:
                tensors.update(way(name, tensors[name]))

    edit_weights(directory, change)
    language = build_language(directory, DRAFTING, build_executor(DRAFTING))
    held = [n for n, module in language.model.named_modules() if is_packed(module)]
    assert len([name for name in held if name.startswith("mtp.")]) == 7
    assert len([name for name in held if name.startswith("model.")]) > 7
    mixtures = [m for m in language.model.modules() if isinstance(m, PackedExperts)]
    assert len(mixtures) == (3 if is_latent else 0)


def is_packed(module: torch.nn.Module) -> bool:
    return isinstance(module, PackedLinear)


def test_blocks_of_compressed_tensors(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Which names their sizes for each group of layers."""
    way, _ = EIGHT["blocks"]
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", **BLOCKS}
    (theirs,) = EIGHT["blocks"][1:]
    directory = stored(model_dir("qwen3_vl"), tmp_path / "m", way, settings)
    same = stored(model_dir("qwen3_vl"), tmp_path / "s", way, theirs)
    found, expected = (dict(loaded(d).named_parameters()) for d in (directory, same))
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def loaded(directory: Path, **options: Any) -> Any:
    adapter = adapter_for(read_checkpoint(directory))
    return load_stage(adapter, "language", torch.float32, "cpu", **options)


@pytest.mark.parametrize("kind", [*WAYS, *EIGHT])
async def test_without_files_they_are_made(
    kind: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """In the memory of files of the same format, and products of them are finite."""
    files, _ = kept_as(kind, model_dir("qwen3_vl"), tmp_path / "f")
    real = build(build_language, files)
    directory = shutil.copytree(files, tmp_path / "m", symlinks=True)
    (directory / "model.safetensors").unlink()
    made = build(build_language, directory, load_format="dummy")
    sizes = [
        {n: m.weight.nbytes for n, m in each.model.named_modules() if isinstance(m, PackedLinear)}
        for each in (real, made)
    ]
    assert len(sizes[0]) == 21 and sizes[0].keys() == sizes[1].keys()
    assert sum(sizes[1].values()) == pytest.approx(sum(sizes[0].values()), rel=0.15)
    for module in made.model.modules():
        if isinstance(module, PackedLinear):
            wide = module.weight.widened()
            assert 0.01 < float(wide.std()) < 0.04


def without_files(source: Path, target: Path, settings: dict[str, Any]) -> Path:
    directory = shutil.copytree(source, target)
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return directory


def test_what_config_json_leaves_out_is_made_wide(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = WAYS["int4"][1] | {"ignore": ["re:.*down_proj$", "layers.0.mlp.up_proj"]}
    directory = without_files(model_dir("qwen3_vl"), tmp_path / "m", settings)
    model = build(build_language, directory, load_format="dummy").model
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 21 - 3 - 1
    model = build(build_language, directory, load_format="dummy", dequantize=True).model
    assert not any(isinstance(m, PackedLinear) for m in model.modules())


@pytest.mark.parametrize("kind", [*WAYS, *EIGHT])
def test_several_matrices_are_made_at_once(kind: str) -> None:
    config = {"quantization_config": (WAYS | EIGHT)[kind][1]}
    bits = format_of(config, "layers.0.mlp.up_proj.weight")
    assert bits is not None
    made = dummies.packed("experts", bits, config, torch.Size((3, 64, 128)), "cpu")
    assert made.shape == (3, 64, 128) and made.nbytes < 3 * 64 * 128 * 1.6
    assert 0.01 < float(made.widened().std()) < 0.04


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_makes_its_part(rank: int, model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    directory = without_files(model_dir("qwen3_vl"), tmp_path / "m", WAYS["int4"][1])
    adapter = adapter_for(read_checkpoint(directory, weights=False))

    def load(shard: Shard) -> dict[str, torch.Tensor]:
        options = {"load_format": "dummy", "shard": shard}
        model = load_stage(
            adapter, "language", torch.float32, "cpu", **options,
            keeping=lambda model: adapter.language_model(model).layers,
        )  # fmt: skip
        held = [(n, m) for n, m in model.named_modules() if isinstance(m, PackedLinear)]
        return {name: module.weight.widened() for name, module in held}

    whole, part = load(WHOLE), load(Shard(rank, 2, Collectives()))
    for name, weight in part.items():
        if name.endswith("mlp.down_proj"):
            assert torch.equal(weight, whole[name].chunk(2, 1)[rank])
        elif ".mlp." in name:
            assert torch.equal(weight, whole[name].chunk(2)[rank])


@pytest.mark.parametrize("kind", ["int4 of all kinds", "awq", "nvfp4", "blocks"])
def test_one_tensor_at_a_time_is_read(
    kind: str,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not the model's own never takes more than one weight, and its scales."""
    directory, _ = kept_as(kind, model_dir("qwen3_vl"), tmp_path / "m")
    copies: list[weakref.ref[torch.UntypedStorage]] = []
    peaks: list[int] = []
    models: list[torch.nn.Module] = []
    opened = safetensors.safe_open

    class Watched:
        def __init__(self, *given: Any, **options: Any) -> None:
            self._file = opened(*given, **options)

        def __enter__(self) -> Self:
            self._file.__enter__()
            return self

        def __exit__(self, *given: object) -> None:
            self._file.__exit__(*given)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor: torch.Tensor = self._file.get_tensor(name)
            copies.append(weakref.ref(tensor.untyped_storage()))
            own = (p.untyped_storage().data_ptr() for p in models[0].parameters() if not p.is_meta)
            kept, left = set(own), [m for ref in copies if (m := ref()) is not None]
            peaks.append(sum(m.nbytes() for m in left if m.data_ptr() not in kept))
            return tensor

    def keeping(model: torch.nn.Module) -> torch.nn.Module:
        models.append(model)
        layers: torch.nn.Module = adapter.language_model(model).layers
        return layers

    adapter = adapter_for(read_checkpoint(directory))
    monkeypatch.setattr(safetensors, "safe_open", Watched)
    load_stage(adapter, "language", torch.float32, "cpu", keeping=keeping)
    largest = max(
        e.data_offsets[1] - e.data_offsets[0] for e in adapter.checkpoint.tensors.values()
    )
    assert len(peaks) > 40 and 0 < max(peaks) <= 2 * largest


@pytest.mark.parametrize(
    ("columns", "told"), [(512, "use 2 or 4 ranks, or --dequantize"), (256 + 128, "use 3 ranks")]
)
def test_numbers_of_ranks_that_would_do_are_told(columns: int, told: str) -> None:
    """Groups of 128 columns have a scale in common."""
    numbers = torch.zeros(64, columns // 2, dtype=torch.uint8)
    weight = Packed("int4", numbers, torch.ones(64, columns // 128), (1, 128))
    with pytest.raises(ModelError, match=f"down cannot be shared out.*128 numbers.*{told}"):
        of_rank("down", weight, Cut(1, (range(columns // 8),)))
    assert of_rank("down", weight, Cut(1, (range(128),))).shape == (64, 128)
