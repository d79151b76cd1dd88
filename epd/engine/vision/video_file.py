"""From a video's bytes to the frames that a model sees, on a pool thread.

A video is a chain of differences, so frames are decoded in order up to the last one of the clip.
Of H.264, frames that none of the clip depends on are left out (`needed_packets`).
Each frame of the clip is resized at once: one full-sized frame is held at most.  transformers
resizes frames with PyTorch's filter for bytes, which is Pillow's arithmetic in whole numbers; so
does this.  A phone's video that lies on its side is turned upright.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch.nn.functional import interpolate

from epd.engine.vision.film_device import brought_down
from epd.engine.vision.image_ops import rgb_bytes
from epd.engine.vision.image_pixels import decode_image
from epd.engine.vision.needed_packets import NeededPackets, PacketNeed, needed_packets
from epd.errors import MediaError, is_of_this_host
from epd.media_files.container import open_container
from epd.media_files.film_header import FilmHeader
from epd.media_files.video import FRAMES
from epd.messages import Clip

if TYPE_CHECKING:
    from av import VideoFrame
    from av.codec.hwaccel import HWAccel
    from av.container import InputContainer

    from epd.engine.vision.film_device import FilmDevice

logger = logging.getLogger(__name__)
Buffer = bytes | memoryview
Pixels = np.ndarray[Any, Any]
DECODE_TIMEOUT_S = 60.0


def decode_clip(
    data: Buffer,
    clip: Clip,
    height: int,
    width: int,
    max_pixels: int,
    device: FilmDevice | None = None,
) -> Pixels:
    """uint8 `[frames, height, width, 3]`: the clip's frames, resized.  Raises MediaError.

    `device`: decodes what it can; no bit depends on it.
    """
    taken = np.empty((len(clip.frames), height, width, 3), dtype=np.uint8)
    is_film = clip.container != FRAMES
    source = _film(data, clip, max_pixels, device) if is_film else _images(data, clip, max_pixels)
    size: tuple[int, ...] = ()
    count = 0
    for pixels in source:
        if size not in ((), pixels.shape):
            raise MediaError(
                f"frame {clip.frames[count] + 1} of the video has another size than the first; "
                "send frames of one size"
            )
        size = pixels.shape
        taken[count] = resized(pixels, height, width)
        count += 1
    if count < len(clip.frames):
        raise MediaError(
            f"the video has no frame {clip.frames[count] + 1}, though its header says so; "
            "send the whole file"
        )
    return taken


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """uint8 `[height, width, 3]` of a frame of another size, antialiased."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    image = interpolate(image, (height, width), mode="bicubic", antialias=True)
    return image[0].permute(1, 2, 0).numpy()


def _images(data: Buffer, clip: Clip, max_pixels: int) -> Iterator[Pixels]:
    """Frames that came as images."""
    packed = msgspec.msgpack.decode(data, type=list[memoryview])
    for index in clip.frames:
        try:
            yield np.array(rgb_bytes(decode_image(packed[index], max_pixels)))
        except MediaError as error:
            raise MediaError(f"frame {index + 1} of the video: {error}") from error


def _film(data: Buffer, clip: Clip, max_pixels: int, device: FilmDevice | None) -> Iterator[Pixels]:
    """Frames of a file, each as often as the clip has it."""
    until_s = time.monotonic() + DECODE_TIMEOUT_S
    num_taken = 0

    def opened(accel: HWAccel | None = None) -> tuple[InputContainer, FilmHeader]:
        left_s = until_s - time.monotonic()
        with nullcontext() if accel is None or device is None else device.opening():
            return open_container(data, clip.container, max_pixels, left_s, accel)

    def following(accel: HWAccel | None) -> Iterator[Pixels]:
        """Those behind the ones that were taken."""
        if found is not None:
            container, header = opened(accel)
            with container:
                for frame in _apart(container, found, num_taken):
                    _check_size(frame, header)
                    yield _upright(frame, header)
        if num_taken == len(clip.frames):
            return
        container, header = opened(accel)
        with container:
            for frame in _in_order(container, header, clip.frames[num_taken:]):
                yield _upright(frame, header)

    try:
        container, header = opened()
        with container:
            codec = container.streams.video[0].codec_context
            found = needed_packets(container, header, clip.frames)
        failure = ""
        with device.room(codec) if device is not None else nullcontext() as accel:
            try:
                for pixels in following(accel) if accel is not None else ():
                    yield pixels
                    num_taken += 1
            except Exception as error:  # of a damaged film, too, which the CPU judges
                failure = repr(error)
        if num_taken == len(clip.frames):
            return
        for pixels in following(None):
            yield pixels
            num_taken += 1
        if failure and num_taken == len(clip.frames):
            logger.warning("a film was decoded by the CPU, as the GPU failed at it: %s", failure)
    except MediaError as error:
        raise MediaError(f"the video {error}") from error
    except Exception as error:  # damaged data: decoders raise many types
        if is_of_this_host(error):
            raise
        raise MediaError("the video cannot be decoded; encode it again") from error


def _apart(container: InputContainer, found: NeededPackets, first: int) -> Iterator[VideoFrame]:
    """Frames of the clip from the `first` on, by their times; ends early where packets do not have
    the film's order."""
    times = iter(found.times[first:])
    time = next(times)
    for frame in _decoded(container, found.needs):
        if frame.interlaced_frame or frame.pts is None or frame.pts > time:
            return
        while frame.pts == time:
            yield frame
            if (following := next(times, None)) is None:
                return
            time = following


def _decoded(container: InputContainer, needs: Sequence[PacketNeed]) -> Iterator[VideoFrame]:
    """Frames of the packets that are needed, in the order in which they are shown."""
    stream = container.streams.video[0]
    remaining = iter(needs)
    for packet in container.demux(stream):
        if packet.size and (need := next(remaining)) is not PacketNeed.NOTHING:
            stream.codec_context.skip_frame = need.value
            yield from packet.decode()
    yield from stream.codec_context.decode(None)


def _in_order(
    container: InputContainer, header: FilmHeader, indices: Sequence[int]
) -> Iterator[VideoFrame]:
    """Frames of these indices, all before them decoded."""
    wanted = iter(indices)
    index = next(wanted)
    for number, frame in enumerate(_shown(container, header)):
        while index == number:
            yield frame
            if (following := next(wanted, None)) is None:
                return
            index = following


def _shown(container: InputContainer, header: FilmHeader) -> Iterator[VideoFrame]:
    """Decoded frames, without those that are cut from the film by its edits."""
    for frame in container.decode(video=0):
        _check_size(frame, header)
        if header.shows(frame.pts or 0):
            yield frame


def _check_size(frame: VideoFrame, header: FilmHeader) -> None:
    """Raises MediaError."""
    if (frame.width, frame.height) != (header.width, header.height):
        raise MediaError(
            f"has frames of {frame.width} x {frame.height} pixels where its header "
            f"says {header.width} x {header.height}; encode it again"
        )


def _upright(frame: VideoFrame, header: FilmHeader) -> Pixels:
    plane = brought_down(frame).reformat(format="rgb24").planes[0]
    lines = np.frombuffer(memoryview(plane), np.uint8).reshape(
        plane.height, plane.line_size
    )  # not copied
    pixels = lines[:, : 3 * plane.width].reshape(plane.height, plane.width, 3)
    return np.rot90(pixels, header.turns) if header.turns else pixels
