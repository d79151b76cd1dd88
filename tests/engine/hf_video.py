"""transformers' own video processors, on a machine without torchvision.

They call torchvision for two things: `resize`, which on a CPU is PyTorch's `interpolate` on bytes,
and `normalize`.  Where torchvision is missing these stand in for it, and all that is compared
(which frames, how large, in which order) is transformers' own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image

from epd.model_files.checkpoint import read_config

_KIMI = "transformers.models.kimi_k25.image_processing_kimi_k25"
_CLASSES = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("qwen2_vl", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "qwen3_5": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "qwen3_5_moe": ("qwen3_vl", "Qwen3VLVideoProcessor"),
    "internvl": ("internvl", "InternVLVideoProcessor"),
    "glm4v": ("glm4v", "Glm4vVideoProcessor"),
    "glm4v_moe": ("glm4v", "Glm4vVideoProcessor"),
    "glm46v": ("glm46v", "Glm46VVideoProcessor"),
    "glm_ocr": ("glm46v", "Glm46VVideoProcessor"),
    "gemma4": ("gemma4", "Gemma4VideoProcessor"),
}


class InterpolationMode(Enum):
    """torchvision's names."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _resize(
    image: torch.Tensor, size: Sequence[int], interpolation: Any, antialias: bool = True
) -> torch.Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    assert interpolation in (InterpolationMode.BICUBIC, 3)  # by Pillow's number, too
    assert image.dtype == torch.uint8
    flat = image.reshape(-1, *image.shape[-3:])
    out = torch.nn.functional.interpolate(flat, list(size), mode="bicubic", antialias=antialias)
    return out.reshape(*image.shape[:-2], *out.shape[-2:])


def _normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean, std = (torch.as_tensor(v, dtype=image.dtype).view(-1, 1, 1) for v in (mean, std))
    return (image - mean).div_(std)


def _pad(image: torch.Tensor, padding: Sequence[int], **_: Any) -> torch.Tensor:
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom))


def _stand_in() -> None:
    """Put these functions where transformers looks for torchvision."""
    functional: Any = ModuleType("torchvision.transforms.v2.functional")
    functional.resize, functional.normalize, functional.pad = _resize, _normalize, _pad
    functional.grayscale_to_rgb = lambda video: video  # frames here have their three channels
    functional.InterpolationMode = InterpolationMode
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[names[0]].transforms = modules[names[1]]
    modules[names[1]].v2 = modules[names[2]]
    modules[names[2]].functional = functional
    theirs: Any = importlib.import_module("transformers.video_processing_utils")
    sys.modules.update(modules | {functional.__name__: functional})
    asked: Any = importlib.import_module("transformers.utils")
    missing, asked.is_torchvision_v2_available = asked.is_torchvision_v2_available, lambda: True
    try:
        for module, _ in _CLASSES.values():
            importlib.import_module(f"transformers.models.{module}.video_processing_{module}")
        importlib.import_module(_KIMI)
    finally:
        asked.is_torchvision_v2_available = missing
        for name in (*names, functional.__name__):
            del sys.modules[name]
    backends: Any = importlib.import_module("transformers.image_processing_backends")
    backends.tvF = functional
    theirs.tvF = functional
    from PIL.Image import Resampling

    backends.pil_torch_interpolation_mapping = {
        Resampling.BICUBIC: InterpolationMode.BICUBIC,
        3: InterpolationMode.BICUBIC,
    }


@cache
def _ready() -> None:
    if importlib.util.find_spec("torchvision") is None:
        _stand_in()


def video_processor(model_dir: Path, **changes: Any) -> Any:
    """The directory's video processor, built as `from_pretrained` would."""
    _ready()
    path = model_dir / "video_preprocessor_config.json"
    settings = json.loads(path.read_text()) | changes
    return make_processor(read_config(model_dir)["model_type"], settings)


def kimi_image_processor(settings: dict[str, Any]) -> Any:
    """Kimi's image processor, which has no PIL variant, over Pillow's resize, as published."""
    _ready()
    theirs = importlib.import_module(_KIMI)

    class Processor(theirs.Kimi_K25ImageProcessor):  # type: ignore[misc, name-defined]
        def resize(self, image: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
            each = [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in image]
            resized = [one.resize((size.width, size.height), Image.BICUBIC) for one in each]
            return torch.stack([torch.from_numpy(np.array(one)) for one in resized]).permute(
                0, 3, 1, 2
            )

    return Processor(**settings)


def make_processor(model_type: str, settings: dict[str, Any]) -> Any:
    """The family's video processor with these settings."""
    _ready()
    module, name = _CLASSES[model_type]
    found = importlib.import_module(f"transformers.models.{module}.video_processing_{module}")
    return getattr(found, name)(**{"cap_pixels_per_frame": False} | settings)
