"""Positions equal transformers' `get_rope_index`, delta included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.engine.adapter import adapter_for
from epd.engine.base import MediaLayout
from epd.families.qwen_vl.rope import mrope_positions
from epd.messages import Address, MediaItem
from epd.model_files.checkpoint import read_checkpoint
from epd.roles.steps.step import layouts_of
from tests.engine.reference import reference_model

MERGE = 2
sides = st.integers(1, 6)
images = st.lists(st.tuples(st.integers(1, 9), sides, sides), max_size=4)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@given(images=images, tail=st.integers(1, 9))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_equal_to_get_rope_index(
    family: str, model_dir: Callable[[str], Path], images: list[tuple[int, int, int]], tail: int
) -> None:
    """Images of (text before, height, width in rows), at least one text token between them."""
    layouts: list[MediaLayout] = []
    types: list[int] = []
    for text, height, width in images:
        types += [0] * text
        layouts.append(MediaLayout(len(types), height * width, (1, height * MERGE, width * MERGE)))
        types += [1] * (height * width)
    types += [0] * tail
    found = mrope_positions(len(types), layouts, MERGE)
    grids = torch.tensor([layout.grid_thw for layout in layouts]) if layouts else None
    positions, delta = reference_model(model_dir(family)).model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=grids,
    )
    assert found.positions.tolist() == positions[:, 0].tolist()
    assert found.delta == int(delta)


videos = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), sides, sides, st.floats(0.05, 3.0)), max_size=3
)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@given(videos=videos, tail=st.integers(1, 9))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_videos_equal_get_rope_index(
    family: str,
    model_dir: Callable[[str], Path],
    videos: list[tuple[int, int, int, int, float]],
    tail: int,
) -> None:
    """(text before, frames, height, width, seconds per frame), each after an image of one row."""
    items: list[MediaItem] = []
    types: list[int] = []
    apart = family == "qwen3_vl"
    nobody = Address("e", 1, "")
    for text, frames, height, width, seconds in videos:
        types += [0] * text + [1, 0]
        items.append(
            MediaItem(
                index=0,
                mm_hash="a",
                offset=len(types) - 2,
                num_rows=1,
                grid_thw=(1, MERGE, MERGE),
                room="a",
                encoder=nobody,
            )
        )
        offsets = []
        for _ in range(frames):
            offsets.append(len(types))
            types += [2] * (height * width) + [0] * apart
        grid = (frames, height * MERGE, width * MERGE)
        item = MediaItem(
            index=0,
            mm_hash="b",
            offset=offsets[0],
            num_rows=frames * height * width,
            grid_thw=grid,
            room="b",
            encoder=nobody,
        )
        where = tuple(offsets) if apart else ()
        items.append(msgspec.structs.replace(item, offsets=where, second_per_grid=seconds))
        assert items[-1].end == len(types) - apart
    types += [0] * tail
    model = reference_model(model_dir(family))
    grids = {"image_grid_thw": items[0::2], "video_grid_thw": items[1::2]}
    asked: dict[str, Any] = {
        n: torch.tensor([i.grid_thw for i in g]) for n, g in grids.items() if g
    }
    if family == "qwen2_5_vl" and items:
        asked["second_per_grid_ts"] = torch.tensor([i.second_per_grid for i in items[1::2]])
    positions, delta = model.model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        **asked,
    )
    adapter = adapter_for(read_checkpoint(model_dir(family)))
    found = adapter.rope_positions(len(types), layouts_of(items))
    assert found.positions.tolist() == positions[:, 0].tolist()
    assert found.delta == int(delta)


def test_neighbouring_images_follow_each_other() -> None:
    """No text between two images: the second begins where the first one's larger side ends."""
    layouts = [MediaLayout(0, 6, (1, 4, 6)), MediaLayout(6, 1, (1, 2, 2))]
    found = mrope_positions(8, layouts, MERGE)
    assert found.positions.tolist() == [
        [0, 0, 0, 0, 0, 0, 3, 4],
        [0, 0, 0, 1, 1, 1, 3, 4],
        [0, 1, 2, 0, 1, 2, 3, 4],
    ]
    assert found.delta == 5 - 8


@pytest.mark.parametrize(
    "layout",
    [
        MediaLayout(0, 5, (1, 4, 6)),  # another row count
        MediaLayout(4, 6, (1, 4, 6)),  # beyond the prompt
    ],
)
def test_items_that_do_not_fit_are_refused(layout: MediaLayout) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        mrope_positions(8, [layout], MERGE)


def test_linear_models_have_no_positions(
    driver: Callable[[str], object], model_dir: Callable[[str], Path]
) -> None:
    for family in ("llava_onevision", "qwen3", "llama"):
        rope = driver(family).language.rope_positions(9, ())  # type: ignore[attr-defined]
        assert rope.positions is None and rope.delta == 0
