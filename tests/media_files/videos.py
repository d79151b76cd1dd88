"""Small videos made on the spot: moving noise, encoded by PyAV."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import av
import msgspec
import numpy as np
from PIL import Image

from epd.messages import Clip
from tests.engine.driver import png

CODECS = {"mp4": "libx264", "webm": "libvpx-vp9", "matroska": "libx264", "avi": "mpeg4"}


def frame(seed: int, index: int, width: int, height: int) -> np.ndarray[Any, Any]:
    """uint8 `[height, width, 3]`: blocks of colour that move with the index."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
    moved = np.roll(coarse, index, axis=1)
    image = Image.fromarray(moved).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image)


@cache
def film(
    seed: int,
    num_frames: int = 12,
    width: int = 64,
    height: int = 48,
    rate: int = 8,
    container: str = "mp4",
    *,
    rotation: int = 0,
    codec: str = "",
    pix_fmt: str = "yuv420p",
    **options: str,
) -> bytes:
    """A video file; `rotation`: degrees by which a player turns it; `options`: of the encoder."""
    buffer = io.BytesIO()
    if container == "webm":
        options |= {"deadline": "realtime", "cpu-used": "8"}
    with av.open(buffer, "w", format=container) as out:
        stream: Any = out.add_stream(codec or CODECS[container], rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(num_frames):
            pixels = av.VideoFrame.from_ndarray(frame(seed, index, width, height), "rgb24")
            out.mux(stream.encode(pixels))
        out.mux(stream.encode())
    return buffer.getvalue()


def frames_of(data: bytes, indices: Any = None) -> np.ndarray[Any, Any]:
    """uint8 `[frames, height, width, 3]` of a file, decoded as transformers decodes."""
    with av.open(io.BytesIO(data)) as container:
        every = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    return np.stack(every if indices is None else [every[i] for i in indices])


def packed(seed: int, num_frames: int, width: int, height: int) -> tuple[bytes, Clip]:
    """Frames as images, and what the encoder is told of them."""
    images = [png(Image.fromarray(frame(seed, i, width, height))) for i in range(num_frames)]
    return msgspec.msgpack.encode(images), Clip(container="frames", frames=tuple(range(num_frames)))
