"""What a header may say (F46), and that it says what the worker's decoder finds."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import zlib

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from epd.api.http.errors import ApiError
from epd.api.prompts.image_size import read_size
from epd.config import Limits
from epd.engine.vision.image_pixels import decode_image

LIMITS = Limits(max_pixels=1_000_000)
KINDS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/>'
    "</rdf:RDF></x:xmpmeta>"
)


def drawn_image(width: int = 40, height: int = 30, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(out, kind, **options)
    return out.getvalue()


def turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"tiffinfo": {0x0112: orientation}} if kind == "TIFF" else {"exif": exif}
    return drawn_image(kind=kind, **options)


def chunk(name: bytes, data: bytes) -> bytes:
    body = name + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises a huge image."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def animation(kind: str, num_frames: int = 3) -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (20, 20), (80 * i % 256, 0, 255)) for i in range(num_frames)]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_size_comes_from_the_header(kind: str) -> None:
    assert read_size(drawn_image(kind=kind), LIMITS, "x") == (40, 30)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_is_that_of_the_decoded_image(kind: str, orientation: int) -> None:
    data = turned(orientation, kind)
    expected = (30, 40) if orientation >= 5 else (40, 30)
    assert read_size(data, LIMITS, "x") == decode_image(data).size == expected


def test_orientation_may_be_told_behind_the_pixels() -> None:
    """ImageMagick writes the EXIF chunk of a PNG at its end."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain = drawn_image()
    end = plain.index(b"IEND") - 4
    late = plain[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + plain[end:]
    assert read_size(late, LIMITS, "x") == decode_image(late).size == (30, 40)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
def test_orientation_may_be_told_by_xmp(kind: str) -> None:
    info = PngInfo()
    info.add_itxt("XML:com.adobe.xmp", XMP)
    data = drawn_image(kind=kind, **({"pnginfo": info} if kind == "PNG" else {"xmp": XMP.encode()}))
    assert read_size(data, LIMITS, "x") == decode_image(data).size == (30, 40)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_is_no_reason_to_refuse() -> None:
    data = drawn_image(kind="JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read_size(data, LIMITS, "x") == (40, 30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bomb(60_000, 60_000), "at most 1000000 pixels"),
        (bomb(2**31 - 1, 2**31 - 1), "at most 1000000 pixels"),
        (bomb(30_000, 1), "200 times the other"),
        (bomb(0, 5), "image"),
        (animation("GIF"), "animated"),
        (animation("PNG"), "animated"),
        (animation("WEBP"), "animated"),
        (animation("TIFF"), "animated"),
        (animation("AVIF"), "animated"),
        (b"this is no image", "known format"),
        (b"", "known format"),
        (b"%PDF-1.7", "known format"),
        (drawn_image()[:20], "image"),
        (drawn_image(kind="JPEG")[:30], "image"),
        (drawn_image(kind="GIF")[:9], "image"),
        (drawn_image(kind="TIFF")[:10], "image"),
        (drawn_image(kind="WEBP")[:18], "image"),
    ],
)
def test_what_a_header_may_not_say(data: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_size(data, LIMITS, "messages[0].content[1].image_url")
    assert refused.value.status == 400
    assert refused.value.param == "messages[0].content[1].image_url"


def test_many_frames_are_not_counted() -> None:
    """Counting the frames of a long film takes seconds; the second one is enough."""
    film = animation("GIF", 2)
    frame = film[film.rindex(b"\x21\xf9\x04") : -1]
    film = film[:-1] + frame * 100_000 + b";"
    start_s = time.thread_time()  # a busy machine is not the reader's doing
    with pytest.raises(ApiError, match="animated"):
        read_size(film, LIMITS, "x")
    assert time.thread_time() - start_s < 0.5


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore:Truncated File Read")
@pytest.mark.parametrize("kind", KINDS)
def test_headers_cut_anywhere_never_escape(kind: str) -> None:
    """Either a size or an ApiError; any other exception fails the test."""
    data = turned(6, kind) if kind in ("PNG", "JPEG", "WEBP", "TIFF") else drawn_image(kind=kind)
    sizes = set()
    for nbytes in range(len(data)):
        with contextlib.suppress(ApiError):
            sizes.add(read_size(data[:nbytes], LIMITS, "x"))
    assert sizes <= {(40, 30), (30, 40)}
