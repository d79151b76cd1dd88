"""Videos in a chat request: parts of content, and how many frames are to be taken of them.

A video is a file, `{"type": "video_url", "video_url": {"url": ...}}`, or its frames: as images,
`{"type": "video", "video": [url, ...]}`, or, as vLLM takes them, in one URL that begins with
`data:video/jpeg;base64,` and has a comma between every two.  Sampling is asked for in the part
(`fps`, `num_frames`, `min_frames`, `max_frames`), or for the whole request where vLLM has it:
`media_io_kwargs: {"video": {...}}` and `mm_processor_kwargs`.  What the part says wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from epd.api.asked.chat_message import MessagePart
from epd.api.asked.pixel_bounds import PIXELS
from epd.api.http import fields
from epd.api.http.data_url import DataUrl
from epd.api.http.errors import bad_request
from epd.frontend import JsonObject
from epd.media_files.video import Sampling

MAX_FPS = 1000.0
MAX_FRAMES = 1 << 20
MAX_SPLIT = 4096  # of a short text; the data of a long one is taken apart while it arrives
_COUNTS = ("num_frames", "min_frames", "max_frames")
SAMPLING = ("fps", *_COUNTS)
_FRAMES_URL = "data:video/jpeg;base64,"


def read_video_part(
    part: JsonObject, name: str, asked: Sampling, inert: Sequence[str] = ("type",)
) -> MessagePart:
    """`{"type": "video", "field", "urls", "is_file", "sampling"}` of a part of either type.

    `field`: the part's field that holds the video, for messages.  `inert`: fields of any part.
    """
    kind = fields.string(part["type"], f"{name}.type")
    if kind == "video_url":
        fields.only(part, name, ("video_url", *inert, *SAMPLING))
        path = f"{name}.video_url"
        video = part.get("video_url")
        if not isinstance(video, dict):
            raise fields.expected(path, 'an object {"url": ...}', video)
        fields.only(video, path, ("url",))
        source: object = fields.string(video.get("url"), f"{path}.url")
    else:
        fields.only(part, name, ("video", *inert, *SAMPLING))
        path = f"{name}.video"
        source = part.get("video")
    if isinstance(source, str):
        urls, is_file = _split(source)
    else:
        values = fields.array(source, path)
        urls = [fields.string(url, f"{path}[{i}]") for i, url in enumerate(values)]
        is_file = False
    if not is_file:  # they are all taken
        fields.only(part, name, (kind, *inert, "fps"))
    sampling = _merged(read_sampling(part, name), asked)
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


def read_request_sampling(body: Mapping[str, object]) -> Sampling:
    """What the whole request asks for."""
    name = "media_io_kwargs"
    media = fields.mapping(body.get(name) or {}, name)
    fields.only(media, name, ("video",))
    path = f"{name}.video"
    loading = dict(fields.mapping(media.get("video") or {}, path))
    fields.only(loading, path, SAMPLING)
    if loading.get("num_frames") == -1:  # in vLLM: leave it to the processor, which here does all
        del loading["num_frames"]
    first = read_sampling(loading, path)
    name = "mm_processor_kwargs"
    processing = fields.mapping(body.get(name) or {}, name)
    fields.only(processing, name, (*SAMPLING, "do_sample_frames", *PIXELS))
    return _merged(read_sampling(processing, name), first)


def read_sampling(value: JsonObject, name: str) -> Sampling:
    """The fields of `SAMPLING`, and `do_sample_frames` where it is taken."""
    fps = value.get("fps")
    if fps is not None:
        fps = fields.number(fps, f"{name}.fps", 0, MAX_FPS, low_excluded=True)
    frames, fewest, most = (
        None
        if value.get(key) is None
        else fields.integer(value[key], f"{name}.{key}", 1, MAX_FRAMES)
        for key in _COUNTS
    )
    if fps is not None and frames is not None:
        path = f"{name}.num_frames"
        raise bad_request(f"{path} and {name}.fps exclude each other; send one of them", path)
    is_thinned = value.get("do_sample_frames")
    every = is_thinned is not None and not fields.boolean(is_thinned, f"{name}.do_sample_frames")
    return Sampling(fps, frames, fewest, most, every)


def _merged(first: Sampling, second: Sampling) -> Sampling:
    """What `first` says, and where it says nothing `second`; a rate and a number are one thing."""
    first_says = first.fps is not None or first.num_frames is not None
    source = first if first_says else second
    return Sampling(
        fps=source.fps,
        num_frames=source.num_frames,
        min_frames=first.min_frames if first.min_frames is not None else second.min_frames,
        max_frames=first.max_frames if first.max_frames is not None else second.max_frames,
        every_frame=first.every_frame or (second.every_frame and not first_says),
    )
