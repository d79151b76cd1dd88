"""Pictures under policy (F46): what may be fetched, and what a header may say."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from PIL import Image

from epd.api.errors import ApiError
from epd.api.media import MediaFetcher, is_public, read_data_url, read_size
from epd.config import Limits

LIMITS = Limits(max_image_nbytes=100_000, max_pixels=1_000_000, fetch_timeout_s=2.0)


def picture(width: int = 40, height: int = 30, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(out, kind, **options)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises a huge picture."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return picture(kind=kind, exif=exif)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_size_comes_from_the_header(kind: str) -> None:
    assert read_size(picture(kind=kind), LIMITS, "x") == (40, 30)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
@pytest.mark.parametrize(("orientation", "size"), [(1, (40, 30)), (3, (40, 30)), (6, (30, 40))])
def test_size_is_upright(kind: str, orientation: int, size: tuple[int, int]) -> None:
    assert read_size(turned(orientation, kind), LIMITS, "x") == size


def animation() -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue", "green")]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bomb(60_000, 60_000), "at most 1000000 pixels"),
        (bomb(30_000, 1), "200 times the other"),
        (animation(), "animated"),
        (b"this is no picture", "known format"),
        (b"", "known format"),
        (picture()[:20], "picture"),
    ],
)
def test_what_a_header_may_not_say(data: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_size(data, LIMITS, "messages[0].content[1].image_url")
    assert refused.value.status == 400
    assert refused.value.param == "messages[0].content[1].image_url"


def test_data_urls() -> None:
    data = picture()
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert read_data_url(url, LIMITS, "x") == data
    for broken in ("data:image/png;base64", "data:image/png;base64,@@@", "data:;base64,abc"):
        with pytest.raises(ApiError):
            read_data_url(broken, LIMITS, "x")
    with pytest.raises(ApiError, match="more than 100000 bytes"):
        read_data_url("data:;base64," + "A" * 200_000, LIMITS, "x")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:127.0.0.1", False),
        ("2001:4860:4860::8888", True),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.fixture
async def site() -> AsyncIterator[str]:
    """A web server on loopback."""

    async def image(request: web.Request) -> web.Response:
        return web.Response(body=picture())

    async def moved(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": request.query["to"]})

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 10_000)
        return response

    app = web.Application()
    app.router.add_get("/image", image)
    app.router.add_get("/moved", moved)
    app.router.add_get("/endless", endless)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def outcome(url: str, limits: Limits) -> bytes | str:
    fetcher = MediaFetcher(limits)
    try:
        return await fetcher.fetch(url, "x")
    except ApiError as refused:
        assert refused.status == 400
        return refused.message
    finally:
        await fetcher.close()


OPEN = Limits(max_image_nbytes=100_000, allow_private_networks=True, max_redirects=2)


async def test_http_pictures_where_private_networks_are_allowed(site: str) -> None:
    assert await outcome(f"{site}/image", OPEN) == picture()
    assert await outcome(f"{site}/moved?to=/image", OPEN) == picture()
    assert "more than 100000 bytes" in str(await outcome(f"{site}/endless", OPEN))
    assert "404" in str(await outcome(f"{site}/nothing", OPEN))
    assert "not http(s)" in str(await outcome(f"{site}/moved?to=file:///etc/passwd", OPEN))


async def test_private_networks_are_closed_by_default(site: str) -> None:
    assert "private or local" in str(await outcome(f"{site}/image", LIMITS))
    named = site.replace("127.0.0.1", "localhost")
    assert "private or local" in str(await outcome(f"{named}/image", LIMITS))
    assert "private or local" in str(await outcome("http://[::1]:1/", LIMITS))
    assert "private or local" in str(await outcome("http://169.254.169.254/latest", LIMITS))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "gopher:x", "", "http://"])
async def test_other_schemes_are_refused(url: str) -> None:
    assert isinstance(await outcome(url, OPEN), str)


async def test_a_redirect_loop_ends(site: str) -> None:
    loop = f"{site}/moved?to={site}/moved%3Fto%3D{site}/moved%253Fto%253D{site}/moved%25253Fto%25253D/image"
    assert "redirects more than 2" in str(await outcome(loop, OPEN))
