"""Opening an image, at the gateway for its header and at the encoder for its pixels (F46, F52).

Both come this way, so that nothing passes the one and trips the other.  Nothing is decoded here.
Needs Pillow and no torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from epd.errors import MediaError, refusing
from epd.media_files.deadline_file import DeadlineFile
from epd.media_files.image_header import check_header

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
# A JPEG with several images (phones store a preview or a depth map behind the first) is no film.
_STILL = ("JPEG", "MPO", "BMP")


def open_image(data: Any, timeout_s: float) -> Any:
    """Pillow's image, still unread; nor may reading it take longer than `timeout_s` from now.

    Raises MediaError, a sentence without its subject; OSError and ImportError of this host.
    """
    pillow = load_pillow()
    from PIL import UnidentifiedImageError

    check_header(data)
    with refusing("cannot be read as an image; send a valid file"):
        try:
            image = pillow.open(DeadlineFile(data, timeout_s), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise MediaError(
                f"is not an image in a known format; send one of {', '.join(FORMATS)}"
            ) from error
        # not n_frames: it walks through the whole file, which may hold millions of frames
        is_animated = image.format not in _STILL and bool(getattr(image, "is_animated", False))
    if is_animated:
        raise MediaError("is animated; send one frame as PNG or JPEG")
    return image


@cache
def load_pillow() -> Any:
    """`PIL.Image`, with the readers of our formats and no others.

    Takes tens of milliseconds the first time; asked for a format whose reader is not there, Pillow
    would load all that it has.
    """
    for name in ("Avif", "Bmp", "Gif", "Jpeg", "Mpo", "Png", "Tiff", "WebP"):
        importlib.import_module(f"PIL.{name}ImagePlugin")
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit is ours; Pillow's is a warning or another text
    return Image
