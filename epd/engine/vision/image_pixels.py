"""From a compressed image to pixels, with the limits of a decoder (fault F46).

The header is read first: an image that is too large, animated or of an unknown format is refused
before a pixel is decoded.  EXIF rotation is applied.

Grey of 16 bits becomes grey of 8 by its upper bits, as viewers show it; Pillow's own conversion
makes every sample above 255 white (F76).  Samples without a certain range are refused.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from epd.errors import MediaError, refusing
from epd.media_files.image_opening import load_pillow, open_image

MAX_PIXELS = 64_000_000
DECODE_TIMEOUT_S = 30.0
_DEEP = ("I;16", "I;16B", "I;16L", "I;16N")
_RANGELESS = ("I", "F")  # 32 bits, signed, fractions
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_DARK = 1 << 12  # of 16 bits; a page of fewer is one of 12 bits or less, and would be black


def decode_image(data: Any, max_pixels: int = MAX_PIXELS) -> Any:
    """Compressed bytes to a decoded PIL image, upright.  Raises MediaError, for the client;
    OSError and ImportError of this host."""
    from PIL import ImageOps

    try:
        image = open_image(data, DECODE_TIMEOUT_S)
    except MediaError as error:
        raise MediaError(f"the image {error}") from error
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"the image is {width} x {height} pixels; send at most {max_pixels}")
    if image.format == "AVIF":
        from epd.media_files.avif_child import decode_avif

        info, image = image.info, decode_avif(data, width, height, DECODE_TIMEOUT_S)
        image.info = info  # how it is turned
    elif image.format == "WEBP":
        _forget_canvas(image)
    with refusing("the image is damaged; send the whole file"):
        image.load()
    tags = getattr(image, "tag_v2", {})
    with contextlib.suppress(Exception):  # broken EXIF is no reason to refuse a readable image
        image = ImageOps.exif_transpose(image)
    return _eight_bits(image, tags)


def _eight_bits(image: Any, tags: Any) -> Any:
    """`tags`: those of a TIFF.  Raises MediaError."""
    if image.mode in _RANGELESS:
        raise MediaError(
            "the image has samples of 32 bits, with signs or with fractions, whose range is not "
            "known; save it with 8 or 16 bits a sample"
        )
    if image.mode not in _DEEP:
        return image
    samples = np.asarray(image)
    num_bits = 12 if tags.get(_BITS_PER_SAMPLE) == (12,) else 16
    peak = int(samples.max())
    if num_bits == 16 and 0 < peak < _DARK:
        raise MediaError(
            f"the image has 16 bits a sample, and none is above {peak}: it would be all black; "
            "scale its samples to 65535, or save it with 8 bits"
        )
    return load_pillow().fromarray((samples >> (num_bits - 8)).astype(np.uint8))


def _forget_canvas(image: Any) -> None:
    """The decoder of WebP, made for animations, holds the pixels twice while Pillow copies them."""
    read = image._get_next  # noqa: SLF001 (nothing public frees it)

    def read_last() -> object:
        found = read()
        image._decoder = None  # noqa: SLF001
        return found

    image._get_next = read_last  # noqa: SLF001
