"""Files whose metadata take a parser long are refused before it sees them (F52); others are not."""

from __future__ import annotations

import io
import struct
import time
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

from epd.engine.vision.image_pixels import decode_image
from epd.errors import MediaError
from epd.media_files.deadline_file import DeadlineFile, TooSlow
from epd.media_files.image_header import check_header
from epd.media_files.image_opening import open_image

# Far above what a refusal takes, and far below what any of these costs a parser.
QUICK_S = 1.0


def saved(kind: str, size: int = 64, **options: object) -> bytes:
    out = io.BytesIO()
    noise = Image.effect_noise((size, size), 90).convert("RGB")
    noise.save(out, kind, **options)
    return out.getvalue()


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I4s", len(data), name) + data + struct.pack(">I", zlib.crc32(name + data))


def behind(data: bytes, more: bytes, at: int) -> bytes:
    return data[:at] + more + data[at:]


def jpeg_with(more: bytes) -> bytes:
    return behind(saved("JPEG"), more, 2)


def png_with(more: bytes) -> bytes:
    return behind(saved("PNG"), more, 33)


def riff_with(more: bytes) -> bytes:
    data = saved("WEBP", lossless=True, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0")
    data += more
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def gif_with(more: bytes) -> bytes:
    data = saved("GIF")
    return behind(data, more, 13 + (3 << (data[10] % 8 + 1)))


def tiff(num_tags: int, nbytes: int) -> bytes:
    tags = b"".join(struct.pack("<HHII", i + 1, 1, nbytes, 8) for i in range(num_tags))
    return b"II*\0" + struct.pack("<IH", 8, num_tags) + tags + bytes(4)


def scans(count: int) -> bytes:
    data = saved("JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + data[last:-2] * count + data[-2:]


HOSTILE: dict[str, Callable[[], bytes]] = {
    "EXIF segments": lambda: jpeg_with(segment(0xE1, b"Exif\0\0") * 300_000),
    "large EXIF segments": lambda: jpeg_with(segment(0xE1, b"Exif\0\0" + bytes(65_000)) * 400),
    "comments": lambda: jpeg_with(segment(0xFE, b"") * 1_000_000),
    "Photoshop's": lambda: jpeg_with(
        segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5000) * 400
    ),
    "padding": lambda: jpeg_with(b"\xff" * 10_000_000),
    "junk": lambda: behind(saved("JPEG"), b"\0" * 10_000_000, 20),
    "scans": lambda: scans(5000),
    "chunks": lambda: png_with(chunk(b"tEXt", b"a\0b") * 500_000),
    "eXIf": lambda: png_with(chunk(b"eXIf", bytes(20_000_000))),
    "RIFF chunks": lambda: riff_with(b"abcd\0\0\0\0" * 1_000_000),
    "RIFF EXIF": lambda: riff_with(b"EXIF" + struct.pack("<I", 10_000_000) + bytes(10_000_000)),
    "GIF comment": lambda: gif_with(b"\x21\xfe" + (b"\xff" + b"a" * 255) * 60_000 + b"\0"),
    "GIF extensions": lambda: gif_with(b"\x21\xfe\x01a\0" * 500_000),
    "GIF junk": lambda: gif_with(b"\x01" * 5_000_000),
    "GIF pixels": lambda: saved("GIF")[:-2] + b"\x01a" * 2_000_000 + b"\0;",
    "tags": lambda: tiff(60_000, 1),
    "tags of a long value": lambda: tiff(900, 1_000_000) + bytes(1_000_000),
    "BigTIFF": lambda: b"II+\0" + bytes(100),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(name: str) -> None:
    data = HOSTILE[name]()
    for read in (check_header, decode_image):
        began_s = time.thread_time()  # a busy machine is not the reader's doing
        with pytest.raises(MediaError, match=r"save it again|send it as"):
            read(memoryview(data))  # type: ignore[operator]
        assert time.thread_time() - began_s < QUICK_S


USUAL: dict[str, Callable[[], bytes]] = {
    "progressive": lambda: saved("JPEG", 512, progressive=True),
    "restarts": lambda: saved("JPEG", 512, restart_marker_blocks=1),
    "profile": lambda: saved("JPEG", icc_profile=bytes(500_000)),
    "comment": lambda: saved("JPEG", comment=b"a" * 60_000),
    "large": lambda: saved("JPEG", 3000, quality=100),
    "PNG of many chunks": lambda: saved("PNG", 2500, compress_level=0),
    "PNG texts": lambda: png_with(chunk(b"tEXt", b"a\0b") * 500),
    "WebP": lambda: saved("WEBP", 512, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"),
    "GIF": lambda: saved("GIF", 1000),
    "GIF with a comment": lambda: saved("GIF", comment=b"a" * 20_000),
    "TIFF": lambda: saved("TIFF", 1000),
    "packed TIFF": lambda: saved("TIFF", 1000, compression="tiff_lzw"),
    "AVIF": lambda: saved("AVIF", 200),
    "motion photo": lambda: saved("JPEG") + zlib.compress(bytes(range(256)) * 9) * 5000,
}


@pytest.mark.parametrize("name", USUAL)
def test_usual_files_pass(name: str) -> None:
    data = USUAL[name]()
    check_header(data)
    assert decode_image(memoryview(data)).size[0] >= 64


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF"])
def test_cut_files_are_left_to_the_parser(kind: str) -> None:
    data = saved(kind)
    for nbytes in range(0, len(data), 7):
        check_header(data[:nbytes])


def test_reading_ends_at_its_deadline() -> None:
    with pytest.raises(MediaError, match="cannot be read"):
        open_image(saved("PNG"), -1.0)
    file = DeadlineFile(b"abc", 60.0)
    assert file.read(1) == b"a"
    file = DeadlineFile(b"abc", -1.0)
    with pytest.raises(TooSlow):
        file.read()


def test_animations_are_no_images() -> None:
    out = io.BytesIO()
    frames = [Image.new("RGB", (40, 40), color) for color in ("red", "blue")]
    frames[0].save(out, "AVIF", save_all=True, append_images=frames[1:])
    with pytest.raises(MediaError, match="is animated"):
        open_image(out.getvalue(), 5.0)
