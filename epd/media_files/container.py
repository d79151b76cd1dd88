"""Opening a video's container: its header for the gateway, its frames for the encoder.

FFmpeg also reads playlists that name other files and addresses, and neglected formats.  So the
first bytes decide the format, the demuxer is given by name, and nothing but these bytes is ever
opened (fault F46).  It sees what the walk of `film_header` has checked, and no more (F67).

All reading stops at a deadline (`deadline_file`).  PyAV is imported by the first video, since few
processes see one, and only encoders need it.
"""

from __future__ import annotations

import struct
from typing import Any

from epd.errors import MediaError
from epd.media_files.avi import read_avi
from epd.media_files.deadline_file import DeadlineFile
from epd.media_files.film_header import FilmHeader, Hide, Walk
from epd.media_files.isom import read_isom
from epd.media_files.matroska import read_matroska

_DEMUXERS = {"mp4": "mov", "webm": "matroska", "avi": "avi"}
_WALKS = {"mp4": read_isom, "webm": read_matroska, "avi": read_avi}
_NO_OTHER_FILE = {"protocol_whitelist": "none", "format_whitelist": "mov,matroska,avi"}
# Those that are in use: what they allocate is told by the size of a frame.  That of FFV1, for one,
# is told by tables of its own.
CODECS = (
    "h264,hevc,vvc,libdav1d,av1,vp8,vp9,libvpx,libvpx-vp9,mpeg1video,mpeg2video,mpeg4,msmpeg4v1,"
    "msmpeg4v2,msmpeg4,h261,h263,h263p,flv,wmv1,wmv2,wmv3,vc1,theora,mjpeg,mjpegb,jpeg2000,png,"
    "prores,dnxhd,cfhd,dvvideo,huffyuv,ffvhuff,utvideo,rawvideo,v210,qtrle,cinepak,svq1,svq3,gif"
)
_BLOCK = 128  # decoders allocate frames of whole blocks, with edges; MPEG-4 for at least 304 lines


def container_of(data: bytes | memoryview) -> str:
    """One of `video.CONTAINERS`, from the first bytes; empty for anything else."""
    head = bytes(data[:12])
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    return "avi" if head[:4] == b"RIFF" and head[8:12] == b"AVI " else ""


def read_header(data: bytes | memoryview, container: str, hide: Hide | None = None) -> FilmHeader:
    """By its container.  Raises MediaError, a sentence without its subject."""
    walk = Walk(memoryview(data), hide)
    try:
        header = _WALKS[container](walk)
    except (struct.error, IndexError):
        raise MediaError("is cut off or damaged; send a whole file") from None
    if header.width < 1 or header.height < 1:
        raise MediaError("does not say its size; encode it again")
    if header.num_frames < 1:
        raise MediaError("holds no frame; send a whole file")
    return header


def load_av() -> Any:
    """The package.  Raises MediaError, a sentence without its subject."""
    try:
        import av
    except ModuleNotFoundError:
        raise MediaError(
            "cannot be decoded: the package av is not installed at the encoder (pip install av)"
        ) from None
    return av


def open_container(
    data: Any, container: str, max_pixels: int, timeout_s: float, hwaccel: Any = None
) -> Any:
    """PyAV's container and the film's header; `hwaccel`: PyAV's, of who decodes.

    Raises MediaError, a sentence without its subject; `av.FFmpegError` or another OSError, and
    ValueError.
    """
    av, file = load_av(), DeadlineFile(data, timeout_s)
    with file.getbuffer() as buffer:

        def hide(at: int, data: bytes) -> None:
            buffer[at : at + len(data)] = data

        header = read_header(buffer, container, hide)
    width, height = header.width, header.height
    if width * height > max_pixels:
        raise MediaError(f"has frames of {width} x {height} pixels; send at most {max_pixels}")
    bounds = {
        "max_pixels": str(_allocated(width) * _allocated(height)),
        "threads": "1",
        "codec_whitelist": CODECS,
    }
    opened = av.open(
        file,
        format=_DEMUXERS[container],
        options=bounds,
        container_options=dict(_NO_OTHER_FILE),
        hwaccel=hwaccel,
    )
    context = opened.streams.video[0].codec_context if opened.streams.video else None
    if context is None or context.codec.name not in CODECS.split(","):
        opened.close()
        raise MediaError("is coded in a way that is not taken; encode it again, as H.264")
    context.options = bounds
    return opened, header


def _allocated(side: int) -> int:
    """Pixels of a side, as a decoder may round it up."""
    return max(3 * _BLOCK, -(-side // _BLOCK) * _BLOCK)
