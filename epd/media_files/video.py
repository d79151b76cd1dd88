"""Which frames of a video a model sees, how large, and when: the arithmetic of the processors.

The gateway computes all of this from the container alone: a video's rows, and for Qwen3-VL the time
that is written before each frame.  So this module repeats what the video processors of transformers
compute, to the rounding, free of torch, transformers and PyAV.  Frames are chosen here once; the
encoder decodes those of the `Clip` and checks nothing else.

Qwen2-VL and Qwen2.5-VL take frames at equal steps from the first one on, an even number of them
where the step allows it, and bound the area of each frame.  Their processor by itself takes every
frame; like its authors' reference code we sample, by default `DEFAULT_FPS` frames per second.
Qwen3-VL takes frames evenly from the first to the last and bounds the volume of all together.
Two frames (`temporal_patch_size`) are one frame of the grid; a last one alone is taken twice.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from epd.errors import MediaError
from epd.model_files.family import Geometry
from epd.model_files.geometry import MAX_SIDE_RATIO, images_of, smart_resize

CONTAINERS = {"mp4": "MP4 or QuickTime", "webm": "WebM or Matroska", "avi": "AVI"}
FRAMES = "frames"  # in place of a container: images, packed
DEFAULT_FPS = 2.0  # of sampling, and of images whose rate is not told
ASSUMED_FPS = 24.0  # of a file that does not tell its rate, as in transformers


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's sampling of a video; None: that of the model's processor."""

    fps: float | None = None  # frames per second to take; of images: that they were taken at
    num_frames: int | None = None  # so many, over the whole length
    min_frames: int | None = None
    max_frames: int | None = None
    every_frame: bool = False


DEFAULT_SAMPLING = Sampling()


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A video processor, from its file or its class's defaults; names as in transformers."""

    has_timestamps: bool  # Qwen3-VL: frames stand apart, each behind its time
    patch_size: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int
    max_pixels: int
    fps: float | None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True


def video_settings(
    model_config: Mapping[str, Any], processor_config: Mapping[str, Any]
) -> VideoSettings | None:
    """Of config.json and the video processor's settings, both as read from JSON.

    None: the model takes no videos.
    """
    images = images_of(model_config)
    defaults = images.video if images else None
    if defaults is None or model_config.get("video_token_id") is None:
        return None
    given = {name: value for name, value in processor_config.items() if value is not None}
    found: dict[str, Any] = {**defaults, **given, "has_timestamps": defaults["has_timestamps"]}
    size = dict(found["size"])
    if not defaults["has_timestamps"]:  # an older way to say the same
        size["shortest_edge"] = given.get("min_pixels", size.get("shortest_edge"))
        size["longest_edge"] = given.get("max_pixels", size.get("longest_edge"))
    found["min_pixels"], found["max_pixels"] = size["shortest_edge"], size["longest_edge"]
    return msgspec.convert(found, VideoSettings, strict=False)


# --- which frames ---------------------------------------------------------------------------------


def sample_frames(
    settings: VideoSettings, total: int, rate: float, wanted: Sampling, limit: int
) -> tuple[int, ...]:
    """Indices of the frames to take from a video of `total` frames, `rate` of them per second.

    `limit`: how many may be taken at most; raises MediaError where the request asks for more.
    """
    asked = total if wanted.every_frame else min(total, wanted.num_frames or 0)
    if asked > limit:
        raise MediaError(f"{asked} of its frames are asked for, and at most {limit} are taken")
    if wanted.every_frame:
        return tuple(range(total))
    count = _count(settings, total, rate, wanted, limit)
    if settings.has_timestamps:
        step = (total - 1) / (count - 1) if count > 1 else 0.0
        return (*(round(i * step) for i in range(count - 1)), total - 1 if count > 1 else 0)
    step = total / count
    # The steps of torch.arange, which may be one more than `count`: positions in fp32, cut off.
    # Where one is nearly whole, torch's own choice between two neighbours depends on the CPU.
    return tuple(int(_single(i * step)) for i in range(math.ceil(total / step)))


def _count(settings: VideoSettings, total: int, rate: float, wanted: Sampling, limit: int) -> int:
    """How many frames to take, at least one."""
    pair = 1 if settings.has_timestamps else settings.temporal_patch_size
    highest = min(settings.max_frames if wanted.max_frames is None else wanted.max_frames, limit)
    highest = max(1, min(highest, total) // pair * pair)
    number, fps = wanted.num_frames, wanted.fps
    if number is None and fps is None:
        number, fps = settings.num_frames, settings.fps
    if number is not None:
        return max(1, min(round(number / pair) * pair, min(total, limit) // pair * pair))
    lowest = settings.min_frames if wanted.min_frames is None else wanted.min_frames
    at_rate = total / rate * (DEFAULT_FPS if fps is None else fps)
    return max(1, int(min(max(at_rate, lowest), highest) // pair * pair))


def _single(value: float) -> float:
    """Rounded to single precision."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


# --- how large ------------------------------------------------------------------------------------


def video_geometry(settings: VideoSettings, num_frames: int, width: int, height: int) -> Geometry:
    """What `num_frames` frames of `width` by `height` pixels become.  Raises MediaError."""
    if width < 1 or height < 1 or num_frames < 1:
        raise MediaError(f"the video has {num_frames} frames of {width} x {height} pixels")
    if max(width, height) / min(width, height) > MAX_SIDE_RATIO:
        raise MediaError(
            f"the video is {width} x {height} pixels; one side may be at most "
            f"{MAX_SIDE_RATIO} times the other: crop it"
        )
    resize = _frames_in_volume if settings.has_timestamps else _frames_in_area
    resized_h, resized_w = resize(settings, num_frames, width, height)
    grid_t = -(-num_frames // settings.temporal_patch_size)
    grid_h, grid_w = resized_h // settings.patch_size, resized_w // settings.patch_size
    num_patches = grid_t * grid_h * grid_w
    return Geometry((grid_t, grid_h, grid_w), num_patches // settings.merge_size**2, num_patches)


def _frames_in_area(
    settings: VideoSettings, num_frames: int, width: int, height: int
) -> tuple[int, int]:
    """Qwen2-VL and Qwen2.5-VL: bounds of each frame, height and width in pixels."""
    factor = settings.patch_size * settings.merge_size
    max_pixels = settings.max_pixels
    if settings.cap_pixels_per_frame:  # an even share of what all frames may have
        budget = int(settings.max_video_tokens * factor * factor * 0.9)
        share = budget * settings.temporal_patch_size // num_frames
        max_pixels = max(min(max_pixels, share), int(settings.min_pixels * 1.05))
    return smart_resize(height, width, factor, settings.min_pixels, max_pixels)


def _frames_in_volume(
    settings: VideoSettings, num_frames: int, width: int, height: int
) -> tuple[int, int]:
    """Qwen3-VL: bounds of all frames together, height and width in pixels."""
    factor, pair = settings.patch_size * settings.merge_size, settings.temporal_patch_size
    num_frames = max(num_frames, pair)  # the processor takes no single frame; we take it twice
    max_pixels = settings.max_pixels
    if settings.cap_pixels_per_frame:
        share = min(settings.max_video_tokens * factor * factor, max_pixels // num_frames)
        max_pixels = max(share, int(settings.min_pixels * 1.05)) * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    h_bar = round(height / factor) * factor
    w_bar = round(width / factor) * factor
    volume = round(num_frames / pair) * pair * h_bar * w_bar
    if volume > max_pixels:
        beta = math.sqrt((num_frames * height * width) / max_pixels)
        h_bar = max(factor, math.floor(height / beta / factor) * factor)
        w_bar = max(factor, math.floor(width / beta / factor) * factor)
    elif volume < settings.min_pixels:
        beta = math.sqrt(settings.min_pixels / (num_frames * height * width))
        h_bar = math.ceil(height * beta / factor) * factor
        w_bar = math.ceil(width * beta / factor) * factor
    return h_bar, w_bar


# --- when -----------------------------------------------------------------------------------------


def timestamps(settings: VideoSettings, frames: Sequence[int], rate: float) -> list[float]:
    """Seconds of each frame of the grid: the middle of the frames that it is made of."""
    pair = settings.temporal_patch_size
    padded = [*frames, *[frames[-1]] * (-len(frames) % pair)]
    return [
        (padded[i] / rate + padded[i + pair - 1] / rate) / 2 for i in range(0, len(padded), pair)
    ]


def second_per_grid(settings: VideoSettings, num_taken: int, total: int, rate: float) -> float:
    """Seconds between two frames of the grid, on average."""
    return settings.temporal_patch_size / (num_taken / total * rate)
