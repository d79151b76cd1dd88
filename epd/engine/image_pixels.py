"""From a compressed image to pixels, with the limits of a decoder (fault F46).

The header is read first: an image that is too large, animated or of an unknown format is refused
before a pixel is decoded.  EXIF rotation is applied.
"""

from __future__ import annotations

from typing import Any

from epd.engine.avif_child import decode_avif
from epd.engine.base import MediaError
from epd.engine.image_opening import open_image

MAX_PIXELS = 64_000_000
DECODE_TIMEOUT_S = 30.0


def decode_image(data: Any, max_pixels: int = MAX_PIXELS) -> Any:
    """Compressed bytes to a decoded PIL image, upright.  Raises MediaError, for the client."""
    from PIL import ImageOps

    try:
        image = open_image(data, DECODE_TIMEOUT_S)
    except MediaError as error:
        raise MediaError(f"the image {error}") from error
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"the image is {width} x {height} pixels; send at most {max_pixels}")
    if image.format == "AVIF":
        info, image = image.info, decode_avif(data, width, height, DECODE_TIMEOUT_S)
        image.info = info  # how it is turned
    elif image.format == "WEBP":
        _forget_canvas(image)
    try:
        image.load()
    except Exception as error:  # truncated or corrupt data: decoders raise many types
        raise MediaError("the image is damaged; send the whole file") from error
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF is no reason to refuse a readable image
        return image


def _forget_canvas(image: Any) -> None:
    """The decoder of WebP, made for animations, holds the pixels twice while Pillow copies them."""
    read = image._get_next  # noqa: SLF001 (nothing public frees it)

    def read_last() -> Any:
        found = read()
        image._decoder = None  # noqa: SLF001
        return found

    image._get_next = read_last  # noqa: SLF001
