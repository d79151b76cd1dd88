"""Videos in a chat request: parts of content, and how many frames are to be taken of them.

A video is a file, `{"type": "video_url", "video_url": {"url": ...}}`, or its frames.  These are
images, `{"type": "video", "video": [url, ...]}`, or, as in vLLM, one URL that begins with
`data:video/jpeg;base64,` and has a comma between every two.  Sampling is asked for in the part
(`fps`, `num_frames`, `min_frames`, `max_frames`), or for the whole request where vLLM has it:
`media_io_kwargs: {"video": {...}}` and `mm_processor_kwargs`.  The part's fields win.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from msgspec import Meta

from epd.api.asked.chat_message import MessagePart
from epd.api.http.data_url import DataUrl
from epd.api.http.errors import bad_request
from epd.api.http.faults import out_of_range
from epd.api.http.shapes import JsonValue, Shape, most
from epd.media_files.video import Sampling
from epd.messages import PixelBounds

MAX_SPLIT = 4096  # of a short text; the data of a long one is taken apart while it arrives
_FRAMES_URL = "data:video/jpeg;base64,"
Fps = Annotated[float, Meta(gt=0, le=1000)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Area = Annotated[int, most("pixels", 1)]


class Sampled(Shape):
    fps: Fps | None = None
    num_frames: Count | None = None
    min_frames: Count | None = None
    max_frames: Count | None = None


class VideoLoading(Sampled):
    num_frames: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None  # -1: the processor's choice


class MediaIo(Shape):
    """vLLM's `media_io_kwargs`."""

    video: VideoLoading | None = None


class Processing(Sampled):
    """vLLM's `mm_processor_kwargs`: of all videos, and between which areas images are resized."""

    do_sample_frames: bool = True
    min_pixels: Area | None = None
    max_pixels: Area | None = None


class VideoUrl(Shape):
    url: str


class VideoHints(Sampled):
    """Without effect: names and hints of clients."""

    cache_control: dict[str, JsonValue] | None = None
    id: str | None = None
    uuid: str | None = None


class VideoFile(VideoHints, tag="video_url", tag_field="type", kw_only=True):
    video_url: VideoUrl


class Video(VideoHints, tag="video", tag_field="type", kw_only=True):
    video: str | Annotated[list[str], Meta(min_length=1)]


def read_video_part(part: VideoFile | Video, name: str, asked: Sampling) -> MessagePart:
    """`{"type": "video", "field", "urls", "is_file", "sampling"}` of a part of either type.

    `field`: the part's field that holds the video, for messages.  Raises ApiError 400.
    """
    kind, source = (
        ("video_url", part.video_url.url) if isinstance(part, VideoFile) else ("video", part.video)
    )
    urls, is_file = _split(source) if isinstance(source, str) else (source, False)
    for other in () if is_file else ("num_frames", "min_frames", "max_frames"):
        if getattr(part, other) is not None:  # they are all taken
            path = f"{name}.{other}"
            message = f"{path} is not supported: the frames are sent, and all are taken"
            raise bad_request(message, path, "unsupported_parameter")
    sampling = _merged(_sampling(part, name), asked)
    return {
        "type": "video",
        "field": kind,
        "urls": urls,
        "is_file": is_file,
        "sampling": sampling,
    }


def _split(url: str) -> tuple[list[str], bool]:
    """One file, or the frames that vLLM's form of a URL holds."""
    if url[: len(_FRAMES_URL)].lower() != _FRAMES_URL:
        return [url], True
    if isinstance(url, DataUrl):
        return list(url.each_frame()), False
    frames = url[len(_FRAMES_URL) :].split(",", MAX_SPLIT)
    return [f"data:image/jpeg;base64,{frame}" for frame in frames], False


def read_request_sampling(media: MediaIo | None, processing: Processing | None) -> Sampling:
    """What the whole request asks for.  Raises ApiError 400."""
    loading, path = (media.video if media else None), "media_io_kwargs.video"
    first = Sampling()
    if loading is not None:
        if loading.num_frames == 0:
            raise out_of_range(f"{path}.num_frames", "-1, or at least 1", 0)
        if loading.num_frames == -1:  # in vLLM: leave it to the processor, which here does all
            loading.num_frames = None
        first = _sampling(loading, path)
    if processing is None:
        return first
    second = _sampling(processing, "mm_processor_kwargs")
    return _merged(replace(second, every_frame=not processing.do_sample_frames), first)


def read_bounds(processing: Processing | None) -> PixelBounds | None:
    """Between which areas images are resized; None: as the model's.  Raises ApiError 400."""
    least, most = (processing.min_pixels or 0, processing.max_pixels or 0) if processing else (0, 0)
    if least and most and least > most:
        path = "mm_processor_kwargs.min_pixels"
        raise bad_request(f"{path} {least} is above max_pixels {most}", path, "out_of_range")
    return PixelBounds(min_pixels=least, max_pixels=most) if least or most else None


def _sampling(asked: Sampled, name: str) -> Sampling:
    if asked.fps is not None and asked.num_frames is not None:
        path = f"{name}.num_frames"
        raise bad_request(f"{path} and {name}.fps exclude each other; send one of them", path)
    return Sampling(asked.fps, asked.num_frames, asked.min_frames, asked.max_frames)


def _merged(first: Sampling, second: Sampling) -> Sampling:
    """The fields of `first`, and where it has none those of `second`; a rate and a number are one
    thing."""
    first_says = first.fps is not None or first.num_frames is not None
    source = first if first_says else second
    return Sampling(
        fps=source.fps,
        num_frames=source.num_frames,
        min_frames=first.min_frames if first.min_frames is not None else second.min_frames,
        max_frames=first.max_frames if first.max_frames is not None else second.max_frames,
        every_frame=first.every_frame or (second.every_frame and not first_says),
    )
