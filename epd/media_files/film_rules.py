"""Rules by which GLM and InternVL choose a video's frames, bound them and write of them.

GLM-4.1V takes them at a rate from the first one on, spread over
longer videos than its bound; GLM-4.6V at a rate that follows the length.  Both take each frame
once, and the last one twice where the number would be odd.  InternVL's processor by itself takes
every frame, or a number of them; we sample as for Qwen2-VL.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import ClassVar

from epd.media_files.video import DEFAULT_FPS, InVolume, Sampling, VideoSettings, even, steps


class AtRate(InVolume, frozen=True, kw_only=True):
    """GLM-4.1V's rules: frames are images to a prompt, each before its whole second."""

    takes: ClassVar[Collection[str]] = ("fps",)
    rows_are_images: ClassVar[bool] = True
    max_duration: int = 300  # seconds

    def chosen(self, total: int, rate: float, wanted: Sampling, limit: int) -> Iterable[int]:
        return _once_each(self.places(total, rate, wanted.fps or self.fps or 2.0), limit)

    def places(self, total: int, rate: float, fps: float) -> Iterable[int]:
        """In order, and some more than once."""
        last, duration = total - 1, total / rate
        if duration <= self.max_duration:
            count = max(math.floor(duration * fps), 1)
            if fps > 2 * rate:  # every frame up to the end, many times over
                return range(min(last, math.ceil((count - 1) * rate / fps)) + 1)
            return (min(last, math.ceil(i * rate / fps)) for i in range(count))
        count = int(self.max_duration * fps)
        if count >= total:
            return range(total)
        return (min(last, math.ceil(second * rate)) for second in even(0, duration, count))

    def texts(self, frames: Sequence[int], rate: float) -> list[tuple[str, str]]:
        times = (index / rate for index in frames[:: self.temporal_patch_size])
        return [("<|begin_of_image|>", f"<|end_of_image|>{self.said(time)}") for time in times]

    def said(self, time: float) -> str:
        return str(int(time))


class ByLength(AtRate, frozen=True, kw_only=True):
    """GLM-4.6V's rules; a request changes nothing."""

    takes: ClassVar[Collection[str]] = ()
    most: ClassVar[int] = 640
    rates: ClassVar[dict[int, float]] = {30: 3, 300: 1, 2400: 0.5}  # up to so many seconds

    def places(self, total: int, rate: float, fps: float) -> Iterable[int]:
        duration = total / rate
        length = min(duration, max(self.rates))
        per_s = next(per_s for bound, per_s in self.rates.items() if length <= bound)
        count = min(int(length * per_s * self.temporal_patch_size), self.most)
        first, last, found = 0, total - 1, list[int]()
        if total >= count:
            step = 1 / (self.temporal_patch_size * per_s)
            found = list(itertools.islice(_at_steps(total, rate, step, int(duration)), count + 1))
            if len(found) < count:
                first, last = found[0], found[-1]
        if len(found) != count:
            found = [math.floor(place) for place in even(first, last, count)]
        return found or [0]

    def said(self, time: float) -> str:
        return f"{time:.1f} seconds"


class InMiddles(VideoSettings, frozen=True, kw_only=True):
    """InternVL's rules: frames in the middle of equal parts, each stretched over a tile."""

    takes: ClassVar[Collection[str]] = ("fps", "num_frames")
    rows_are_images: ClassVar[bool] = True
    tile: int  # side in pixels
    initial_shift: bool | float = True  # of the first frame; true: half a part
    temporal_patch_size: int = 1
    min_pixels: int = 0
    max_pixels: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        return {"image": self.tile}

    def chosen(self, total: int, rate: float, wanted: Sampling, limit: int) -> Iterable[int]:
        number, fps = wanted.num_frames, wanted.fps
        if number is None and fps is None:
            number, fps = self.num_frames, self.fps
        asked = int(total / rate * (fps or DEFAULT_FPS)) if number is None else number
        step = total / max(1, min(asked, total, limit))
        return steps(step / 2 if self.initial_shift is True else self.initial_shift, total, step)

    def bounded(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        return self.tile, self.tile

    def texts(self, frames: Sequence[int], rate: float) -> list[tuple[str, str]]:
        names = (f"Frame{number}: <img>" for number in range(1, len(frames) + 1))
        return [("\n" * (at > 0) + name, "</img>") for at, name in enumerate(names)]


def _at_steps(total: int, rate: float, step: float, until_s: int) -> Iterator[int]:
    """The first frame at or behind each step; steps are summed up, as there."""
    each, at_s, index = 1 / rate, 0.0, 0
    while True:
        index = max(index, int(at_s / each) - 1)
        while index * each < at_s:
            index += 1
        if index >= total:
            return
        yield index
        index, at_s = index + 1, at_s + step
        if at_s >= until_s:
            return


def _once_each(indices: Iterable[int], limit: int) -> Iterator[int]:
    """Without repetitions, in order, and an even number where they are not too many."""
    number, index = 0, -1
    for following in indices:
        if following != index:
            number, index = number + 1, following
            yield index
        if number > limit:
            return
    if number % 2:
        yield index
