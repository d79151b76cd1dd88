"""Adapters of towers, mixed in one batch of images, give the rows of each merged into the model."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from epd.config import EngineConfig, LoraConfig
from epd.engine.base import EncodeFailure, Patches, Rows
from epd.engine.factory import build_executor, build_vision
from epd.engine.vision.engine import TorchVisionEngine
from epd.families.registry import ADAPTERS, family_named
from epd.model_files.checkpoint import ModelError
from epd.model_files.geometry import image_geometry
from epd.model_files.lora import read_adapter
from tests.engine.adapters import LAYERS, make_adapter, merge
from tests.engine.conftest import CONFIG, drawn_image
from tests.engine.driver import png
from tests.engine.reference import reference_model
from tests.engine.tiny_models import VISION_FAMILIES
from tests.engine.vision.test_tower_graphs import capture

SIZES = ((64, 64), (37, 101), (90, 50), (33, 47))
# Of these the language model is dense; their adapters change all of a tower's linear layers.
OFTEN = ("qwen2_5_vl", "internvl", "mistral3")
SERVED = [
    family if family in OFTEN else pytest.param(family, marks=pytest.mark.long)
    for family in VISION_FAMILIES
    if pkgutil.resolve_name(ADAPTERS[family]).adapts_tower and "moe" not in family
]
CAPTURED = [
    "qwen2_vl",
    *(pytest.param(f, marks=pytest.mark.long) for f in ("qwen3_vl", "paddleocr_vl")),
]
SOME = r".*(qkv|q_proj|up_proj|1)"


def of_tower(family: str, name: str = r".+") -> str:
    known = family_named(family)
    assert known is not None
    return f"({'|'.join(known.vision)})".replace(".", r"\.") + rf"\.({name})"


def vision_of(
    directory: Path, *modules: Path, config: EngineConfig = CONFIG, **lora: Any
) -> TorchVisionEngine:
    """Its runs of few patches are captured, where they can be."""
    texts = tuple(f"a{i}={path}" for i, path in enumerate(modules))
    enabled = LoraConfig(enabled=True, modules=texts, **lora)
    engine = msgspec.structs.replace(config, lora=enabled)
    return build_vision(directory, engine, build_executor(engine), max_batch_patches=1024)


async def patches_of(vision: TorchVisionEngine, adapters: Sequence[str]) -> list[Patches]:
    checkpoint = vision._adapter.checkpoint
    found = []
    for index, (size, adapter) in enumerate(zip(SIZES, adapters, strict=True)):
        grid = image_geometry(checkpoint.config, checkpoint.preprocessor, *size).grid_thw
        patches = await vision.preprocess(png(drawn_image(index, *size)), grid)
        found.append(replace(patches, adapter=adapter))
    return found


async def rows_of(vision: TorchVisionEngine, adapters: Sequence[str]) -> list[torch.Tensor]:
    rows = await vision.encode(await patches_of(vision, adapters))
    assert all(isinstance(one, Rows) for one in rows), rows
    return [one.tensor for one in rows]


def two_of(family: str, directory: Path, place: Path) -> list[Path]:
    """Every linear layer of a tower is changed by one adapter, some by another one."""
    return [
        make_adapter(place / "all", directory, 1, of_tower(family), rank=3, alpha=4),
        make_adapter(place / "some", directory, 2, of_tower(family, SOME)),
    ]


async def of_merged(
    directory: Path, made: Sequence[Path], place: Path, config: EngineConfig = CONFIG
) -> list[list[torch.Tensor]]:
    """Rows of the model, then of each adapter merged into it."""
    models = [directory, *(merge(place / f"m{i}", directory, a) for i, a in enumerate(made))]
    return [await rows_of(build_vision(model, config), [""] * 4) for model in models]


async def check_mixed(
    mixed: TorchVisionEngine, of_models: list[list[torch.Tensor]], limit: float
) -> None:
    """Images of both adapters and of none; of the rows the difference in norm is within the limit.
    Who has none has the bits that it has beside others of none."""
    first, second = mixed.adapters
    plain, *others = of_models
    rows = await rows_of(mixed, (first, second, "", first))
    golden = [others[0][0], others[1][1], plain[2], others[0][3]]
    for found, expected, without in zip(rows, golden, plain, strict=True):
        difference = (found.float() - expected).norm() / expected.norm()
        assert difference < limit, difference
        assert (without is expected) or (without - expected).norm() / without.norm() > 0.1
    assert torch.equal(rows[2], (await rows_of(mixed, [""] * 4))[2])


@pytest.mark.parametrize("family", SERVED)
async def test_one_batch_gives_the_rows_of_each_merged_model(
    family: str, model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = model_dir(family)
    made = two_of(family, directory, tmp_path)
    await check_mixed(vision_of(directory, *made), await of_merged(directory, made, tmp_path), 1e-4)


@pytest.mark.parametrize("family", CAPTURED)
async def test_captured_runs_have_adapters_too(
    family: str,
    model_dir: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What pads a run has none, and runs without adapters have graphs of their own."""
    directory = model_dir(family)
    made = two_of(family, directory, tmp_path)
    mixed = vision_of(directory, *made)
    graphs = capture(mixed, monkeypatch).graphs
    await check_mixed(mixed, await of_merged(directory, made, tmp_path), 1e-4)
    assert {adapts for _, adapts in graphs._graphs} == {False, True}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # by PEFT itself
async def test_rows_are_those_of_peft(model_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Its own files, names and sums; one adapter changes both parts of the model."""
    peft = pytest.importorskip("peft")
    directory = model_dir("qwen2_5_vl")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["qkv", "attn.proj", "q_proj"])
    model = peft.get_peft_model(copy.deepcopy(reference_model(directory)), config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    model.save_pretrained(tmp_path / "peft")
    mixed = vision_of(directory, tmp_path / "peft")
    adapters = mixed.adapters * 4
    found = await rows_of(mixed, adapters)
    for patches, rows in zip(await patches_of(mixed, adapters), found, strict=True):
        grid = torch.tensor([patches.grid_thw])
        with torch.inference_mode():
            seen = model.base_model.model.model.get_image_features(patches.pixels, grid)
        expected = torch.cat(list(seen.pooler_output))
        torch.testing.assert_close(rows, expected, atol=2e-4, rtol=1e-4)


async def test_they_come_and_go_between_batches(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """What goes fails alone, whatever is asked for with it; bystanders keep their bits."""
    directory, root = model_dir("qwen2_vl"), tmp_path / "root"
    make_adapter(root / "a", directory, 1, of_tower("qwen2_vl"))
    make_adapter(root / "b", directory, 2, LAYERS + "q_proj")
    vision = vision_of(directory, runtime_dir=str(root))
    a, b = (read_adapter(root / name, 16).digest for name in "ab")
    assert await vision.hold_adapters({a: "a", b: "b"}) == {}
    assert vision.adapters == (a, b)
    plain, changed, as_plain, _ = await rows_of(vision, ("", a, b, ""))
    other = await rows_of(vision, ("", "", "", ""))
    assert torch.equal(plain, other[0]) and torch.equal(as_plain, other[2])
    assert (changed - other[1]).abs().max() > 1e-2
    batch = vision.encode(await patches_of(vision, (a, "", "", a)))
    going = vision.hold_adapters({b: "b"})
    assert vision.adapters == (b,)
    assert await going == {}
    assert all(isinstance(one, Rows) for one in await batch), "it was launched before"
    first, second, *_ = await vision.encode(await patches_of(vision, (a, "", b, "")))
    assert isinstance(first, EncodeFailure) and "its adapter is not held here" in first.reason
    assert isinstance(second, Rows) and torch.equal(second.tensor, other[1])


def test_what_no_product_is_changed_by_is_refused(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """A tower whose products have other rows; a module that is no linear layer."""
    place = make_adapter(tmp_path / "o", model_dir("gemma4"), 0, of_tower("gemma4", ".*q_proj.*"))
    with pytest.raises(ModelError, match="none of the vision tower's linear layers that"):
        vision_of(model_dir("gemma4"), place)
