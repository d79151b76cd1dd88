"""Images prepared on tensors equal the Hugging Face processor's within one step of a byte."""

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

from epd.engine.checkpoint import read_checkpoint
from epd.engine.geometry import image_geometry
from epd.engine.image_ops import QwenImageOps, rgb_bytes
from epd.engine.image_pixels import decode_image
from epd.engine.models.registry import adapter_for
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
        # No overshoot beyond a byte: there the order of the axes shows, which Pillow chooses.
        noise = np.random.default_rng(i).integers(70, 186, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise) if i % 2 else drawn_image(i, width, height)
        mode = MODES[i % len(MODES)]
        if not i % 2:
            image = image.point(lambda value: 70 + value * 116 // 256)
        if "A" in mode:
            image.putalpha(Image.fromarray(200 + noise[..., 0] // 8))
        image = image.convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
        buffer = io.BytesIO()
        options: dict[str, Any] = {}
        if mode in ("RGB", "L", "CMYK") and rng.random() < 0.5:
            exif = Image.Exif()
            exif[0x0112] = rng.randint(1, 8)
            options = {"format": "JPEG", "exif": exif.tobytes(), "quality": 90}
        image.save(buffer, **(options or {"format": "TIFF" if mode == "CMYK" else "PNG"}))
        made.append(buffer.getvalue())
    return made


@pytest.fixture
def processor(model_dir: Callable[[str], Path]) -> tuple[Any, Any, QwenImageOps]:
    adapter = adapter_for(read_checkpoint(model_dir("qwen3_vl")))
    processor = adapter.image_processor()
    assert QwenImageOps.fits(processor)
    return adapter, processor, QwenImageOps(processor)


def check_images(
    parts: tuple[Any, Any, QwenImageOps], count: int, device: str
) -> tuple[int, float]:
    """The largest difference in steps of a byte, and the share of values more than one step off."""
    adapter, processor, ops = parts
    step = (processor.rescale_factor / torch.tensor(processor.image_std)).min().item()
    worst, beyond, values = 0.0, 0, 0
    for data in images(count):
        image = decode_image(data)
        geometry = image_geometry(
            adapter.checkpoint.config, adapter.checkpoint.preprocessor, *image.size
        )
        expected, _ = adapter.to_patches(processor, image)
        pixels = torch.from_numpy(rgb_bytes(image).copy()).to(device)
        found = ops.patches(pixels, geometry.grid_thw, torch.float32).cpu()
        assert found.shape == expected.shape
        steps = (found - expected).abs() / step
        worst = max(worst, float(steps.max()))
        beyond += int((steps > 1.5).sum())
        values += steps.numel()
    return round(worst), beyond / values


def test_equals_the_processor_within_a_step(processor: tuple[Any, Any, QwenImageOps]) -> None:
    worst, share = check_images(processor, NUM_IMAGES, "cpu")
    assert worst <= 2  # two where Pillow takes the other axis first, and rounds in between
    assert share < 1e-4


@pytest.mark.parametrize(
    ("size", "to"),
    [
        ((40, 97), (64, 128)),
        ((100, 90), (160, 96)),
        ((200, 150), (128, 96)),
        ((97, 60), (64, 128)),
        ((60, 130), (128, 64)),
        ((122, 102), (352, 96)),
    ],
)
def test_full_contrast_is_resized_in_pillows_order(
    size: tuple[int, int], to: tuple[int, int], processor: tuple[Any, Any, QwenImageOps]
) -> None:
    """Where the filter overshoots in both axes the order shows by tens of steps: images that
    grow, that shrink alike, that grow in height alone, and in width alone."""
    _, _, ops = processor
    pixels = np.random.default_rng(1).integers(0, 2, (*size[::-1], 3), dtype=np.uint8) * 255
    resized = np.asarray(Image.fromarray(pixels).resize(to, Image.Resampling.BICUBIC))
    found = ops.resized(torch.from_numpy(pixels)[None], to[1], to[0])[0].permute(1, 2, 0)
    assert float((found - torch.from_numpy(resized.astype(np.float32))).abs().max()) <= 2


def test_order_and_scale_are_seen(processor: tuple[Any, Any, QwenImageOps]) -> None:
    """The comparison can fail: an image on its side gives other patches."""
    adapter, hf, ops = processor
    image = drawn_image(3, 64, 64)
    expected, grid = adapter.to_patches(hf, image)
    turned = torch.from_numpy(np.asarray(image).transpose(1, 0, 2).copy())
    assert (ops.patches(turned, grid, torch.float32) - expected).abs().max() > 0.1
