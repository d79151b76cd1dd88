"""An image's header: its size when upright, and whether it may be read at all (F46).

No pixel is decoded here.  The workers rotate by EXIF before they resize, so a photograph with
orientation 5 to 8 counts with its sides swapped.  A difference from the worker's decoder fails that
image, never the answer.  Limits on pixels and sides come before anybody decodes: a header of 30
bytes can promise gigabytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from epd.api.http.errors import ApiError, bad_request
from epd.config import Limits
from epd.errors import MediaError
from epd.media_files.image_opening import load_pillow, open_image
from epd.model_files.geometry import MAX_SIDE_RATIO

if TYPE_CHECKING:
    from PIL import Image

HEADER_TIMEOUT_S = 2.0
_ORIENTATION = 0x0112
MAX_PNG_CHUNKS = 1 << 16


def read_size(data: bytes, limits: Limits, param: str) -> tuple[int, int]:
    """Width and height after EXIF rotation, from the header alone.

    Raises ApiError 400 for what is no image, animated, too large or too thin.
    """
    try:
        image = open_image(data, HEADER_TIMEOUT_S)
    except MediaError as error:
        raise bad_request(f"{param} {error}", param) from error
    width, height = image.size
    check_size(width, height, limits, param)
    return (height, width) if _is_turned(image, data) else (width, height)


def check_size(width: int, height: int, limits: Limits, param: str) -> None:
    """Of an image, or of a frame of a video.  Raises ApiError 400."""
    if width * height > limits.max_pixels:
        raise _refused(width, height, f"at most {limits.max_pixels} pixels are taken", param)
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        ratio = f"one side may be at most {MAX_SIDE_RATIO} times the other"
        raise _refused(width, height, ratio, param)


def _refused(width: int, height: int, why: str, param: str) -> ApiError:
    return bad_request(f"{param} is {width} x {height} pixels; {why}", param)


def _is_turned(image: Image.Image, data: bytes) -> bool:
    """Whether the decoder will swap the sides: EXIF orientations 5 to 8."""
    pillow = load_pillow()
    if image.format == "TIFF":
        return False  # Pillow turns it while reading, and says the upright size
    try:
        # The base class's: that of PNG decodes the pixels to look for a chunk behind them.
        exif = pillow.Image.getexif(image)
        if image.format == "PNG" and "exif" not in image.info:
            late = _png_exif(data)
            if late:
                exif.load(b"Exif\x00\x00" + late)
        return int(exif.get(_ORIENTATION, 1)) in (5, 6, 7, 8)
    except Exception:  # broken EXIF is no reason to refuse; the worker ignores it too
        return False


def _png_exif(data: bytes) -> bytes:
    """The EXIF chunk of a PNG, wherever it is; ImageMagick writes it behind the pixels."""
    at = 8
    for _ in range(MAX_PNG_CHUNKS):
        if at + 8 > len(data):
            break
        nbytes, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + nbytes]
        at += nbytes + 12
    return b""
