"""From a compressed picture to pixels, with the limits of a decoder (fault F46).

The header is read first: a picture that is too large, animated or of an unknown format is refused
before a pixel is decoded.  EXIF rotation is applied.
"""

from __future__ import annotations

import io
from typing import Any

from epd.engine.base import MediaError

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
        raise MediaError("the image cannot be read; send a valid file") from error
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
        raise MediaError("the image is damaged; send the whole file") from error
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF is no reason to refuse a readable picture
        return image
