"""Opening a video's container, at the gateway for its header and at the encoder for its frames.

FFmpeg reads more kinds of files than anybody wants to be sent: playlists that name other files and
addresses, and formats that nobody has looked at for years.  So the format is told by the first
bytes, the demuxer by its name, and nothing but these bytes is ever opened (fault F46).

All reading stops at a deadline (`deadline_file`).  PyAV is imported by the first video, since few
processes see one; a gateway does it before it serves, as its loading holds every thread for 0.4 s.
"""

from __future__ import annotations

from typing import Any

from epd.engine.deadline_file import DeadlineFile

_DEMUXERS = {"mp4": "mov", "webm": "matroska", "avi": "avi"}
_NO_OTHER_FILE = {"protocol_whitelist": "none", "format_whitelist": "mov,matroska,avi"}


def load_av() -> Any:
    """PyAV, and FFmpeg with it."""
    import av

    return av


def container_of(data: bytes | memoryview) -> str:
    """One of `video.CONTAINERS`, from the first bytes; empty for anything else."""
    head = bytes(data[:12])
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "webm"
    return "avi" if head[:4] == b"RIFF" and head[8:12] == b"AVI " else ""


def open_container(data: Any, container: str, timeout_s: float) -> Any:
    """PyAV's container.  Raises `av.FFmpegError` or another OSError, and ValueError."""
    file = DeadlineFile(data, timeout_s)
    return load_av().open(file, format=_DEMUXERS[container], container_options=dict(_NO_OTHER_FILE))
