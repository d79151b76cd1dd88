"""Engines of every tiny family, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from epd.config import EngineConfig, SpeculativeConfig
from epd.engine.factory import build_executor, build_language, build_vision
from tests.engine.driver import Driver
from tests.engine.tiny_models import EMBEDDED, SECOND_SIZES, VISION_FAMILIES, cached_model

torch.set_num_threads(1)
CONFIG = EngineConfig(threads=1, kv_nbytes=4 << 20, speculative=SpeculativeConfig("ngram", 4, 1, 3))


@pytest.fixture(scope="session")
def model_dir() -> Callable[[str], Path]:
    """`model_dir(family)`: its checkpoint directory; "embedded" is the bundled model."""
    return lambda family: EMBEDDED if family == "embedded" else cached_model(family)


@pytest.fixture(scope="session")
def driver(model_dir: Callable[[str], Path]) -> Callable[[str], Driver]:
    """`driver(family)`: both stages, loaded apart, and a serving loop over them."""
    executor = build_executor(CONFIG)

    @cache
    def make(family: str) -> Driver:
        directory = model_dir(family)
        sees = family in (*VISION_FAMILIES, *SECOND_SIZES, "embedded")
        vision = build_vision(directory, CONFIG, executor) if sees else None
        return Driver(directory, vision, build_language(directory, CONFIG, executor))

    return make


def drawn_image(seed: int, width: int, height: int) -> Image.Image:
    """Noise with some structure, so that neighbouring rows differ and resizing keeps contrast."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 12 + 1, width // 12 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def chat(*turns: str | tuple[int, str]) -> list[dict[str, object]]:
    """Messages; a user turn is a text or (number of images, text), every other is the answer."""
    messages: list[dict[str, object]] = []
    for i, turn in enumerate(turns):
        role = "assistant" if i % 2 else "user"
        if isinstance(turn, str):
            messages.append({"role": role, "content": turn})
        else:
            parts: list[dict[str, str]] = [{"type": "image"}] * turn[0]
            messages.append({"role": role, "content": [*parts, {"type": "text", "text": turn[1]}]})
    return messages
