"""What a header says is checked against the bytes that are there, before it is believed (F67)."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from epd.api.http.errors import ApiError
from epd.api.prompts.film import read_film
from epd.api.prompts.image_size import read_size
from epd.config import Limits
from epd.engine.vision.image_pixels import decode_image
from epd.engine.vision.video_file import decode_clip
from epd.errors import MediaError
from epd.media_files.container import container_of, open_container, read_header
from epd.media_files.film_header import FilmHeader, usual_rate
from epd.messages import Clip
from tests.hostile import headers
from tests.hostile.reading import memory_begins, memory_peak_nbytes, read_apart, read_many
from tests.media_files.videos import film

SMALL_NBYTES = 64 << 20  # far below what any of these took


def header(data: bytes) -> FilmHeader:
    return read_header(data, container_of(data))


def patched(data: bytes, kind: bytes, at: int, form: str, *values: int) -> bytes:
    """Of a box of this kind: what stands so far behind its kind."""
    found = bytearray(data)
    struct.pack_into(form, found, found.index(kind) + 4 + at, *values)
    return bytes(found)


@pytest.mark.parametrize("form", headers.FORMS)
def test_hostile_headers_are_read_or_refused(form: str) -> None:
    found = read_many(form, 0, 6 if form == "AVIF" else 24)  # each has a process
    assert not found.faults
    assert len(found.outcomes) > 1


@pytest.mark.long
@pytest.mark.timeout(660)  # each AVIF has a process: 287 s on a busy machine
@pytest.mark.parametrize("form", headers.FORMS)
def test_thousands_of_hostile_headers_are_read_or_refused(form: str) -> None:
    found = read_apart(form, 0, 2000)
    assert not found.faults
    assert sum(found.outcomes.values()) == 2000


# --- films ----------------------------------------------------------------------------------------


def mp4() -> bytes:
    return headers.small_film("mp4", "mpeg4", "yuv420p")


def fragments() -> bytes:
    return headers.small_film("fragments", "libx264", "yuv420p")


BLOCK = b"\xa3\x85\x81\0\0\0\0"


def endless(data: bytes) -> bytes:
    """A WebM whose segment is of unknown size."""
    at = data.index(b"\x18\x53\x80\x67") + 4
    return data[:at] + b"\x01" + b"\xff" * 7 + data[at + 8 :]


LYING: dict[str, Callable[[], bytes]] = {
    "samples": lambda: headers.announced(40_000_000, mp4()),
    "times": lambda: patched(mp4(), b"stts", 4, ">2I", 1, 1 << 27),
    "entries": lambda: patched(mp4(), b"stts", 4, ">I", 1 << 27),
    "sizes": lambda: patched(mp4(), b"stsz", 4, ">2I", 0, 1 << 27),
    "edits": lambda: patched(mp4(), b"elst", 4, ">I", 1 << 27),
    "ways": lambda: patched(mp4(), b"stsd", 4, ">I", 1 << 27),
    "a run of fragments": lambda: patched(fragments(), b"trun", 0, ">2I", 0, 40_000_000),
    "a box": lambda: patched(mp4(), b"mdat", -8, ">I", 1 << 27),
    "parts": lambda: mp4() + struct.pack(">I4s", 8, b"free") * 300_000,
    "blocks": lambda: endless(film(5, 9, 96, 64, 24, "webm")) + BLOCK * 300_000,
    "a chunk": lambda: patched(film(5, 9, 96, 64, 24, "avi"), b"movi", 4, "<I", 1 << 27),
    "chunks": lambda: film(5, 9, 96, 64, 24, "avi") + b"00dc\0\0\0\0" * 300_000,
}


@pytest.mark.parametrize("name", LYING)
def test_counts_are_checked_against_the_bytes_that_are_there(name: str) -> None:
    data = LYING[name]()
    before = memory_begins()
    with pytest.raises(ApiError, match="cannot be read as a video") as refused:
        read_film(data, Limits(), "x")
    assert (refused.value.status, refused.value.param) == (400, "x")
    with pytest.raises(MediaError):
        decode_clip(data, Clip(container=container_of(data), frames=(0,)), 28, 28, 10_000_000)
    assert memory_peak_nbytes(before) < SMALL_NBYTES


@pytest.mark.parametrize("sides", [(64, 5000), (5000, 64)])
def test_a_frame_of_another_size_is_not_decoded(sides: tuple[int, int]) -> None:
    data = headers.film_of_packets([headers.blank_png(side, side) for side in sides])
    assert (header(data).width, header(data).height) == (64, 64)
    before = memory_begins()
    with pytest.raises(MediaError, match="the video cannot be decoded"):
        decode_clip(data, Clip(container="mp4", frames=(0, 1)), 28, 28, 64_000_000)
    assert memory_peak_nbytes(before) < SMALL_NBYTES
    smaller = headers.film_of_packets([headers.blank_png(64, 64), headers.blank_png(32, 32)])
    with pytest.raises(MediaError, match="32 x 32 pixels where its header says 64 x 64"):
        decode_clip(smaller, Clip(container="mp4", frames=(0, 1)), 28, 28, 64_000_000)


def two_tracks(container: str) -> bytes:
    """A second film and some sound, in front of the pictures where that may be."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as made:
        sound: Any = made.add_stream("mp2", rate=48_000, layout="mono")
        streams: list[Any] = [made.add_stream("mpeg4", rate=8) for _ in range(2)]
        for stream in streams:
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        made.metadata["title"] = "a title"
        for index in range(5):
            for stream in streams:
                made.mux(stream.encode(av.VideoFrame(64, 48, "rgb24")))
            silence = np.zeros((1, 1152), dtype=np.int16)
            noise = av.AudioFrame.from_ndarray(silence, format="s16p", layout="mono")
            noise.sample_rate, noise.pts = 48_000, index * 1152
            made.mux(sound.encode(noise))
        for stream in (*streams, sound):
            made.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize("container", ["mp4", "matroska", "avi"])
def test_ffmpeg_sees_one_track_and_nothing_else(container: str) -> None:
    data = two_tracks(container)
    opened, found = open_container(data, container_of(data), 10_000, 5.0)
    with opened:
        kinds = [stream.type for stream in opened.streams]
        assert kinds.count("video") == 1
        assert set(kinds) <= {"video", "data"} and "title" not in opened.metadata
        assert len(list(opened.decode(video=0))) == found.num_frames == 5


def test_what_is_cut_from_a_film_is_not_counted() -> None:
    """An edit that begins with the third of 12 frames, and shows four."""
    data = film(1)
    (step,) = struct.unpack_from(">I", data, data.index(b"stts") + 16)
    (begin,) = struct.unpack_from(">I", data, data.index(b"elst") + 16)
    cut = patched(data, b"elst", 8, ">2I", 500, begin + 2 * step)
    assert header(data).num_frames == 12 and header(cut).num_frames == 4
    whole, clip = (
        Clip(container="mp4", frames=(2, 3, 4, 5)),
        Clip(container="mp4", frames=(0, 1, 2, 3)),
    )
    shown = decode_clip(cut, clip, 48, 64, 10_000)
    assert (shown == decode_clip(data, whole, 48, 64, 10_000)).all()
    with pytest.raises(MediaError, match="has no frame 5"):
        decode_clip(cut, Clip(container="mp4", frames=(0, 4)), 48, 64, 10_000)


def test_codecs_whose_tables_tell_what_they_take_are_refused() -> None:
    data = headers.small_film("matroska", "ffv1", "yuv420p")
    with pytest.raises(MediaError, match="a way that is not taken"):
        decode_clip(data, Clip(container="webm", frames=(0,)), 28, 28, 10_000)


@pytest.mark.parametrize(
    ("times_s", "rate"),
    [([], 0.0), ([1.0], 0.0), ([0.0, 0.033, 0.067, 0.1], 30.0), ([0, 0.25, 1.5], 4 / 3)],
)
def test_a_rate_from_times(times_s: list[float], rate: float) -> None:
    assert usual_rate(times_s) == pytest.approx(rate)


# --- pictures -------------------------------------------------------------------------------------


def large_avif() -> bytes:
    """A stream of 12,000 x 12,000 grey pixels; its header (`ispe`) was made to say 64 x 64."""
    return (Path(headers.__file__).parent / "large.avif").read_bytes()


def large_tile(side: int = 10_000) -> bytes:
    """A TIFF of 64 x 64 pixels in one tile of many more."""
    packed = zlib.compress(bytes(side * side), 1)
    tags = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    tags |= {324: 10 + 12 * 10 + 4, 325: len(packed)}
    listed = b"".join(struct.pack("<2H2I", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + listed + bytes(4) + packed


@pytest.mark.parametrize("make", [large_avif, large_tile])
def test_a_large_picture_behind_a_small_header_is_not_decoded(make: Callable[[], bytes]) -> None:
    data = make()
    before = memory_begins()
    with pytest.raises((ApiError, MediaError)):
        read_size(data, Limits(), "x")
        decode_image(data)
    assert memory_peak_nbytes(before) < SMALL_NBYTES


OF_PICTURES = """
import io
from PIL import Image
from epd.engine.vision.image_ops import rgb_bytes
from epd.engine.vision.image_pixels import decode_image
from tests.hostile.headers import bases
from tests.hostile.reading import memory_begins, memory_peak_nbytes

for form, mode in (("PNG", "RGBA"), ("WEBP", "RGBA"), ("JPEG", "RGB")):
    out, side = io.BytesIO(), 2000
    Image.new(mode, (side, side), (9, 8, 7, 6)[: len(mode)]).save(out, form)
    rgb_bytes(decode_image(bases(form)[0]))  # imports what it needs
    before = memory_begins()
    assert rgb_bytes(decode_image(out.getvalue())).shape == (side, side, 3)
    print(memory_peak_nbytes(before) / side**2)
"""


def test_pictures_take_a_dozen_bytes_per_pixel() -> None:
    """In a process of its own: what others left to an allocator is no part of a picture."""
    command = [sys.executable, "-c", OF_PICTURES]
    done = subprocess.run(command, capture_output=True, check=True, timeout=100)
    each = [float(line) for line in done.stdout.split()]
    assert len(each) == 3 and max(each) < 13.5, each


WITHOUT_FILES = """
import os
import resource
import sys
from epd.engine.vision.image_pixels import decode_image
from epd.errors import MediaError

limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for picture in map(bytes.fromhex, sys.argv[1:]):
    for most in (0, len(os.listdir("/proc/self/fd")) + 3):  # none, and too few for a child
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
        try:
            decode_image(picture)
            print("read")
        except MediaError as error:
            print("blamed", error)
        except Exception as error:
            print("failed")
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    decode_image(picture)
"""


def test_a_picture_is_not_blamed_where_no_file_can_be_opened() -> None:
    """In the first request of a process, which imports what it needs."""
    pictures = [headers.bases(form)[0].hex() for form in ("JPEG", "AVIF")]
    command = [sys.executable, "-c", WITHOUT_FILES, *pictures]
    done = subprocess.run(command, capture_output=True, check=True, timeout=100, text=True)
    assert "blamed" not in done.stdout and done.stdout.splitlines()[::2] == ["failed", "failed"]
