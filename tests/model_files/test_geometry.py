"""Row counts from a header equal the processors', for 2,000 random sizes per family."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.image_utils import ChannelDimension, SizeDict
from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

from epd.errors import MediaError
from epd.model_files.geometry import image_geometry
from tests.engine.conftest import drawn_image
from tests.engine.hf_video import kimi_image_processor
from tests.engine.reference import reference_model, reference_processor
from tests.engine.tiny_models import OF_GLM, VISION_FAMILIES

NUM_SIZES = 2000
# Settings as published, beside the tiny ones of the fixtures: (patch, merge, least, most pixels).
PUBLISHED = {
    "qwen2_vl": (14, 2, 56 * 56, 28 * 28 * 1280),
    "qwen2_5_vl": (14, 2, 3136, 12845056),
    "qwen3_vl": (16, 2, 65536, 16777216),
    "qwen3_vl_moe": (8, 2, 1024, 16384),
}


def sizes(seed: str) -> list[tuple[int, int]]:
    """Width and height: uniform, logarithmic and thin ones, all within the side ratio."""
    rng = random.Random(seed)
    found: list[tuple[int, int]] = []
    while len(found) < NUM_SIZES:
        if rng.random() < 0.5:
            width, height = rng.randint(1, 4000), rng.randint(1, 4000)
        else:
            width, height = int(2 ** rng.uniform(0, 13)), int(2 ** rng.uniform(0, 13))
        if max(width, height) <= 200 * min(width, height):
            found.append((width, height))
    return found


@pytest.mark.parametrize("family", PUBLISHED)
def test_qwen_sizes_equal_the_processor(family: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    patch, merge, least, most = PUBLISHED[family]
    settings = {
        "patch_size": patch,
        "merge_size": merge,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    processor = Qwen2VLImageProcessorPil(**settings)
    for width, height in sizes(family):
        geometry = image_geometry({"model_type": family}, settings, width, height)
        assert geometry.num_patches == processor.get_number_of_image_patches(height, width)
        assert geometry.num_rows * merge**2 == geometry.num_patches == math.prod(geometry.grid_thw)


def test_legacy_pixel_bounds_override_size() -> None:
    """Checkpoints of 2024 say min_pixels and max_pixels, some beside a size that means nothing."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = {"min_pixels": 3136, "max_pixels": 100352, "size": {"shortest_edge": 1}}
    processor = Qwen2VLImageProcessorPil(**settings)
    for width, height in sizes("legacy")[:200]:
        geometry = image_geometry({"model_type": "qwen2_vl"}, settings, width, height)
        assert geometry.num_patches == processor.get_number_of_image_patches(height, width)


@pytest.mark.parametrize(
    ("patch", "least", "most"), [(14, 12544, 9633792), (14, 12544, 11760000), (8, 2001, 32767)]
)
def test_glm_sizes_equal_the_processor(patch: int, least: int, most: int) -> None:
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    edges = {"shortest_edge": least, "longest_edge": most}
    settings = {"size": edges, "patch_size": patch, "merge_size": 2}
    processor = Glm4vImageProcessorPil(**settings)
    for width, height in sizes(f"glm {most}"):
        expected = processor.get_number_of_image_patches(height, width)
        for family in OF_GLM:
            geometry = image_geometry({"model_type": family}, settings, width, height)
            assert geometry.num_patches == expected == math.prod(geometry.grid_thw)
            assert geometry.num_rows * 4 == expected


@pytest.mark.parametrize(
    ("patch", "least", "most"), [(14, 147384, 2822400), (14, 112896, 1003520), (8, 2001, 32767)]
)
def test_paddle_sizes_equal_the_processor(patch: int, least: int, most: int) -> None:
    """Under either pair of names."""
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

    bounds = {"min_pixels": least, "max_pixels": most}
    if patch == 8:
        bounds = {"size": {"shortest_edge": least, "longest_edge": most}}
    settings = {"patch_size": patch, "merge_size": 2, **bounds}
    processor = PaddleOCRVLImageProcessorPil(**settings)
    for width, height in sizes(f"paddle {most}"):
        expected = processor.get_number_of_image_patches(height, width)
        geometry = image_geometry({"model_type": "paddleocr_vl"}, settings, width, height)
        assert geometry.num_patches == expected == math.prod(geometry.grid_thw)
        assert geometry.num_rows * 4 == expected


@pytest.mark.parametrize("most", [16384, 300])
def test_kimi_sizes_equal_the_processor(most: int) -> None:
    """Under the names that transformers gives the settings, and under those of the publisher."""
    settings = {"max_patches": most, "size": {"max_height": 512, "max_width": 512}}
    published = {"in_patch_limit": most, "patch_limit_on_one_side": 512, "merge_kernel_size": 2}
    processor = kimi_image_processor(settings)
    for width, height in sizes(f"kimi {most}"):
        expected = processor.get_number_of_image_patches(height, width)
        for said in (settings, {"media_proc_cfg": published}):
            geometry = image_geometry({"model_type": "kimi_k25"}, said, width, height)
            assert geometry.num_patches == expected, (width, height)
            assert geometry.num_rows * 4 == expected == math.prod(geometry.grid_thw)


@pytest.mark.parametrize("published", [True, False], ids=["published", "tiny"])
def test_llava_sizes_equal_the_processor(published: bool, model_dir: Callable[[str], Path]) -> None:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import (
        LlavaOnevisionProcessor,
    )

    if published:
        image, patch, aspect = 384, 14, "anyres_max_9"
        image_processor = LlavaOnevisionImageProcessorPil()
        settings: dict[str, object] = {}
    else:
        directory = model_dir("llava_onevision")
        image, patch, aspect = 32, 8, "anyres_max_4"
        image_processor = reference_processor(directory)
        settings = json.loads((directory / "preprocessor_config.json").read_text())
    config = {
        "model_type": "llava_onevision",
        "vision_config": {"image_size": image, "patch_size": patch},
        "vision_aspect_ratio": aspect,
    }
    processor = object.__new__(LlavaOnevisionProcessor)  # its __init__ needs a tokenizer
    processor.image_processor = image_processor
    processor.num_image_tokens = (image // patch) ** 2
    processor.vision_aspect_ratio = aspect
    for width, height in sizes(aspect):
        expected = processor._get_number_of_features(height, width, image, image)
        geometry = image_geometry(config, settings, width, height)
        assert geometry.num_rows == expected, (width, height)


@pytest.mark.parametrize(("tile", "longest"), [(512, 2048), (364, 1456), (384, 1000)])
def test_idefics3_tiles_equal_the_processor(tile: int, longest: int) -> None:
    """Its own resizing, run on the shapes of images alone."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    class Shapes(Idefics3ImageProcessorPil):
        def resize(self, image: Any, size: Any, **kwargs: Any) -> Any:
            if not size.longest_edge:
                return np.broadcast_to(np.uint8(0), (3, size.height, size.width))
            found = get_resize_output_image_size(image, size.longest_edge)
            return np.broadcast_to(np.uint8(0), (3, *found))

    settings = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    config = {
        "model_type": "idefics3", "scale_factor": 2,
        "vision_config": {"image_size": tile, "patch_size": 2},
    }  # fmt: skip
    processor = Shapes()
    edges = [(1000, 667), (667, 1000), (999, 667)]  # where a side is made even before it is cut
    for width, height in [*edges, *sizes(f"idefics3 {tile}")]:
        image = np.broadcast_to(np.uint8(0), (3, height, width))
        image = processor.resize(image, SizeDict(longest_edge=longest))
        image = processor.resize_for_vision_encoder(image, tile)
        tiles, *expected = processor.split_images(image, settings["max_image_size"])
        geometry = image_geometry(config, settings, width, height)
        assert list(geometry.tiles) == expected, (width, height)
        assert geometry.num_runs == len(tiles)
        assert {one.shape[1:] for one in tiles} == {(tile, tile)}


@pytest.mark.parametrize(("tile", "least", "most"), [(448, 1, 12), (448, 1, 1), (32, 2, 6)])
def test_internvl_tiles_equal_the_processor(tile: int, least: int, most: int) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    settings = {
        "size": {"height": tile, "width": tile}, "min_patches": least, "max_patches": most,
    }  # fmt: skip
    processor = GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)
    vision = {"image_size": [tile, tile], "patch_size": [8, 8]}
    config = {"model_type": "internvl", "downsample_ratio": 0.5, "vision_config": vision}
    exact = [
        (tile * i, tile * j) for i in range(1, 7) for j in range(1, 7)
    ]  # where grids are equal
    for width, height in [*exact, *((w // 3, h // 3) for w, h in exact), *sizes("internvl")]:
        geometry = image_geometry(config, settings, width, height)
        expected = processor.get_number_of_image_patches(height, width)
        assert geometry.num_patches == expected * (tile // 8) ** 2, (width, height)
        assert geometry.num_rows * 4 == geometry.num_patches


def test_deepseek_ocr2_views_equal_the_processor() -> None:
    from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
        DeepseekOcr2ImageProcessorPil,
    )

    processor, config = DeepseekOcr2ImageProcessorPil(), {"model_type": "deepseek_ocr2"}
    edges = [(768 * i + d, 768 * j) for i in (1, 2, 3) for j in (1, 2, 6) for d in (-1, 0, 1)]
    for width, height in [*edges, (2480, 3508), *sizes("deepseek_ocr2")]:
        geometry = image_geometry(config, {}, width, height)
        num_tiles = processor.get_number_of_image_patches(height, width) - 1
        num_tiles *= max(width, height) > 768  # as it prepares images; its count leaves that out
        assert geometry.num_patches == num_tiles * 48**2 + 64**2, (width, height)
        assert geometry.num_rows == num_tiles * 144 + 257


@pytest.mark.parametrize(("patch", "longest"), [(14, 1540), (16, 1000)])
def test_mistral_sizes_equal_the_processor(patch: int, longest: int) -> None:
    from transformers.models.pixtral import image_processing_pil_pixtral as theirs

    settings = {"size": {"longest_edge": longest}, "patch_size": patch}
    config = {
        "model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"patch_size": patch},
    }  # fmt: skip
    for width, height in sizes(f"mistral {patch}"):
        image = np.broadcast_to(np.uint8(0), (height, width, 3))
        expected = theirs.get_resize_output_image_size(
            image, longest, 2 * patch, ChannelDimension.LAST
        )
        if not math.prod(expected):
            with pytest.raises(MediaError, match=f"{width} x {height}.* crop it"):
                image_geometry(config, settings, width, height)
            continue
        geometry = image_geometry(config, settings, width, height)
        assert tuple(n * patch for n in geometry.grid_thw[1:]) == expected, (width, height)
        assert geometry.num_patches == 4 * geometry.num_rows == math.prod(geometry.grid_thw)
        assert geometry.num_runs == expected[0] // (2 * patch)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_real_images_give_what_was_computed(family: str, model_dir: Callable[[str], Path]) -> None:
    """Through the real processor and, for LLaVA, the model, whose packing defines the rows."""
    directory = model_dir(family)
    config = json.loads((directory / "config.json").read_text())
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    ratio = 120 if family == "mistral3" else 200  # beyond it, nothing of the shorter side is left
    some = [(w, h) for w, h in sizes(family) if w * h < 200_000 and max(w, h) <= ratio * min(w, h)]
    for width, height in [(1, 1), (ratio, 1), (3, 3 * ratio), *some[:25]]:
        geometry = image_geometry(config, settings, width, height)
        features = reference_processor(directory)(
            images=[drawn_image(0, width, height)], return_tensors="pt"
        )
        if family == "llava_onevision":
            features.pop("batch_num_images")
            model = reference_model(directory).model
            with torch.inference_mode():
                rows = model.get_image_features(**features, return_dict=True).pooler_output[0]
            assert geometry.num_rows == len(rows), (width, height)
            assert geometry.grid_thw == (1, height, width)
            num_patches = features["pixel_values"].shape[1] * 16
        elif family == "internvl":
            num_patches = len(features["pixel_values"]) * 16
            assert geometry.num_rows * 4 == num_patches
        elif family == "mistral3":
            height, width = features["image_sizes"][0].tolist()
            assert geometry.grid_thw == (1, height // 8, width // 8)
            assert geometry.num_runs == height // 16
            num_patches = geometry.num_rows * 4
        elif family == "gemma4":
            (num_rows,) = features["num_soft_tokens_per_image"].tolist()
            places = features["image_position_ids"][0]
            columns, lines = (places.amax(0) + 1).tolist()
            assert (geometry.num_rows, geometry.grid_thw) == (num_rows, (1, lines, columns))
            num_patches = int((places >= 0).all(-1).sum())
        elif family == "deepseek_ocr2":
            num_tiles = int(features["num_local_patches"][0])
            num_patches = (num_tiles + 1) * 48**2
            assert geometry.num_rows == (num_tiles + 1) * 144 + 1
        elif family == "idefics3":
            num_patches = features["pixel_values"].shape[1] * 16
            assert geometry.num_rows * 4 == num_patches
        else:
            assert geometry.grid_thw == tuple(features["image_grid_thw"][0].tolist())
            num_patches = len(features["pixel_values"])
        assert geometry.num_patches == num_patches


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_extreme_sides_are_refused_for_the_client(
    family: str, model_dir: Callable[[str], Path]
) -> None:
    config = json.loads((model_dir(family) / "config.json").read_text())
    views = {"size": {"height": 192}, "tile_size": 192}  # of patches that are as small
    settings = views if family == "deepseek_ocr2" else {}
    image_geometry(config, settings, 200, 1)
    for width, height in [(30_000, 1), (1, 201), (0, 5)]:
        with pytest.raises(MediaError, match=f"{width} x {height}"):
            image_geometry(config, settings, width, height)


def test_a_text_model_takes_no_images() -> None:
    with pytest.raises(MediaError, match="text only"):
        image_geometry({"model_type": "qwen3"}, {}, 10, 10)


def test_the_gateway_modules_import_nothing_heavy() -> None:
    code = (
        "import sys, epd.model_files.geometry\n"
        "import epd.model_files.fingerprint, epd.model_files.checkpoint\n"
        "heavy = {'torch', 'transformers', 'PIL', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
