"""From compressed bytes to patches, on pool threads, without torchvision.

Limits come before work: the header is read, and a picture that is too large, animated or of an
unknown format is refused before a pixel is decoded (fault F46).  Then EXIF rotation, and the
Hugging Face processor of the family does the rest (transparency to RGB, resize, normalise,
patchify), so patches are equal to transformers' by construction.  The grid must be the one that the
gateway computed from the header, since the prompt already has that many placeholders.

Where the device prepares pictures itself (`image_ops`), this ends with decoded pixels.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from epd.engine.base import MediaError, Patches
from epd.engine.geometry import image_geometry
from epd.engine.image_ops import rgb_bytes
from epd.engine.models.base import ModelAdapter

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 64_000_000
# A JPEG with several pictures (phones store a preview or a depth map behind the first) is no film.
_STILL_FORMATS = ("JPEG", "MPO", "BMP")


def decode_image(data: Any, max_pixels: int = MAX_PIXELS) -> Any:
    """Compressed bytes to a decoded PIL image, upright.  Raises MediaError, for the client."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise MediaError(
            f"not an image in a known format; send one of {', '.join(FORMATS)}"
        ) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"the image has too many pixels; send at most {max_pixels}") from error
    except Exception as error:  # a hostile header can trip any parser
        raise MediaError(f"the image cannot be read ({error}); send a valid file") from error
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"the image is {width} x {height} pixels; send at most {max_pixels}")
    try:
        if image.format not in _STILL_FORMATS and getattr(image, "n_frames", 1) > 1:
            raise MediaError(
                f"the image is animated ({image.format}); send one frame as PNG or JPEG"
            )
        image.load()
    except MediaError:
        raise
    except Exception as error:  # truncated or corrupt data: decoders raise many types
        raise MediaError(f"the image is damaged ({error}); send the whole file") from error
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF is no reason to refuse a readable picture
        return image


class Preprocessor:
    """Pictures to patches for one model; calls may run in several threads at once."""

    def __init__(
        self, adapter: ModelAdapter, max_pixels: int = MAX_PIXELS, *, on_device: bool = False
    ) -> None:
        self._adapter = adapter
        self._max_pixels = max_pixels
        self._processor = adapter.image_processor()
        self._pinned = on_device
        self.image_ops = adapter.image_ops(self._processor) if on_device else None

    def __call__(self, data: Any, grid_thw: tuple[int, int, int]) -> Patches:
        """Patches of compressed bytes.  Raises MediaError, also when `grid_thw` is another one."""
        return self.patches(decode_image(data, self._max_pixels), grid_thw)

    def patches(self, image: Any, grid_thw: tuple[int, int, int] | None = None) -> Patches:
        """Patches of a decoded PIL image.  Raises MediaError."""
        checkpoint = self._adapter.checkpoint
        width, height = image.size
        geometry = image_geometry(checkpoint.config, checkpoint.preprocessor, width, height)
        if grid_thw is not None and geometry.grid_thw != tuple(grid_thw):
            raise MediaError(
                f"the image decodes to {width} x {height} pixels, which is not what its header "
                "says; save it again"
            )
        try:
            if self.image_ops is not None:
                pixels, found = _pinned(rgb_bytes(image)), geometry.grid_thw
            else:
                pixels, found = self._adapter.to_patches(self._processor, image)
                pixels = _pinned(pixels) if self._pinned else pixels
        except Exception as error:  # an exotic pixel format, for one
            raise MediaError(f"the image cannot be processed ({error}); send RGB") from error
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
