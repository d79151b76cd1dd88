"""Which frames of a video a model sees, how large, and when: the arithmetic of the processors.

The gateway computes all of this from the container alone: a video's rows, and the texts between its
frames.  So this module and `film_rules` repeat what the video processors of transformers compute,
to the rounding, free of torch, transformers and PyAV.  Frames are chosen here once; the encoder
decodes those of the `Clip` and checks nothing else.

Qwen2-VL and Qwen2.5-VL take frames at equal steps from the first one on, an even number of them
where the step allows it, and bound the area of each frame.  Their processor by itself takes every
frame; like its authors' reference code we sample, by default `DEFAULT_FPS` frames per second.
Qwen3-VL takes frames evenly from the first to the last and bounds the volume of all together.
Two frames (`temporal_patch_size`) are one frame of the grid; a last one alone is taken twice.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import msgspec

from epd.errors import MediaError
from epd.model_files.checkpoint import Settings
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
SAMPLING = tuple(field.name for field in fields(Sampling) if field.name != "every_frame")


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A video processor, from its file or its class's defaults; names as in transformers.

    The rules are those of Qwen2-VL; `film_rules` has those of other families.
    """

    takes: ClassVar[Collection[str]] = ("fps", "num_frames", "min_frames", "max_frames")
    rows_are_images: ClassVar[bool] = False  # in a prompt, rows have the placeholder of images

    patch_size: int
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int
    max_pixels: int
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 0
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Words of config.json that these settings have, too."""
        frames = self.temporal_patch_size
        return {"patch": self.patch_size, "merge": self.merge_size, "frames": frames}

    def chosen(self, total: int, rate: float, wanted: Sampling, limit: int) -> Iterable[int]:
        """Indices of the frames to take, in order."""
        step = total / self.count(total, rate, wanted, limit)
        return itertools.islice(steps(0.0, total, step), limit)

    def count(self, total: int, rate: float, wanted: Sampling, limit: int, pair: int = 0) -> int:
        """How many frames to take, at least one; a multiple of `pair`, or of a patch's frames."""
        pair = pair or self.temporal_patch_size
        highest = min(self.max_frames if wanted.max_frames is None else wanted.max_frames, limit)
        highest = max(1, min(highest, total) // pair * pair)
        number, fps = wanted.num_frames, wanted.fps
        if number is None and fps is None:
            number, fps = self.num_frames, self.fps
        if number is not None:
            return max(1, min(round(number / pair) * pair, min(total, limit) // pair * pair))
        lowest = self.min_frames if wanted.min_frames is None else wanted.min_frames
        at_rate = total / rate * (DEFAULT_FPS if fps is None else fps)
        return max(1, int(min(max(at_rate, lowest), highest) // pair * pair))

    def bounded(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Height and width in pixels that each frame becomes: an area between two bounds."""
        factor = self.patch_size * self.merge_size
        max_pixels = self.max_pixels
        if self.cap_pixels_per_frame:  # an even share of what all frames may have
            budget = int(self.max_video_tokens * factor * factor * 0.9)
            share = budget * self.temporal_patch_size // num_frames
            max_pixels = max(min(max_pixels, share), int(self.min_pixels * 1.05))
        return smart_resize(height, width, factor, self.min_pixels, max_pixels)

    def texts(self, frames: Sequence[int], rate: float) -> list[tuple[str, str]]:
        """What stands before and behind each frame of the grid; empty: all rows in one run."""
        return []


class InVolume(VideoSettings, frozen=True, kw_only=True):
    """Qwen3-VL's rules: frames stand apart, each behind its time."""

    def chosen(self, total: int, rate: float, wanted: Sampling, limit: int) -> Iterable[int]:
        return map(round, even(0, total - 1, self.count(total, rate, wanted, limit, 1)))

    def bounded(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        factor, pair = self.patch_size * self.merge_size, self.temporal_patch_size
        num_frames = max(num_frames, pair)  # the processor takes no single frame; we take it twice
        max_pixels = self.max_pixels
        if self.cap_pixels_per_frame:
            share = min(self.max_video_tokens * factor * factor, max_pixels // num_frames)
            max_pixels = max(share, int(self.min_pixels * 1.05)) * num_frames
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
        elif volume < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (num_frames * height * width))
            h_bar = math.ceil(height * beta / factor) * factor
            w_bar = math.ceil(width * beta / factor) * factor
        return h_bar, w_bar

    def texts(self, frames: Sequence[int], rate: float) -> list[tuple[str, str]]:
        """The middle of the frames that each frame of the grid is made of."""
        pair = self.temporal_patch_size
        padded = [*frames, *[frames[-1]] * (-len(frames) % pair)]
        times = zip(padded[::pair], padded[pair - 1 :: pair], strict=True)
        return [(f"<{(one / rate + last / rate) / 2:.1f} seconds>", "") for one, last in times]


def read_settings(kind: type[VideoSettings], defaults: Settings, given: Settings) -> VideoSettings:
    """Of a class's defaults and the processor's settings, both as read from JSON."""
    found = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    size = found.get("size") or {}
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    named = {name: value for name, value in edges.items() if value is not None}
    return msgspec.convert(found | named, kind, strict=False)


def video_settings(model_config: Settings, processor_config: Settings) -> VideoSettings | None:
    """Of config.json and the video processor's settings, both as read from JSON.

    None: the model takes no videos.
    """
    images = images_of(model_config)
    how = images.video if images else None
    return how(model_config, processor_config) if how else None  # type: ignore[no-any-return]


# --- which frames ---------------------------------------------------------------------------------


def sample_frames(
    settings: VideoSettings, total: int, rate: float, wanted: Sampling, limit: int
) -> tuple[int, ...]:
    """Indices of the frames to take from a video of `total` frames, `rate` of them per second.

    `limit`: how many may be taken at most; raises MediaError where the request asks for more.
    """
    foreign = [n for n in SAMPLING if n not in settings.takes and getattr(wanted, n) is not None]
    if foreign:
        named = " and ".join(settings.takes) or "nothing"
        raise MediaError(f"{foreign[0]} cannot be asked for of this model's videos, but {named}")
    asked = total if wanted.every_frame else min(total, wanted.num_frames or 0)
    if asked > limit:
        raise MediaError(
            f"{asked} of its frames are asked for, and at most {limit} are taken; ask for fewer"
        )
    if wanted.every_frame:
        return tuple(range(total))
    found = tuple(itertools.islice(settings.chosen(total, rate, wanted, limit), limit + 1))
    if len(found) > limit:
        raise MediaError(f"its length asks for more than the {limit} frames that are taken; cut it")
    return found


def even(first: float, last: float, count: int) -> Iterator[float]:
    """As numpy's linspace, to the bit."""
    step = (last - first) / (count - 1) if count > 1 else 0.0
    yield from (i * step + first for i in range(count - 1))
    if count > 0:
        yield last if count > 1 else first


def steps(first: float, total: int, step: float) -> Iterator[int]:
    """The steps of torch.arange up to `total`: positions in fp32, cut off.

    Where one is nearly whole, torch's own choice between two neighbours depends on the CPU.
    """
    return (int(_single(first + i * step)) for i in range(math.ceil((total - first) / step)))


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
    resized_h, resized_w = settings.bounded(num_frames, width, height)
    grid_t = -(-num_frames // settings.temporal_patch_size)
    grid_h, grid_w = resized_h // settings.patch_size, resized_w // settings.patch_size
    num_patches = grid_t * grid_h * grid_w
    return Geometry((grid_t, grid_h, grid_w), num_patches // settings.merge_size**2, num_patches)


# --- when -----------------------------------------------------------------------------------------


def second_per_grid(settings: VideoSettings, num_taken: int, total: int, rate: float) -> float:
    """Seconds between two frames of the grid, on average."""
    return settings.temporal_patch_size / (num_taken / total * rate)
