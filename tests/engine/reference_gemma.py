"""Pictures and videos of Gemma 4 as transformers has them: texts, and arguments of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

_WRITER: Any = SimpleNamespace(
    boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>", video_token="<|video|>"
)


def image_texts(features: Any, count: int) -> list[str]:
    """What takes the place of each image, by its processor's features."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    return [Gemma4Processor.replace_image_token(_WRITER, features, at) for at in range(count)]


def of_videos(each: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments of the model for videos, and what takes the place of each."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

    texts = [Gemma4Processor.replace_video_token(_WRITER, one, 0) for one in each]
    names = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
    return {name: torch.cat([one[name] for one in each]) for name in names}, texts


def without_rate(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What its processor is asked for of a video."""
    return {name: value for name, value in sampling.items() if name != "fps"}


def inputs(features: dict[str, Any], ids: list[int], tokenizer: Any) -> dict[str, Any]:
    """With the kinds of tokens, whose runs the model sees both ways."""
    input_ids = torch.tensor([ids])
    image, video = (tokenizer.token_to_id(f"<|{kind}|>") for kind in ("image", "video"))
    kinds = (input_ids == image).int() + 2 * (input_ids == video).int()
    return {"input_ids": input_ids, "mm_token_type_ids": kinds, **features}
