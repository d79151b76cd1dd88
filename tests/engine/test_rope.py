"""Positions equal transformers' `get_rope_index`, delta included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.engine.base import MediaLayout
from epd.engine.rope import mrope_positions
from tests.engine.reference import reference_model

MERGE = 2
sides = st.integers(1, 6)
pictures = st.lists(st.tuples(st.integers(1, 9), sides, sides), max_size=4)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@given(pictures=pictures, tail=st.integers(1, 9))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_equal_to_get_rope_index(
    family: str,
    model_dir: Callable[[str], Path],
    pictures: list[tuple[int, int, int]],
    tail: int,
) -> None:
    """Pictures of (text before, height, width in rows), at least one text token between them."""
    layouts: list[MediaLayout] = []
    types: list[int] = []
    for text, height, width in pictures:
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


def test_neighbouring_pictures_follow_each_other() -> None:
    """No text between two pictures: the second begins where the first one's larger side ends."""
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
