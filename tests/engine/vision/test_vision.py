"""Batches of images: order, isolation, contract, independence of neighbours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from epd.engine.base import EncodeFailure, Patches, Rows
from epd.engine.device import slices
from epd.engine.factory import build_executor, build_vision
from epd.engine.vision.engine import TorchVisionEngine
from epd.errors import MediaError
from tests.engine.conftest import CONFIG, chat, drawn_image
from tests.engine.device.test_slices import Watch
from tests.engine.driver import Driver, expand, png
from tests.engine.tiny_models import VISION_FAMILIES

SIZES = [(40, 40), (90, 33), (64, 101)]


async def patches_of(serving: Driver, *sizes: tuple[int, int]) -> list[Patches]:
    vision = serving.vision
    assert vision is not None
    images = [drawn_image(i, *size) for i, size in enumerate(sizes)]
    _, layouts = expand(serving.model_dir, chat((len(images), "x")), images)
    return [
        await vision.preprocess(png(image), layout.grid_thw)
        for image, layout in zip(images, layouts, strict=True)
    ]


def vision_of(serving: Driver) -> TorchVisionEngine:
    assert serving.vision is not None
    return serving.vision


@pytest.mark.parametrize("family", VISION_FAMILIES)
async def test_slices_change_no_row(family: str, driver: Callable[[str], Driver]) -> None:
    """Layer by layer, with other work of the device between them."""
    serving = driver(family)
    config = msgspec.structs.replace(CONFIG, max_quantum_ms=0.001)
    executor = build_executor(config)
    sliced = build_vision(serving.model_dir, config, executor, max_batch_patches=256)
    batch = await patches_of(serving, *SIZES)
    queued = threading.Event()
    executor.launch(queued.wait)
    launched = asyncio.ensure_future(sliced.encode(batch))
    await asyncio.sleep(0)
    others = [executor.launch(torch.ones, 8) for _ in range(4)]
    queued.set()
    for rows, expected in zip(await launched, await vision_of(serving).encode(batch), strict=True):
        assert isinstance(rows, Rows) and isinstance(expected, Rows)
        assert torch.equal(rows.tensor, expected.tensor)
    assert sliced._slices._per_slice == 1 and sliced._slices._layer > 1
    assert sum(other.done() for other in others) >= min(len(others), sliced._slices._layer - 1)
    await executor.close()


async def test_a_start_under_load_is_over_when_the_load_is(
    driver: Callable[[str], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a made-up clock: the device is shared with two others while the engine starts."""
    monkeypatch.setattr(slices, "Stopwatch", Watch)
    monkeypatch.setattr(Watch, "now_s", 0.0)
    serving = driver("qwen3_vl")
    layers = vision_of(serving)._adapter.tower_layers(vision_of(serving).model)
    load = 3.0

    def pass_time(module: torch.nn.Module, *_: Any) -> None:
        if isinstance(module, type(layers[0])):
            Watch.now_s += 0.001 * load

    config = msgspec.structs.replace(CONFIG, max_quantum_ms=1.0 + len(layers))
    with torch.nn.modules.module.register_module_forward_hook(pass_time):
        sliced = build_vision(serving.model_dir, config, max_batch_patches=256)
        (patches,) = await patches_of(serving, (128, 128))
        size = patches.num_patches
        assert sliced._slices.cost.num_slices(size, size) > 1
        load = 1.0
        for _ in range(100):
            await sliced.encode([patches])
        assert sliced._slices.cost.num_slices(size, size) == 1
        assert sliced.patch_s == pytest.approx(0.001 * len(layers) / size, rel=0.05)
    await sliced._executor.close()


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_largest_image_of_a_batch(family: str, driver: Callable[[str], Driver]) -> None:
    """Layers are measured on it: one that is enlarged to the model's least size tells nothing."""
    vision = vision_of(driver(family))
    smallest = vision._image(1).num_patches
    assert vision._scale_of(1) == 1
    for most in (2 * smallest, 5 * smallest):
        scale = vision._scale_of(most)
        smaller, found, larger = (
            vision._image(size).num_patches for size in (max(1, scale - 1), scale, scale + 1)
        )
        assert found <= most
        assert smaller < found or scale == 1, "of those with as many patches it is the smallest"
        # Of tiles, lines and rows an image has so many at most.
        bounded = ("llava_onevision", "idefics3", "internvl", "mistral3", "gemma4")
        assert larger > most or family in (*bounded, "deepseek_ocr2")


@pytest.mark.parametrize("family", VISION_FAMILIES)
async def test_rows_do_not_depend_on_the_batch(
    family: str, driver: Callable[[str], Driver]
) -> None:
    serving = driver(family)
    vision = vision_of(serving)
    batch = await patches_of(serving, *SIZES)
    together = await vision.encode(batch)
    reverse = await vision.encode(batch[::-1])
    for i, patches in enumerate(batch):
        (alone,) = await vision.encode([patches])
        for rows in (together[i], reverse[-1 - i]):
            assert isinstance(rows, Rows) and isinstance(alone, Rows)
            assert rows.num_rows == patches.num_rows
            torch.testing.assert_close(rows.tensor, alone.tensor, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", VISION_FAMILIES)
async def test_rows_keep_the_contract(family: str, driver: Callable[[str], Driver]) -> None:
    serving = driver(family)
    vision = vision_of(serving)
    assert vision.contract == serving.language.row_contract
    for rows in await vision.encode(await patches_of(serving, *SIZES)):
        assert isinstance(rows, Rows)
        assert rows.tensor.shape == (rows.num_rows, vision.contract.row_width)
        assert rows.nbytes == rows.num_rows * vision.contract.row_nbytes
        assert rows.buffer().nbytes == rows.nbytes
        # Own memory: dropping the neighbours gives their bytes back.
        assert rows.tensor.untyped_storage().nbytes() == rows.nbytes


@pytest.mark.parametrize("family", VISION_FAMILIES)
@pytest.mark.parametrize("damage", ["shape", "grid", "nan", "none"])
async def test_a_bad_item_fails_alone(
    family: str, damage: str, driver: Callable[[str], Driver]
) -> None:
    """Fault F13: its neighbours in the batch succeed, with the rows they have alone."""
    serving = driver(family)
    vision = vision_of(serving)
    batch = await patches_of(serving, *SIZES)
    clean = await vision.encode(batch)
    pixels: Any = batch[1].pixels
    broken = {
        "shape": replace(batch[1], pixels=pixels.reshape(-1)[:-1]),
        "grid": replace(batch[1], num_rows=batch[1].num_rows + 1),
        "nan": replace(batch[1], pixels=torch.full_like(pixels, torch.nan)),
        "none": replace(batch[1], pixels=None),
    }[damage]
    results = await vision.encode([batch[0], broken, batch[2]])
    assert isinstance(results[1], EncodeFailure) and results[1].reason
    for i in (0, 2):
        result, expected = results[i], clean[i]
        assert isinstance(result, Rows) and isinstance(expected, Rows)
        torch.testing.assert_close(result.tensor, expected.tensor, atol=1e-5, rtol=0)


async def test_an_empty_batch_is_nothing(driver: Callable[[str], Driver]) -> None:
    assert await vision_of(driver("qwen3_vl")).encode([]) == []


async def test_a_bad_image_raises_for_the_client(driver: Callable[[str], Driver]) -> None:
    with pytest.raises(MediaError, match="not an image in a known format"):
        await vision_of(driver("qwen3_vl")).preprocess(b"nonsense", (1, 4, 4))
