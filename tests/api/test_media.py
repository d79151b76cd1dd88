"""Pictures under policy (F46): what may be fetched, and how much of it."""

from __future__ import annotations

import asyncio
import base64
import gzip
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
from aiohttp import web

from epd.api.errors import ApiError
from epd.api.media import MediaFetcher, is_data_url, picture_bound, read_data_url
from epd.config import Limits

PICTURE = b"\x89PNG as far as this module knows"
LIMITS = Limits(max_image_nbytes=100_000, fetch_timeout_s=2.0)
BOUND = picture_bound(LIMITS)
OPEN = Limits(
    max_image_nbytes=100_000, allow_private_networks=True, max_redirects=2, fetch_timeout_s=0.5
)


def test_data_urls() -> None:
    url = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
    assert read_data_url(url, BOUND, "x") == PICTURE
    assert read_data_url("DATA:;BASE64,YWJj", BOUND, "x") == b"abc"
    assert read_data_url("data:image/svg+xml,%3Csvg", BOUND, "x") == b"<svg"
    assert is_data_url("data:,")
    assert is_data_url("Data:,")
    assert not is_data_url("http://data:1")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:;base64,abc", "base64"),
        ("data:;base64,YWJj\nYWJj", "base64"),
        ("data:;base64,☃☃☃☃", "base64"),
        ("data:;base64," + "A" * 200_000, "more than 100000 bytes"),
        ("data:," + "A" * 100_001, "more than 100000 bytes"),
        ("data:," + "%41" * 200_000, "more than 100000 bytes"),
    ],
)
def test_broken_and_large_data_urls(url: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        read_data_url(url, BOUND, "x")
    assert (refused.value.status, refused.value.param) == (400, "x")


@pytest.fixture
async def site() -> AsyncIterator[str]:
    """A web server on loopback."""

    async def image(request: web.Request) -> web.Response:
        return web.Response(body=PICTURE, content_type="text/html")

    async def moved(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": request.query["to"]})

    async def nowhere(request: web.Request) -> web.Response:
        return web.Response(status=302)

    async def packed(request: web.Request) -> web.Response:
        bomb = gzip.compress(bytes(50_000_000))
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 10_000)
        return response

    async def slow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(30):
            await response.write(b"x")
            await asyncio.sleep(0.1)
        return response

    app = web.Application()
    for handler in (image, moved, nowhere, packed, endless, slow):
        app.router.add_get(f"/{handler.__name__}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0)
    await server.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def outcome(url: str, limits: Limits) -> bytes | str:
    """The picture, or what the client is told."""
    fetcher = MediaFetcher(limits)
    try:
        return await fetcher.fetch(url, BOUND, "x")
    except ApiError as refused:
        return f"{refused.status} {refused.param} {refused.message}"
    finally:
        await fetcher.close()


def moved(site: str, *hops: str) -> str:
    """A URL that redirects through all of `hops`."""
    url = hops[-1]
    for _ in hops:
        url = f"{site}/moved?to={quote(url, safe='')}"
    return url


async def test_pictures_where_private_networks_are_allowed(site: str) -> None:
    assert await outcome(f"{site}/image", OPEN) == PICTURE
    assert await outcome(f"{site}/moved?to=/image", OPEN) == PICTURE
    assert await outcome(site.replace("127.0.0.1", "localhost") + "/image", OPEN) == PICTURE


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/endless", "more than 100000 bytes"),
        ("/missing", "HTTP status 404"),
        ("/nowhere", "HTTP status 302"),
        ("/packed", "gzip"),
        ("/slow", "within 0.5 s"),
        ("/moved?to=file:///etc/passwd", "leads to 'file:///etc/passwd'"),
        ("/moved?to=http://user:secret@127.0.0.1/", "credentials"),
        ("/moved?to=http://[", "could not be fetched"),
    ],
)
async def test_what_a_server_may_not_do(site: str, path: str, words: str) -> None:
    told = str(await outcome(f"{site}{path}", OPEN))
    assert told.startswith("400 x ")
    assert words in told


async def test_redirects_are_few(site: str) -> None:
    end = f"{site}/image"
    assert await outcome(moved(site, "", end), OPEN) == PICTURE
    assert "redirects more than 2" in str(await outcome(moved(site, "", "", end), OPEN))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "127.1", "[::ffff:127.0.0.1]"]
)
async def test_private_networks_are_closed_by_default(site: str, host: str) -> None:
    url = f"{site}/image".replace("127.0.0.1", host)
    words = str(await outcome(url, LIMITS))
    assert "private or local" in words or "usual form" in words


async def test_a_redirect_does_not_lead_inside(site: str) -> None:
    """The first server counts as public here; where it points to does not."""
    fetcher = MediaFetcher(LIMITS)
    fetcher._limits = OPEN  # a session that resolves anything, as if `site` were outside
    fetcher._open()
    checked: list[str] = []

    def check(url: str, param: str) -> None:
        fetcher._limits = LIMITS if checked else OPEN
        checked.append(url)
        MediaFetcher._check(fetcher, url, param)

    fetcher._check = check  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="private or local"):
        await fetcher.fetch(moved(site, f"{site}/image"), BOUND, "x")
    assert len(checked) == 2
    await fetcher.close()


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host/x", "gopher:x", "", "http://", "//host/x", "http://h:x"],
)
async def test_other_urls_are_refused(url: str) -> None:
    assert isinstance(await outcome(url, OPEN), str)


async def test_nobody_listens() -> None:
    assert "could not be fetched" in str(await outcome("http://127.0.0.1:1/x", OPEN))
