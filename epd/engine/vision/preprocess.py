"""From compressed bytes to patches, on pool threads, without torchvision.

Of a decoded image (`image_pixels`) the Hugging Face processor of the family does the rest
(transparency to RGB, resize, normalise, patchify), so patches are equal to transformers' by
construction.  The grid must be the one that the gateway computed from the header, since the prompt
already has that many placeholders.  Of a video (`video_file`) the frames come resized, and become
patches as transformers' video processors make them; these need torchvision, so `QwenImageOps` does.

Where the device prepares images itself (`image_ops`), this ends with pixels.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from epd.engine.adapter import ModelAdapter
from epd.engine.base import Patches
from epd.engine.vision.image_ops import rgb_bytes
from epd.engine.vision.image_pixels import MAX_PIXELS, decode_image
from epd.errors import MediaError, refusing
from epd.media_files.container import load_av
from epd.media_files.image_opening import load_pillow
from epd.messages import Clip, PixelBounds
from epd.model_files.geometry import bounded, image_geometry

if TYPE_CHECKING:
    from epd.engine.vision.film_device import FilmDevice

Grid = tuple[int, int, int]


class Preprocessor:
    """Images to patches for one model; calls may run in several threads at once."""

    def __init__(
        self, adapter: ModelAdapter, max_pixels: int = MAX_PIXELS, *, on_device: bool = False
    ) -> None:
        self._adapter = adapter
        self._max_pixels = max_pixels
        self._processor = adapter.image_processor()
        self._pinned = on_device
        self.video_ops = adapter.video_ops()
        self.image_ops = adapter.image_ops(self._processor) if on_device else None
        self.films: FilmDevice | None = None  # which decodes what it can
        load_pillow()  # now, and not in a request, when no more file may be to open
        with contextlib.suppress(MediaError, ImportError):  # not there: films are refused
            load_av()

    def __call__(
        self, data: Any, grid_thw: Grid, clip: Clip | None = None, bounds: PixelBounds | None = None
    ) -> Patches:
        """Patches of compressed bytes.  Raises MediaError, also when `grid_thw` is another one."""
        if clip is not None:
            return self._of_clip(data, grid_thw, clip)
        return self.patches(decode_image(data, self._max_pixels), grid_thw, bounds)

    def ops_of(self, pixels: torch.Tensor) -> Any:
        """What makes patches of bytes on the device: of an image, or of frames."""
        return self.video_ops if pixels.ndim == 4 else self.image_ops

    def _of_clip(self, data: Any, grid_thw: Grid, clip: Clip) -> Patches:
        from epd.engine.vision.video_file import decode_clip

        if self.video_ops is None:
            raise MediaError("this model takes no videos; send images")
        height, width = self.video_ops.size_of(grid_thw)
        frames = decode_clip(data, clip, height, width, self._max_pixels, self.films)
        if self._pinned:
            pixels = _pinned(frames)
        else:
            pixels = self.video_ops.patches(torch.from_numpy(frames), grid_thw, torch.float32)
        num_patches = grid_thw[0] * grid_thw[1] * grid_thw[2]
        return Patches(pixels, grid_thw, num_patches, self.video_ops.num_rows(grid_thw))

    def patches(
        self, image: Any, grid_thw: Grid | None = None, bounds: PixelBounds | None = None
    ) -> Patches:
        """Patches of a decoded PIL image.  Raises MediaError."""
        checkpoint = self._adapter.checkpoint
        width, height = image.size
        geometry = image_geometry(
            checkpoint.config, bounded(checkpoint.preprocessor, bounds), width, height
        )
        if grid_thw is not None and geometry.grid_thw != tuple(grid_thw):
            raise MediaError(
                f"the image decodes to {width} x {height} pixels, which is not what its header "
                "says; save it again"
            )
        with refusing("the image cannot be processed; send RGB"):  # an exotic pixel format, for one
            if self.image_ops is not None:
                pixels, found = _pinned(rgb_bytes(image)), geometry.grid_thw
            else:
                pixels, found = self._adapter.to_patches(self._processor, image, bounds)
                pixels = _pinned(pixels) if self._pinned else pixels
        if found != geometry.grid_thw:
            raise MediaError(
                f"the image gives patches {found} where {geometry.grid_thw} were computed; "
                "report this size"
            )
        return Patches(pixels, found, geometry.num_patches, geometry.num_rows)


def _pinned(data: Any) -> torch.Tensor:
    """A copy of a numpy array or a tensor that the device reads by itself."""
    shape, dtype = tuple(data.shape), torch.uint8 if data.dtype == "uint8" else torch.float32
    host = torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    host.numpy()[...] = data
    return host
