"""A video's container: how many frames of which size, and at which rate (F46, F67).

The gateway computes a video's rows from the header alone, by a reader of our own
(`media_files/film_header.py`).  It decodes no frame: that is the encoder's work, which fails the
video where a frame differs from the header.  Work for a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.api.http.errors import bad_request
from epd.api.prompts.image_size import check_size
from epd.config import Limits
from epd.errors import MediaError
from epd.media_files.video import ASSUMED_FPS, CONTAINERS


@dataclass(frozen=True, slots=True)
class Film:
    """A video file from outside."""

    container: str
    num_frames: int
    fps: float
    width: int  # upright
    height: int


def read_film(data: bytes, limits: Limits, param: str) -> Film:
    """Raises ApiError 400 for what is no video, is damaged, too large, too thin or too long."""
    from epd.media_files.container import container_of, read_header

    container = container_of(data)
    if not container:
        known = ", ".join(CONTAINERS.values())
        raise bad_request(
            f"{param} is not a video in a known container; send one of {known}, or its frames as "
            "images",
            param,
        )
    try:
        header = read_header(data, container)
    except MediaError as error:
        raise bad_request(f"{param} cannot be read as a video: it {error}", param) from None
    width, height, count = header.width, header.height, header.num_frames
    check_size(width, height, limits, param)
    if count * width * height > limits.max_video_pixels:
        raise bad_request(
            f"{param} has {count} frames of {width} x {height} pixels; at most "
            f"{limits.max_video_pixels} pixels are decoded: send a shorter or smaller video",
            param,
        )
    if header.turns % 2:
        width, height = height, width
    return Film(container, count, header.fps or ASSUMED_FPS, width, height)
