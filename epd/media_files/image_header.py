"""A walk through an image's parts, before a parser sees a byte of it (fault F52).

Pillow collects the parts in front of the pixels with loops of its own, some of quadratic time: 3 MB
of 300,000 EXIF segments took it 27 s.  So the parts are counted here, from their lengths alone.  An
invalid file passes: the parser refuses it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from epd.errors import MediaError

MAX_PARTS = 1000  # markers of a JPEG, chunks besides the pixels, blocks of a comment, tags
MAX_PIXEL_PARTS = 1 << 18  # chunks and blocks of pixels alone; writers make them of 255 bytes
MAX_SCANS = 200  # of a progressive JPEG; each is a pass over all pixels
MAX_EXIF_NBYTES = 256 << 10
MAX_PHOTOSHOP_NBYTES = 1 << 20
_WINDOW_NBYTES = 1 << 20  # searched at a time: other threads may run in between
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
MAX_TILE_PIXELS = 1 << 20  # of a TIFF, where the image is smaller
_TIFF_SIDES = (256, 257, 322, 323)  # tags: width and height of the image, then of a tile
_TIFF_SIZES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)  # bytes of each type


def check_header(data: Any) -> None:
    """Raises MediaError, a sentence without its subject, for what would take a parser long."""
    head = bytes(data[:12])
    try:
        if head[:3] == b"\xff\xd8\xff":
            _jpeg(data)
        elif head[:8] == b"\x89PNG\r\n\x1a\n":
            _chunks(_png_chunks(data))
        elif head[:4] == b"RIFF" and head[8:] == b"WEBP":
            _chunks(_riff_chunks(data))
        elif head[:3] == b"GIF":
            _gif(data)
        elif head[:2] in (b"II", b"MM"):
            _tiff(data, head)
    except (IndexError, struct.error):  # cut off: the parser says where
        return


def _count(number: int, what: str, limit: int = MAX_PARTS) -> None:
    if number > limit:
        raise MediaError(f"has more than {limit} {what}; save it again without its metadata")


def _jpeg(data: Any) -> None:
    """Markers up to the first scan one by one; behind it, what stands between the pixels."""
    at, parts, scans, exif, photoshop = 2, 0, 0, 0, 0
    while True:
        if scans:
            at = _next_marker(data, at)
        parts += 1
        _count(parts, "markers")
        if data[at] != 0xFF or data[at + 1] == 0xFF:  # junk, or a byte of padding
            at += 1
            continue
        marker = data[at + 1]
        if marker == 0xD9:
            return
        if marker in (0x00, 0x01, 0xD8) or 0xD0 <= marker <= 0xD7:
            at += 2
            continue
        (nbytes,) = struct.unpack_from(">H", data, at + 2)
        if marker == 0xE1 and bytes(data[at + 4 : at + 8]) == b"Exif":
            exif += nbytes
        photoshop += nbytes if marker == 0xED else 0
        scans += marker == 0xDA
        _count(scans, "scans", MAX_SCANS)
        _count(exif, "bytes of EXIF", MAX_EXIF_NBYTES)
        _count(photoshop, "bytes of Photoshop's", MAX_PHOTOSHOP_NBYTES)
        at += 2 + nbytes


def _next_marker(data: Any, at: int) -> int:
    while at < len(data):
        found = _MARKER.search(data, at, at + _WINDOW_NBYTES + 1)
        if found is not None:
            return found.start()
        at += _WINDOW_NBYTES
    raise IndexError


def _png_chunks(data: Any) -> Iterator[tuple[bytes, int]]:
    at = 8
    while at + 8 <= len(data):
        nbytes, kind = struct.unpack_from(">I4s", data, at)
        yield kind, nbytes
        at += nbytes + 12


def _riff_chunks(data: Any) -> Iterator[tuple[bytes, int]]:
    at = 12
    while at + 8 <= len(data):
        kind, nbytes = struct.unpack_from("<4sI", data, at)
        yield kind, nbytes
        at += 8 + nbytes + nbytes % 2


def _chunks(found: Iterator[tuple[bytes, int]]) -> None:
    pixels = parts = 0
    for kind, nbytes in found:
        if kind == b"IDAT":
            pixels += 1
        else:
            parts += 1
        if kind in (b"eXIf", b"EXIF"):
            _count(nbytes, "bytes of EXIF", MAX_EXIF_NBYTES)
        _count(parts, "chunks")
        _count(pixels, "chunks of pixels", MAX_PIXEL_PARTS)


def _gif(data: Any) -> None:
    """Up to the second image, which makes it an animation."""
    at = 13 + (3 << (data[10] % 8 + 1) if data[10] & 0x80 else 0)
    images = pixels = parts = 0
    while images < 2:
        kind = data[at]
        if kind == 0x2C:
            images += 1
            at += 11 + (3 << (data[at + 9] % 8 + 1) if data[at + 9] & 0x80 else 0)
        elif kind == 0x21:
            at += 2
            parts += 1
        elif kind == 0x3B:
            return
        else:  # junk, which Pillow skips
            at += 1
            parts += 1
        if kind in (0x2C, 0x21):
            while nbytes := data[at]:
                at += nbytes + 1
                pixels += kind == 0x2C
                parts += kind == 0x21
                _count(parts, "blocks of metadata")
                _count(pixels, "blocks of pixels", MAX_PIXEL_PARTS)
            at += 1
        _count(parts, "blocks of metadata")


def _tiff(data: Any, head: bytes) -> None:
    """The tags of the first image; Pillow copies what each points to."""
    order = "<" if head[:2] == b"II" else ">"
    if struct.unpack_from(order + "H", head, 2) != (42,):
        raise MediaError("is a TIFF of an unusual kind; send it as PNG or JPEG")
    (at,) = struct.unpack_from(order + "I", data, 4)
    (tags,) = struct.unpack_from(order + "H", data, at)
    _count(tags, "tags")
    nbytes = 0
    sides = dict.fromkeys(_TIFF_SIDES, 0)
    for place in range(at + 2, at + 2 + 12 * tags, 12):
        tag, kind, count = struct.unpack_from(order + "HHI", data, place)
        nbytes += count * (_TIFF_SIZES[kind] if kind < len(_TIFF_SIZES) else 0)
        if tag in sides:
            form = "H" if kind == 3 else "I"
            (sides[tag],) = struct.unpack_from(order + form, data, place + 8)
    if nbytes > len(data):
        raise MediaError("has tags that are larger than the file; save it again")
    width, height, tile_width, tile_height = sides.values()
    if tile_width * tile_height > max(MAX_TILE_PIXELS, 2 * width * height):
        raise MediaError("has tiles that are larger than the image; save it again")
