"""Images and videos of a prompt, measured: what each gives, under which hash.

All of it is work for a thread: base64, hashing, reading headers.  A video and an image of equal
bytes never share a hash, nor do two choices of frames of one video: kind and choice are hashed,
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from epd.api.http.data_url import image_bound, read_data_url, too_large, video_bound
from epd.api.http.errors import bad_request
from epd.api.http.identity import mm_hash
from epd.api.prompts.image_size import read_size
from epd.config import Limits
from epd.errors import MediaError
from epd.media_files.video import (
    DEFAULT_FPS,
    FRAMES,
    Sampling,
    VideoSettings,
    sample_frames,
    second_per_grid,
    video_geometry,
    video_settings,
)
from epd.messages import Clip, PixelBounds
from epd.model_files.checkpoint import read_preprocessor, read_video_preprocessor
from epd.model_files.family import Geometry
from epd.model_files.fingerprint import (
    model_fingerprint,
    processor_fingerprint,
    video_processor_fingerprint,
)
from epd.model_files.geometry import bounded, image_geometry, images_of

Source = str | bytes  # a data: URL, or the bytes
CHANNELS = 3  # bytes of a decoded pixel


@dataclass(frozen=True, slots=True)
class Medium:
    """An image or a video; `texts`: around each frame of the grid, where these stand apart."""

    data: bytes
    mm_hash: str
    geometry: Geometry
    clip: Clip | None = None  # of a video
    texts: tuple[tuple[str, str], ...] = ()
    second_per_grid: float = 1.0
    num_pixels: int = 0  # to be decoded
    bounds: PixelBounds | None = None  # of an image
    pixels_nbytes: int = 0  # of an image as sent; of resized frames, and one as sent

    @property
    def runs(self) -> list[int]:
        """Rows behind each of its placeholders."""
        count = len(self.texts) or self.geometry.num_runs
        return [self.geometry.num_rows // count] * count


class Measurer:
    """What one model makes of images and videos."""

    def __init__(self, directory: Path, config: Mapping[str, object], limits: Limits) -> None:
        """`config`: config.json of the model directory."""
        self._config = config
        self._limits = limits
        self._preprocessor = read_preprocessor(directory)
        self._model = model_fingerprint(directory)
        self._processor = processor_fingerprint(directory)
        self._video_processor = video_processor_fingerprint(directory)
        self.video: VideoSettings | None = video_settings(
            config, read_video_preprocessor(directory)
        )

    def image(
        self, source: Source, param: str, scope: str, bounds: PixelBounds | None = None
    ) -> Medium:
        """`bounds`: the request's, instead of the model's.  Raises ApiError."""
        images = images_of(self._config)
        if bounds is not None and not (images and images.takes_bounds):
            name = "mm_processor_kwargs"
            message = f"{name}: this model's images are not resized between bounds"
            raise bad_request(message, name, "unsupported_parameter")
        data = self._image_bytes(source, param)
        width, height = read_size(data, self._limits, param)
        try:
            settings = bounded(self._preprocessor, bounds)
            geometry = image_geometry(self._config, settings, width, height)
        except MediaError as error:
            raise bad_request(f"{param}: {error}", param) from None
        how = () if bounds is None else (f"{bounds.min_pixels}/{bounds.max_pixels}",)
        key = mm_hash(scope, data, self._processor, self._model, *how)
        size = width * height
        return Medium(
            data, key, geometry, bounds=bounds, num_pixels=size, pixels_nbytes=CHANNELS * size
        )

    def file(self, source: Source, sampling: Sampling, param: str, scope: str) -> Medium:
        """A video of which frames are taken.  Raises ApiError."""
        from epd.api.prompts.film import read_film

        bound = video_bound(self._limits)
        data = read_data_url(source, bound, param) if isinstance(source, str) else source
        film = read_film(data, self._limits, param)
        assert self.video is not None  # or it would have been refused
        try:
            frames = sample_frames(
                self.video, film.num_frames, film.fps, sampling, self._limits.max_video_frames
            )
        except MediaError as error:
            raise bad_request(f"{param}: {error}", param) from None
        clip = Clip(container=film.container, frames=frames)
        size = (film.width, film.height)
        return self._video(data, clip, film.num_frames, film.fps, size, param, scope)

    def frames(
        self, sources: Sequence[Source], fps: float | None, params: Sequence[str], scope: str
    ) -> Medium:
        """A video that came as images.  Raises ApiError."""
        bound = video_bound(self._limits)
        images: list[bytes] = []
        sizes: list[tuple[int, int]] = []
        for source, param in zip(sources, params, strict=True):
            images.append(self._image_bytes(source, param))
            sizes.append(read_size(images[-1], self._limits, param))
            if sizes[-1] != sizes[0]:
                (width, height), (w, h) = sizes[0], sizes[-1]
                raise bad_request(
                    f"{param} is {w} x {h} pixels and the first frame {width} x {height}; "
                    "send frames of one size",
                    param,
                )
        if sum(map(len, images)) > bound.nbytes:
            raise too_large(bound, params[0])
        clip = Clip(container=FRAMES, frames=tuple(range(len(images))))
        data = msgspec.msgpack.encode(images)
        rate = DEFAULT_FPS if fps is None else fps
        return self._video(data, clip, len(images), rate, sizes[0], params[0], scope)

    def _image_bytes(self, source: Source, param: str) -> bytes:
        if isinstance(source, str):
            return read_data_url(source, image_bound(self._limits), param)
        return source

    def _video(
        self,
        data: bytes,
        clip: Clip,
        total: int,
        fps: float,
        size: tuple[int, int],
        param: str,
        scope: str,
    ) -> Medium:
        settings = self.video
        assert settings is not None  # or it would have been refused
        taken = len(clip.frames)
        try:
            geometry = video_geometry(settings, taken, *size)
        except MediaError as error:
            raise bad_request(f"{param}: {error}", param) from None
        what = msgspec.json.encode((clip.container, clip.frames, fps)).decode()
        key = mm_hash(scope, data, self._processor, self._model, self._video_processor, what)
        texts = tuple(settings.texts(clip.frames, fps))
        seconds = second_per_grid(settings, taken, total, fps)
        whole = size[0] * size[1]
        _, rows, columns = geometry.grid_thw
        held = taken * rows * columns * settings.patch_size**2 + whole
        return Medium(
            data, key, geometry, clip, texts, seconds, total * whole, None, CHANNELS * held
        )
