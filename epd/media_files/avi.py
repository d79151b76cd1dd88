"""The walk through AVI: lists and chunks of RIFF (F67).

Kept are the headers of the streams, and of chunks with data those of the first one with pictures.
All else becomes `JUNK`: indexes, texts, sound.  Streams are numbered by their order, so another one
stays, as one of unknown data, which FFmpeg does not look into.
"""

from __future__ import annotations

import struct

from epd.errors import MediaError
from epd.media_files.film_header import FilmHeader, Walk

_LISTS = (b"hdrl", b"strl", b"movi", b"rec ")
MAX_STREAMS = 16


def read_avi(walk: Walk) -> FilmHeader:
    """Raises MediaError, a sentence without its subject; struct.error: cut off."""
    data, at, end = walk.data, 0, len(walk.data)
    streams, wanted, is_header = 0, -1, True
    width = height = count = 0
    fps = 0.0
    while end - at >= 8:
        kind, nbytes = struct.unpack_from("<4sI", data, at)
        begin = at + 8
        walk.count()
        behind = walk.held(begin, nbytes, end)
        if kind in (b"RIFF", b"LIST"):
            what = bytes(data[begin : begin + 4])
            if what in (_LISTS if kind == b"LIST" else (b"AVI ", b"AVIX")):
                is_header = is_header and what != b"movi"
                at = begin + 4
                continue
            walk.hide(at, b"JUNK")
        elif is_header and kind == b"strh":
            walk.held(begin, 48, behind)
            if streams == MAX_STREAMS:
                raise MediaError(f"has more than {MAX_STREAMS} streams; send the video alone")
            if wanted < 0 and bytes(data[begin : begin + 4]) == b"vids":
                wanted = streams
                scale, rate = struct.unpack_from("<2I", data, begin + 20)
                fps = rate / scale if scale else 0.0
            else:
                walk.hide(begin, b"dats")
            streams += 1
        elif is_header and kind == b"strf":
            if streams == wanted + 1 and not width:
                walk.held(begin, 40, behind)
                width, height = struct.unpack_from("<2i", data, begin + 4)
        elif not is_header and kind[2:] in (b"dc", b"db") and kind[:2] == b"%02d" % wanted:
            count += nbytes > 0
        elif kind != b"avih" or not is_header:
            walk.hide(at, b"JUNK")
        at = behind + nbytes % 2
    if wanted < 0:
        raise MediaError("holds no video stream")
    return FilmHeader(width, abs(height), count, fps)
