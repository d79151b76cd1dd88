"""Films and pictures whose headers lie: counts, sizes, nesting, offsets, and flipped bytes (F67).

`hostile(form, seed)` is a pure function.  It takes a small valid file and does to it one to four
things that a parser may believe.
"""

from __future__ import annotations

import io
import random
import re
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
from PIL import Image

FILMS = ("mp4", "mov", "fragments", "webm", "matroska", "avi")
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
FORMS = FILMS + PICTURES

_Data = bytearray
_CODECS = {
    "mp4": (("libx264", "yuv420p"), ("mpeg4", "yuv420p")),
    "mov": (("png", "rgb24"), ("mjpeg", "yuvj420p"), ("rawvideo", "rgb24")),
    "fragments": (("libx264", "yuv420p"),),
    "webm": (("libvpx-vp9", "yuv420p"), ("libvpx", "yuv420p")),
    "matroska": (("libx264", "yuv420p"), ("mpeg4", "yuv420p"), ("mjpeg", "yuvj420p")),
    "avi": (("mpeg4", "yuv420p"), ("huffyuv", "yuv422p"), ("mjpeg", "yuvj420p")),
}
_EXTREME = (0, 1, 2, 255, 256, 4095, 16_000, 16_384, 32_767, 65_535, 100_000, 1 << 20)
_EXTREME += (40_000_000, 80_000_000, 1 << 28, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1)
_BOX = re.compile(rb"[a-z][a-zA-Z0-9]{3}")
_TABLES = (b"stts", b"ctts", b"stss", b"stsc", b"stsz", b"stco", b"elst", b"trun", b"stsd", b"trex")
_TABLES += (b"tfhd", b"ispe", b"iloc", b"iinf", b"ipma", b"mvhd", b"mdhd", b"tkhd")
_EBML = (
    b"\x1f\x43\xb6\x75",
    b"\x16\x54\xae\x6b",
    b"\x1c\x53\xbb\x6b",
    b"\x63\xa2",
    b"\xa3",
    b"\xa0",
)
_EBML += (
    b"\xae",
    b"\xe0",
    b"\xb0",
    b"\xba",
    b"\x23\xe3\x83",
    b"\xec",
    b"\x18\x53\x80\x67",
    b"\xe7",
)


def hostile(form: str, seed: int) -> bytes:
    """A file of this form, damaged on purpose."""
    rng = random.Random(f"{form} {seed}")
    data = bytearray(rng.choice(bases(form)))
    big = form not in ("avi", "WEBP", "BMP", "GIF") and data[:2] != b"II"
    if form in ("mp4", "mov", "fragments", "AVIF"):
        ways: list[Callable[[random.Random, _Data], None]] = [_table, _table, _box_size, _nested]
    elif form in ("webm", "matroska"):
        ways = [_element, _element, _nested]
    elif form in ("avi", "WEBP"):
        ways = [_chunk_size, _chunk_size, _nested]
    elif form == "TIFF":
        ways = [_tag, _tag]
    elif form == "PNG":
        ways = [_png_chunk, _png_chunk]
    else:
        ways = []
    if form == "mov":
        ways += [_large_frame, _large_frame]
    ways += [lambda rng, data: _number(rng, data, big=big), _flip, _cut, _counts]
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(ways)(rng, data)
    return bytes(data)


# --- what is there at first -----------------------------------------------------------------------


@cache
def bases(form: str) -> tuple[bytes, ...]:
    """Small valid files of a form."""
    if form in FILMS:
        return tuple(small_film(form, *codec) for codec in _CODECS[form])
    image = Image.effect_noise((48, 40), 60).convert("RGB")
    ways: tuple[dict[str, Any], ...] = ({},)
    if form == "JPEG":
        ways = ({}, {"progressive": True}, {"icc_profile": bytes(3000), "comment": b"a" * 300})
    elif form == "TIFF":
        ways = ({}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"})
        ways += ({"compression": "jpeg"}, {"tiffinfo": {322: 48, 323: 48}})
    elif form == "WEBP":
        ways = ({}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"})
    few = image.convert("P") if form in ("PNG", "GIF", "BMP", "TIFF") else image
    saved = [_saved(image, form, **way) for way in ways]
    return (*saved, _saved(image.convert("L"), form), _saved(few, form))


def _saved(image: Any, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


@cache
def small_film(form: str, codec: str, pixel_format: str, count: int = 3, side: int = 16) -> bytes:
    """Square frames of noise."""
    out = io.BytesIO()
    options = {"movflags": "frag_keyframe+empty_moov"} if form == "fragments" else {}
    side = max(side, 64) if codec.startswith("libvpx") else side
    with av.open(
        out, "w", format="mp4" if form == "fragments" else form, container_options=options
    ) as film:
        stream: Any = film.add_stream(codec, rate=Fraction(8))
        stream.width = stream.height = side
        stream.pix_fmt = pixel_format
        pixels = np.random.default_rng(1).integers(0, 255, (side, side, 3), dtype=np.uint8)
        for _ in range(count):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        film.mux(stream.encode())
    return out.getvalue()


@cache
def blank_png(width: int, height: int) -> bytes:
    """RGBA, all zeros, well compressed."""
    rows = zlib.compressobj(1)
    row = bytes(1 + 4 * width) * 64
    packed = b"".join([rows.compress(row) for _ in range(-(-height // 64))] + [rows.flush()])
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 6, 0, 0, 0))
        + _chunk(b"IDAT", packed)
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def film_of_packets(packets: list[bytes], side: int = 64) -> bytes:
    """A QuickTime film whose packets are PNG files, of whatever size."""
    out = io.BytesIO()
    with av.open(out, "w", format="mov") as film:
        stream: Any = film.add_stream("png", rate=8)
        stream.width, stream.height, stream.pix_fmt = side, side, "rgba"
        for index, data in enumerate(packets):
            packet = av.Packet(data)
            packet.stream = stream
            packet.pts = packet.dts = index
            packet.time_base = Fraction(1, 8)
            film.mux(packet)
    return out.getvalue()


# --- what is done to it ---------------------------------------------------------------------------


def announced(count: int, data: bytes) -> bytes:
    """An MP4 whose tables announce so many samples of one byte."""
    found = bytearray(data)
    for kind, at, values in (
        (b"stts", 8, (1, count, 1)),
        (b"stsz", 8, (1, count)),
        (b"stsc", 8, (1, 1, count)),
    ):
        begin = found.find(kind) + at
        if begin + 16 > len(found):
            break
        if kind == b"stsz":
            struct.pack_into(">2I", found, begin, *values)
        else:
            struct.pack_into(f">{len(values)}I", found, begin, *values)
    return bytes(found)


def _counts(rng: random.Random, data: _Data) -> None:
    """Tables that announce more than there is, or a number that looks like a size, anywhere."""
    if b"stts" in data and b"stsz" in data and b"stsc" in data:
        data[:] = announced(rng.choice((5, 100_000, 40_000_000, 1 << 31)), bytes(data))
    else:
        _number(rng, data, big=rng.random() < 0.5)


def _number(rng: random.Random, data: _Data, *, big: bool) -> None:
    """A whole number somewhere among the first 2,000 bytes becomes an extreme one."""
    nbytes = rng.choice((1, 2, 4, 4, 4, 8))
    at = rng.randrange(max(1, min(len(data), 2000) - nbytes))
    value = rng.choice(_EXTREME) % (1 << 8 * nbytes)
    data[at : at + nbytes] = value.to_bytes(nbytes, "big" if big else "little")


def _flip(rng: random.Random, data: _Data) -> None:
    for _ in range(rng.choice((1, 3, 12))):
        data[rng.randrange(min(len(data), 3000))] = rng.randrange(256)


def _cut(rng: random.Random, data: _Data) -> None:
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        del data[at:]
    else:
        del data[at : at + rng.randrange(1, 40)]
    data += bytes(max(0, 16 - len(data)))


def _places(data: _Data, what: tuple[bytes, ...]) -> list[int]:
    return [found.start() for kind in what for found in re.finditer(re.escape(kind), bytes(data))]


def _table(rng: random.Random, data: _Data) -> None:
    """A word of a table: its count, a size, or an entry."""
    if places := _places(data, _TABLES):
        at = rng.choice(places) + 4 + 4 * rng.randrange(8)
        data[at : at + 4] = struct.pack(">I", rng.choice(_EXTREME))


def _box_size(rng: random.Random, data: _Data) -> None:
    places = [found.start() for found in _BOX.finditer(bytes(data)) if found.start() >= 4]
    if places:
        at = rng.choice(places[:60])
        if rng.random() < 0.3:
            data[at : at + 4] = rng.choice((*_TABLES, b"moov", b"trak", b"cmov", b"meta", b"udta"))
        else:
            data[at - 4 : at] = struct.pack(">I", rng.choice((*_EXTREME, 8, 16, len(data))))


def _chunk_size(rng: random.Random, data: _Data) -> None:
    kinds = (b"RIFF", b"LIST", b"strh", b"strf", b"avih", b"idx1", b"movi", b"00dc", b"JUNK")
    if places := _places(data, (*kinds, b"VP8X", b"VP8 ", b"VP8L", b"EXIF", b"ALPH", b"ANIM")):
        at = rng.choice(places) + 4 * rng.randrange(1, 14)
        data[at : at + 4] = struct.pack("<I", rng.choice(_EXTREME))


def _element(rng: random.Random, data: _Data) -> None:
    """The size of an element of EBML, or its first bytes."""
    if places := _places(data, _EBML):
        at = rng.choice(places)
        at += rng.randrange(1, 9)
        size = rng.choice((b"\xff", b"\x01" + bytes(7), b"\x80", b"\x41\x00", b"\x10\xff\xff\xff"))
        data[at : at + len(size)] = size


def _nested(rng: random.Random, data: _Data) -> None:
    """A piece again and again: beside itself, or within itself."""
    begin = rng.randrange(min(len(data), 2000))
    piece = bytes(data[begin : begin + rng.choice((8, 20, 100))])
    data[begin:begin] = piece * rng.choice((2, 50, 3000))


def _tag(rng: random.Random, data: _Data) -> None:
    """A field of a tag of a TIFF, or one more tag."""
    order = "<" if data[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", data, 4)
    if at + 2 > len(data):
        return
    (count,) = struct.unpack_from(order + "H", data, at)
    place = at + 2 + 12 * rng.randrange(max(1, count))
    if place + 12 > len(data):
        return
    if rng.random() < 0.3:
        struct.pack_into(order + "H", data, place, rng.choice((256, 257, 258, 277, 278, 322, 323)))
    struct.pack_into(order + "I", data, place + rng.choice((4, 8)), rng.choice(_EXTREME))


def _png_chunk(rng: random.Random, data: _Data) -> None:
    """A chunk that unpacks to much, or a header that announces much."""
    if rng.random() < 0.5:
        size = struct.pack(">2I", *(rng.choice(_EXTREME) for _ in range(2)))
        depth = bytes((rng.choice((1, 2, 4, 8, 16)), rng.choice((0, 2, 3, 4, 6)), 0, 0, 0))
        data[8:33] = _chunk(b"IHDR", size + depth)
        return
    bomb = _zeros(rng.choice((10_000, 3_000_000, 100_000_000)))
    kind, head = rng.choice(
        ((b"iCCP", b"a\0\0"), (b"zTXt", b"a\0\0"), (b"iTXt", b"a\0\1\0\0\0"), (b"eXIf", b""))
    )
    data[33:33] = _chunk(kind, head + bomb) * rng.choice((1, 1, 20))


@cache
def _zeros(nbytes: int) -> bytes:
    return zlib.compress(bytes(nbytes), 9)


def _large_frame(rng: random.Random, data: _Data) -> None:
    """Packets of several sizes under one header."""
    sides = [rng.choice((16, 64, 64, 65, 4000)) for _ in range(3)]
    data[:] = film_of_packets([blank_png(side, side) for side in sides])
