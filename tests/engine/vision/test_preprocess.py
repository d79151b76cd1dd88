"""Bytes to patches: equal to transformers' processor; every bad image is a clear MediaError."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, features

from epd.engine.adapter import adapter_for
from epd.engine.vision.image_pixels import decode_image
from epd.engine.vision.preprocess import Preprocessor
from epd.errors import MediaError
from epd.model_files.checkpoint import read_checkpoint
from epd.model_files.geometry import image_geometry
from tests.engine.conftest import drawn_image
from tests.engine.reference import reference_processor
from tests.engine.tiny_models import VISION_FAMILIES


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def transparent() -> Image.Image:
    image = drawn_image(1, 61, 44).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize((61, 44)))
    return image


IMAGES: dict[str, Callable[[], Image.Image]] = {
    "rgb": lambda: drawn_image(1, 61, 44),
    "grey": lambda: drawn_image(2, 50, 50).convert("L"),
    "one bit": lambda: drawn_image(2, 50, 50).convert("1"),
    "palette": lambda: drawn_image(3, 70, 40).convert("P"),
    "transparent": transparent,
    "grey with alpha": lambda: transparent().convert("LA"),
    "tiny": lambda: drawn_image(4, 2, 1),
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_patches_equal_the_processors(
    family: str, kind: str, model_dir: Callable[[str], Path]
) -> None:
    directory = model_dir(family)
    preprocess = Preprocessor(adapter_for(read_checkpoint(directory)))
    image = IMAGES[kind]()
    config = json.loads((directory / "config.json").read_text())
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    geometry = image_geometry(config, settings, *image.size)
    found = preprocess(encoded(image), geometry.grid_thw)
    expected = reference_processor(directory)(images=[image], return_tensors="pt")["pixel_values"]
    if family in ("llava_onevision", "idefics3"):
        expected = expected[0]
    if family in ("kimi_k25", "paddleocr_vl"):
        expected = expected.flatten(1)
    if family == "gemma4":  # padded to its budget
        expected = expected[0, : geometry.num_patches]
    if family == "mistral3":  # whose tower cuts patches, as a convolution
        expected = torch.nn.functional.unfold(expected, 8, stride=8)[0].T
    if family == "deepseek_ocr2":  # views of several sizes
        expected = expected.flatten()
    assert torch.equal(found.pixels, expected)
    assert (found.num_rows, found.num_patches) == (geometry.num_rows, geometry.num_patches)


def test_exif_rotation_is_applied() -> None:
    """A photograph on its side: what the client sees is what the model sees."""
    image = drawn_image(5, 60, 40)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 270 degrees to show
    upright = decode_image(encoded(image, "PNG", exif=exif))
    assert upright.size == (40, 60)
    assert upright.tobytes() == image.transpose(Image.Transpose.ROTATE_270).tobytes()


def _grey_tiff(order: str, bits: int, data: bytes) -> bytes:
    """Of 50 x 50 samples in one strip, without compression."""
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    entries = {256: 50, 257: 50, 258: bits, 259: 1, 262: 1, 277: 1, 278: 50}
    begin = 8 + 2 + 12 * 9 + 4
    directory = struct.pack(f"{order}H", 9)
    for tag, value in sorted([*entries.items(), (273, begin), (279, len(data))]):
        kind, form = (4, "I") if tag in (273, 279) else (3, "HH")
        values = (value,) if form == "I" else (value, 0)
        directory += struct.pack(f"{order}HHI{form}", tag, kind, 1, *values)
    return header + directory + bytes(4) + data


DEEP_GREY = drawn_image(2, 50, 50).convert("L")


def _deep(order: str = "<", factor: int = 257) -> bytes:
    return (np.asarray(DEEP_GREY).astype(f"{order}u2") * factor).astype(f"{order}u2").tobytes()


def _twelve() -> bytes:
    """Pairs of 12-bit samples in three bytes each."""
    first, second = (np.asarray(DEEP_GREY).astype(np.uint16) * 16 + 9).reshape(-1, 2).T
    three = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=1)
    return three.astype(np.uint8).tobytes()


DEEP: dict[str, Callable[[], bytes]] = {
    "png": lambda: encoded(Image.frombytes("I;16", (50, 50), _deep())),
    "png, no whole multiples": lambda: encoded(Image.frombytes("I;16", (50, 50), _deep("<", 256))),
    "tiff": lambda: encoded(Image.frombytes("I;16", (50, 50), _deep()), "TIFF"),
    "tiff, large end first": lambda: _grey_tiff(">", 16, _deep(">")),
    "tiff of 12 bits": lambda: _grey_tiff("<", 12, _twelve()),
}


@pytest.mark.parametrize("kind", DEEP)
def test_deep_grey_is_read_as_viewers_show_it(kind: str) -> None:
    """Fault F76: Pillow makes white what is above 255."""
    assert decode_image(DEEP[kind]()).tobytes() == DEEP_GREY.tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.int16])
def test_samples_without_a_known_range_are_refused(dtype: type) -> None:
    deep = Image.fromarray(np.asarray(DEEP_GREY).astype(np.int32))
    data = encoded(deep if dtype is np.int32 else deep.convert("F"), "TIFF")
    if dtype is np.int16:
        data = encoded(Image.frombytes("I;16", (50, 50), _deep("<", 16)))
    with pytest.raises(MediaError, match="save it with 8"):
        decode_image(data)


def test_another_grid_than_announced_is_refused(model_dir: Callable[[str], Path]) -> None:
    preprocess = Preprocessor(adapter_for(read_checkpoint(model_dir("qwen3_vl"))))
    with pytest.raises(MediaError, match="not what its header says"):
        preprocess(encoded(drawn_image(1, 64, 64)), (1, 2, 2))


def _huge_png() -> bytes:
    """A header that announces 20,000 x 20,000 pixels, and next to no data."""

    def part(kind: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + checksum

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 1000)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + part(b"IHDR", header) + part(b"IDAT", data) + part(b"IEND", b"")


def _animated(image_format: str) -> bytes:
    frames = [drawn_image(i, 40, 40) for i in range(3)]
    return encoded(frames[0], image_format, save_all=True, append_images=frames[1:])


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "not an image"),
    "text": (lambda: b"<html>not found</html>", "not an image"),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    "truncated jpeg": (lambda: encoded(drawn_image(1, 90, 90), "JPEG")[:900], "damaged"),
    "truncated png": (lambda: encoded(drawn_image(1, 90, 90))[:-200], "damaged"),
    "bomb": (_huge_png, "pixels"),
    "animated gif": (lambda: _animated("GIF"), "animated"),
    "animated png": (lambda: _animated("PNG"), "animated"),
    "animated webp": (lambda: _animated("WEBP"), "animated"),
    "several pages": (lambda: _animated("TIFF"), "animated"),
    "postscript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_images_are_refused(kind: str) -> None:
    if "webp" in kind and not features.check("webp"):
        pytest.skip("Pillow without WebP")
    make, message = BAD[kind]
    with pytest.raises(MediaError, match=message):
        decode_image(make())


def test_every_truncation_is_refused_or_read() -> None:
    """Whatever a cut or flipped byte trips in a decoder comes out as MediaError."""
    whole = encoded(drawn_image(1, 40, 40), "JPEG")
    for length in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[length] ^= 0xFF
        for data in (whole[:length], bytes(flipped)):
            try:
                decode_image(data)
            except MediaError:
                continue


def test_the_pixel_limit_comes_before_decoding() -> None:
    with pytest.raises(MediaError, match="100 x 100 pixels; send at most 9999"):
        decode_image(encoded(drawn_image(1, 100, 100)), max_pixels=9999)


def test_a_still_gif_and_a_two_image_jpeg_are_read() -> None:
    assert decode_image(encoded(drawn_image(1, 30, 20), "GIF")).size == (30, 20)
    pair = encoded(
        drawn_image(1, 30, 20), "MPO", save_all=True, append_images=[drawn_image(2, 30, 20)]
    )
    assert decode_image(pair).size == (30, 20)


def test_a_print_jpeg_is_read() -> None:
    """CMYK, as printers send it."""
    data = encoded(drawn_image(1, 30, 20).convert("CMYK"), "JPEG")
    assert decode_image(data).mode == "CMYK"


def test_any_buffer_is_taken() -> None:
    data = encoded(drawn_image(1, 30, 20))
    for buffer in (bytearray(data), memoryview(data)):
        assert decode_image(buffer).size == (30, 20)
