"""What records do by themselves."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epd.messages import Address, Clip, EncodeRequest, MediaItem, PixelBounds

E0, E1, P0 = (Address(name, 1, f"ipc://{name}") for name in ("e0", "e1", "p0"))
FILLED: list[tuple[Any, dict[str, Any]]] = [
    (
        EncodeRequest(
            request_id="r",
            attempt=2,
            room="r/2/0",
            mm_hash="ab" * 32,
            num_rows=12,
            grid_thw=(2, 4, 6),
            consumer=P0,
            first_token_deadline_s=7.5,
            reports=True,
            clip=Clip(container="mp4", frames=(0, 3)),
            bounds=PixelBounds(min_pixels=100, max_pixels=900),
            pixels_nbytes=300,
            is_suspect=True,
            adapter="ef" * 16,
        ),
        {"room": "r/2/0.1", "is_suspect": False},
    ),
    (
        MediaItem(
            index=1,
            mm_hash="cd" * 32,
            offset=5,
            num_rows=12,
            grid_thw=(2, 4, 6),
            room="r/2/1",
            encoder=E0,
            offsets=(5, 20),
            second_per_grid=0.5,
        ),
        {"room": "r/2/1.1", "encoder": E1},
    ),
]


@pytest.mark.parametrize(("whole", "changed"), FILLED, ids=("EncodeRequest", "MediaItem"))
def test_elsewhere_an_image_keeps_every_field_but_its_place(
    whole: Any, changed: dict[str, Any]
) -> None:
    """F80: nothing of it is its default here, so that each field that gets lost shows."""
    unfilled = [
        field.name
        for field in msgspec.structs.fields(whole)
        if getattr(whole, field.name) == field.default
    ]
    assert unfilled == [], "a new field: give it a value here"
    moved = whole.elsewhere(**changed)
    assert msgspec.structs.asdict(moved) == msgspec.structs.asdict(whole) | changed
