"""Images prepared on tensors equal the Hugging Face processor's."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from epd.engine.adapter import adapter_for
from epd.engine.vision.image_ops import QwenImageOps, rgb_bytes
from epd.engine.vision.image_pixels import decode_image
from epd.engine.vision.image_resize import resized
from epd.model_files.checkpoint import read_checkpoint
from epd.model_files.geometry import image_geometry
from tests.engine.conftest import drawn_image

MODES = ("RGB", "RGB", "L", "RGBA", "P", "LA", "CMYK", "I;16")
NUM_IMAGES = 500


def images(count: int) -> list[bytes]:
    """Compressed images of odd sizes, all modes, with rotations by EXIF, noise and flat parts."""
    rng = random.Random(7)
    made = []
    for i in range(count):
        width, height = rng.randint(1, 160), rng.randint(1, 160)
        if max(width, height) > 100 * min(width, height):
            height = width
        noise = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise) if i % 2 else drawn_image(i, width, height)
        mode = MODES[i % len(MODES)]
        if "A" in mode:
            image.putalpha(Image.fromarray(200 + noise[..., 0] // 8))
        image = deep(image) if mode == "I;16" else image.convert(mode)
        buffer = io.BytesIO()
        options: dict[str, Any] = {}
        if mode in ("RGB", "L", "CMYK") and rng.random() < 0.5:
            exif = Image.Exif()
            exif[0x0112] = rng.randint(1, 8)
            options = {"format": "JPEG", "exif": exif.tobytes(), "quality": 90}
        image.save(buffer, **(options or {"format": "TIFF" if mode == "CMYK" else "PNG"}))
        made.append(buffer.getvalue())
    return made


def deep(image: Image.Image) -> Image.Image:
    """Grey of 16 bits a sample."""
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


@pytest.fixture
def processor(model_dir: Callable[[str], Path]) -> tuple[Any, Any, QwenImageOps]:
    adapter = adapter_for(read_checkpoint(model_dir("qwen3_vl")))
    processor = adapter.image_processor()
    assert QwenImageOps.fits(processor)
    return adapter, processor, QwenImageOps(processor)


def check_images(parts: tuple[Any, Any, Any], count: int, device: str) -> float:
    """The largest difference in steps of a byte."""
    adapter, processor, ops = parts
    step = (processor.rescale_factor / torch.tensor(processor.image_std)).min().item()
    worst = 0.0
    for data in images(count):
        image = decode_image(data)
        geometry = image_geometry(
            adapter.checkpoint.config, adapter.checkpoint.preprocessor, *image.size
        )
        expected, _ = adapter.to_patches(processor, image)
        pixels = torch.from_numpy(rgb_bytes(image).copy()).to(device)
        found = ops.patches(pixels, geometry.grid_thw, torch.float32).cpu()
        assert found.shape == expected.shape
        worst = max(worst, float((found - expected).abs().max()) / step)
    return worst


def test_equals_the_processor(processor: tuple[Any, Any, QwenImageOps]) -> None:
    """To the byte; the rest is fp32."""
    assert check_images(processor, NUM_IMAGES, "cpu") < 1e-3


@pytest.mark.parametrize("family", ["glm_ocr", "paddleocr_vl"])
def test_patches_equal_those_of_its_processor(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    adapter = adapter_for(read_checkpoint(model_dir(family)))
    processor = adapter.image_processor()
    assert check_images((adapter, processor, adapter.image_ops(processor)), 200, "cpu") < 1e-3


def test_tiles_equal_the_processor_s(model_dir: Callable[[str], Path]) -> None:
    """Of InternVL: each tile in its place, and the whole image behind them."""
    adapter = adapter_for(read_checkpoint(model_dir("internvl")))
    processor = adapter.image_processor()
    assert check_images((adapter, processor, adapter.image_ops(processor)), 200, "cpu") < 1e-3


@pytest.mark.parametrize("high", [2, 256])
def test_resized_as_pillow_does(high: int) -> None:
    """To the byte: noise, and full contrast, where the order of the axes shows; images that grow
    and shrink, in either axis, near the border of the order's rule, and by much."""
    rng = random.Random(high)
    for i in range(300):
        width, height, to_width, to_height = (rng.randint(1, 160) for _ in range(4))
        if i % 3 == 0 and min(width, height) > 8:
            lost = rng.randint(1, min(width // 2, height // 4))
            to_width, to_height = width - lost, height - 2 * lost + rng.choice((-1, 0, 1))
        noise = np.random.default_rng(i).integers(0, high, (height, width, 3)) * (255 // (high - 1))
        pixels = noise.astype(np.uint8)
        size = (to_width, max(1, to_height))
        expected = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        found = resized(torch.from_numpy(pixels)[None], size[1], size[0])[0]
        assert torch.equal(found, torch.from_numpy(expected.copy())), ((width, height), size)


def test_order_and_scale_are_seen(processor: tuple[Any, Any, QwenImageOps]) -> None:
    """The comparison can fail: an image on its side gives other patches."""
    adapter, hf, ops = processor
    image = drawn_image(3, 64, 64)
    expected, grid = adapter.to_patches(hf, image)
    turned = torch.from_numpy(np.asarray(image).transpose(1, 0, 2).copy())
    assert (ops.patches(turned, grid, torch.float32) - expected).abs().max() > 0.1
