"""What a video's container says: how many frames of which size, and at which rate (F46).

The gateway must know how many rows a video gives, so it opens the container, counts its packets and
decodes one frame, which tells the true size, whether it lies on its side, and that its codec can be
read at all.  The other frames are the encoder's work.  Takes milliseconds to seconds, by length:
always on a thread, and until a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from epd.api.errors import ApiError, bad_request
from epd.api.image_size import check_size
from epd.config import Limits
from epd.engine.container import container_of, open_container
from epd.engine.video import ASSUMED_FPS, CONTAINERS

if TYPE_CHECKING:
    from av.container import InputContainer

HEADER_TIMEOUT_S = 5.0


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
    container = container_of(data)
    if not container:
        known = ", ".join(CONTAINERS.values())
        raise bad_request(
            f"{param} is not a video in a known container; send one of {known}, or its frames as "
            "images",
            param,
        )
    try:
        with open_container(data, container, HEADER_TIMEOUT_S) as opened:
            film = _measured(opened, container, limits, param)
    except ApiError:
        raise
    except Exception as error:  # a hostile header can trip any parser
        raise bad_request(f"{param} cannot be read as a video; send a whole file", param) from error
    num_pixels = film.num_frames * film.width * film.height
    if num_pixels > limits.max_video_pixels:
        raise bad_request(
            f"{param} has {film.num_frames} frames of {film.width} x {film.height} pixels; at most "
            f"{limits.max_video_pixels} pixels are decoded: send a shorter or smaller video",
            param,
        )
    return film


def _measured(opened: InputContainer, container: str, limits: Limits, param: str) -> Film:
    if not opened.streams.video:
        raise bad_request(f"{param} holds no video stream", param)
    stream = opened.streams.video[0]
    _check_size(stream.width, stream.height, limits, param)
    if (frame := next(opened.decode(stream), None)) is None:
        raise bad_request(f"{param} holds no frame that can be decoded; send a whole file", param)
    width, height = frame.width, frame.height
    _check_size(width, height, limits, param)
    if frame.rotation % 180:
        width, height = height, width
    opened.seek(0)
    count = sum(1 for packet in opened.demux(stream) if packet.size and not packet.is_discard)
    rate = float(stream.average_rate or 0)
    return Film(container, max(1, count), rate if rate > 0 else ASSUMED_FPS, width, height)


def _check_size(width: int, height: int, limits: Limits, param: str) -> None:
    """Before anything is decoded, and again of what was."""
    if width < 1 or height < 1:
        raise bad_request(f"{param} does not say its size; encode it again", param)
    check_size(width, height, limits, param)
