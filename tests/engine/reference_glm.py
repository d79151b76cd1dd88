"""Videos of GLM as transformers has them: texts of frames, and arguments of the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

_BEGUN, _ENDED = 264, 265  # tokens around a video


def texts(processor: Any, placeholder: str, inputs: dict[str, Any]) -> list[str]:
    """What takes the place of each video, by its processor's features `inputs`."""
    from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
    from transformers.models.glm46v.processing_glm46v import Glm46VProcessor

    theirs: Any = Glm46VProcessor if "46V" in type(processor).__name__ else Glm4vProcessor
    writer = SimpleNamespace(video_processor=processor, image_token=placeholder)
    writer.replace_frame_token_id = partial(theirs.replace_frame_token_id, writer)
    each = range(len(inputs["video_metadata"]))
    return [theirs.replace_video_token(writer, inputs, i) for i in each]


def inputs(
    messages: Sequence[dict[str, Any]], features: dict[str, Any], ids: list[int], image_token: int
) -> dict[str, Any]:
    """Where a prompt has images and videos, transformers takes the rows of neither; its towers and
    positions take each frame as an image, and so can be given all as images."""
    input_ids = torch.tensor([ids])
    begun, ended = ((input_ids == token).cumsum(-1) for token in (_BEGUN, _ENDED))
    kinds = (input_ids == image_token).int() * (1 + (begun > ended).int())
    given = {"input_ids": input_ids, "mm_token_type_ids": kinds}
    if "pixel_values" not in features:
        return given | features
    held = {
        kind: zip(features[pixels].split(grids.prod(-1).tolist()), grids, strict=True)
        for kind, pixels, grids in (
            ("image", "pixel_values", features["image_grid_thw"]),
            ("video", "pixel_values_videos", features["video_grid_thw"]),
        )
    }
    parts = [part["type"] for message in messages for part in message["content"]]
    found = [next(held[kind]) for kind in parts if kind in held]
    frames = [grid.new_tensor([1, *grid[1:]]).repeat(int(grid[0]), 1) for _, grid in found]
    return given | {
        "pixel_values": torch.cat([pixels for pixels, _ in found]),
        "image_grid_thw": torch.cat(frames),
        "mm_token_type_ids": kinds.clamp(max=1),
    }
