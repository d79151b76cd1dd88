"""`min_pixels` and `max_pixels`: read, part of an image's identity, counted as processors do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from epd.api.http.errors import ApiError
from epd.api.openai.validation import read_chat
from epd.api.prompts.prepare import Preparer, Prompt
from epd.config import GatewayConfig, Limits
from epd.messages import PixelBounds
from epd.model_files.checkpoint import read_config, read_preprocessor
from epd.model_files.geometry import bounded, image_geometry
from epd.tiny import CHECKPOINT
from tests.api.fakes import FakePreparer
from tests.e2e.client import image_part, png
from tests.engine.conftest import drawn_image
from tests.engine.reference import reference_processor
from tests.engine.tiny_models import cached_model

KWARGS = "mm_processor_kwargs"


async def prepare(preparer: Preparer, **kwargs: Any) -> Prompt:
    content = [image_part(png(drawn_image(1, 96, 64))), {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    asked = read_chat({**body, **({KWARGS: kwargs} if kwargs else {})}, preparer, Limits())
    return await preparer.chat(asked.messages or ())


async def test_bounds_change_rows_and_identity() -> None:
    preparer = Preparer(GatewayConfig(model_dir=str(CHECKPOINT)))
    plain = await prepare(preparer)
    fewer = await prepare(preparer, max_pixels=2048)
    other = await prepare(preparer, max_pixels=2049)
    more = await prepare(preparer, min_pixels=20_000)
    await preparer.close()
    rows = [prompt.items[0].num_rows for prompt in (fewer, plain, more)]
    assert rows == sorted(set(rows))
    assert len({prompt.items[0].mm_hash for prompt in (plain, fewer, other, more)}) == 4
    assert fewer.items[0].bounds == PixelBounds(min_pixels=0, max_pixels=2048)
    assert plain.items[0].bounds is None


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"min_pixels": 0}, "min_pixels"),
        ({"max_pixels": "9"}, "max_pixels"),
        ({"max_pixels": 10**12}, "max_pixels"),
        ({"min_pixels": 10, "max_pixels": 9}, "min_pixels"),
        ({"size": 3}, "size"),
    ],
)
def test_refused(kwargs: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], KWARGS: kwargs}
    with pytest.raises(ApiError) as caught:
        read_chat(body, FakePreparer(), Limits())
    assert caught.value.param == f"{KWARGS}.{param}"


async def test_a_model_that_does_not_resize_so_refuses() -> None:
    preparer = Preparer(GatewayConfig(model_dir=str(cached_model("llava_onevision"))))
    await prepare(preparer)
    with pytest.raises(ApiError) as caught:
        await prepare(preparer, max_pixels=4096)
    await preparer.close()
    assert caught.value.param == KWARGS


@settings(max_examples=60)
@given(
    width=st.integers(20, 400),
    height=st.integers(20, 400),
    least=st.integers(256, 60_000),
    factor=st.integers(1, 40),
)
def test_the_grid_is_the_processor_s(width: int, height: int, least: int, factor: int) -> None:
    bounds = PixelBounds(min_pixels=least, max_pixels=least * factor)
    settings_ = bounded(read_preprocessor(CHECKPOINT), bounds)
    found = image_geometry(read_config(CHECKPOINT), settings_, width, height).grid_thw
    image = Image.fromarray(np.zeros((height, width, 3), np.uint8))
    size = {"shortest_edge": least, "longest_edge": least * factor}
    features = reference_processor(CHECKPOINT)(images=[image], return_tensors="pt", size=size)
    assert list(found) == features["image_grid_thw"][0].tolist()
