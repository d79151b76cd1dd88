"""Images under policy (F46): what may be fetched, and how much of it."""

from __future__ import annotations

import asyncio
import gzip
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from epd.api.http.data_url import image_bound
from epd.api.http.errors import ApiError
from epd.api.prompts import addresses
from epd.api.prompts.media import MediaFetcher
from epd.config import Limits

IMAGE = b"\x89PNG as far as this module knows"
LIMITS = Limits(max_image_nbytes=100_000, fetch_timeout_s=2.0)
BOUND = image_bound(LIMITS)
OPEN = Limits(max_image_nbytes=100_000, allow_private_networks=True)


@pytest.fixture
def served() -> list[str]:
    """Paths that `site` was asked for."""
    return []


@pytest.fixture
async def site(served: list[str]) -> AsyncIterator[str]:
    """A web server on loopback."""

    @web.middleware
    async def note(request: web.Request, handler: Any) -> Any:
        served.append(request.path)
        response = await handler(request)
        response.force_close()  # the next URL needs a connection of its own
        return response

    async def image(request: web.Request) -> web.Response:
        return web.Response(body=IMAGE, content_type="text/html")

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

    app = web.Application(middlewares=[note])
    for handler in (image, moved, nowhere, packed, endless, slow):
        app.router.add_get(f"/{handler.__name__}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    port = runner.addresses[0][1]
    if socket.has_dualstack_ipv6():
        await web.TCPSite(runner, "::", port).start()
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def outcome(url: str, limits: Limits) -> bytes | str:
    """The image, or what the client is told."""
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


async def test_images_where_private_networks_are_allowed(site: str) -> None:
    assert await outcome(f"{site}/image", OPEN) == IMAGE
    assert await outcome(f"{site}/moved?to=/image", OPEN) == IMAGE
    assert await outcome(site.replace("127.0.0.1", "localhost") + "/image", OPEN) == IMAGE


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/endless", "more than 100000 bytes"),
        ("/missing", "HTTP status 404"),
        ("/nowhere", "HTTP status 302"),
        ("/packed", "gzip"),
        ("/moved?to=file:///etc/passwd", "leads to 'file:///etc/passwd'"),
        ("/moved?to=http://user:secret@127.0.0.1/", "credentials"),
        ("/moved?to=http://[", "not a valid URL"),
    ],
)
async def test_what_a_server_may_not_do(site: str, path: str, words: str) -> None:
    told = str(await outcome(f"{site}{path}", OPEN))
    assert told.startswith("400 x ")
    assert words in told


async def test_a_server_may_not_take_its_time(site: str) -> None:
    hasty = Limits(allow_private_networks=True, fetch_timeout_s=0.5)
    assert "within 0.5 s" in str(await outcome(f"{site}/slow", hasty))


async def test_redirects_are_few(site: str) -> None:
    end = f"{site}/image"
    assert await outcome(moved(site, "", end), OPEN) == IMAGE
    assert "redirects more than 3" in str(await outcome(moved(site, "", "", "", end), OPEN))


# Ways to spell loopback; aiohttp, yarl, the resolver and the system each have their own ideas.
SPELLINGS = [
    "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "2130706433", "0177.0.0.1", "0x7f.0.0.1",
    "0x7f000001", "017700000001", "0", "0.0.0.0", "localhost", "LOCALHOST.", "[::1]", "[::]",
    "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[::1%25lo]",
    "[::1%lo]", "[64:ff9b::127.0.0.1]", "[2002:7f00:1::]", "127。0。0。1", "①②⑦.⓪.⓪.①", "[①::1]",
    "\uff11\uff12\uff17.0.0.1", "127｡0｡0｡1", "127\uff0e0\uff0e0\uff0e1",
    "\U0001d7cf\U0001d7d0\U0001d7d5.0.0.\U0001d7cf", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "loc\u00adalhost",
    "\u0661\u0662\u0667.\u0660.\u0660.\u0661", "\u0660x7f.1", "%31%32%37.0.0.1", "127.0.0.%31",
    "%6cocalhost", "127%2e0%2e0%2e1", "xn--localhost-", "127.0.0.1\t", "\t127.0.0.1", "127.0.0.1%00"
]  # fmt: skip


@pytest.mark.parametrize("host", SPELLINGS)
async def test_no_spelling_of_a_private_address_is_connected_to(
    site: str, served: list[str], host: str
) -> None:
    inside = f"{site}/image".replace("127.0.0.1", host)
    assert str(await outcome(inside, LIMITS)).startswith("400 x ")
    assert not served


@pytest.fixture
def first_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address that is asked about counts as a server outside."""
    asked: list[str] = []
    real = addresses.is_public

    def is_public(address: str) -> bool:
        asked.append(address)
        return len(asked) == 1 or real(address)

    monkeypatch.setattr(addresses, "is_public", is_public)


@pytest.mark.usefixtures("first_is_public")
@pytest.mark.parametrize("host", SPELLINGS)
async def test_a_redirect_does_not_lead_inside(site: str, served: list[str], host: str) -> None:
    inside = f"{site}/image".replace("127.0.0.1", host)
    assert str(await outcome(moved(site, inside), LIMITS)).startswith("400 x ")
    assert served == ["/moved"]


@pytest.mark.usefixtures("first_is_public")
async def test_what_is_outside_is_fetched(site: str) -> None:
    assert await outcome(f"{site}/image", LIMITS) == IMAGE


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host/x", "gopher:x", "", "http://", "//host/x", "http://h:x"],
)
async def test_other_urls_are_refused(url: str) -> None:
    assert isinstance(await outcome(url, OPEN), str)


async def test_nobody_listens() -> None:
    assert "could not be fetched" in str(await outcome("http://127.0.0.1:1/x", OPEN))


async def test_hosts_that_may_be_named(site: str, served: list[str]) -> None:
    limits = Limits(allow_private_networks=True, allowed_media_domains=("127.0.0.1",))
    assert await outcome(f"{site}/image", limits) == IMAGE
    elsewhere = f"{site}/image".replace("127.0.0.1", "localhost")
    served.clear()
    assert "from 127.0.0.1 only" in str(await outcome(elsewhere, limits))
    assert not served
    assert "from 127.0.0.1 only" in str(await outcome(moved(site, elsewhere), limits))
    assert served == ["/moved"]


async def test_files_below_one_directory(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for directory in (inside, outside):
        directory.mkdir()
        (directory / "a b.png").write_bytes(IMAGE)
    (inside / "large").write_bytes(bytes(BOUND.nbytes + 1))
    (inside / "link").symlink_to(outside / "a b.png")
    (inside / "round").symlink_to(inside / "round")
    os.mkfifo(inside / "pipe")
    limits = Limits(allowed_local_media_path=str(inside))
    assert await outcome(f"file://{inside}/a%20b.png", limits) == IMAGE
    assert await outcome(f"FILE://localhost{inside}/a b.png", limits) == IMAGE
    assert "more than 100000 bytes" in str(await outcome(f"file://{inside}/large", limits))
    for name in (
        f"{outside}/a%20b.png", f"{inside}/../out/a%20b.png", f"{inside}/%2e%2e/out/a b.png",
        f"{inside}/link", f"{inside}/round", f"{inside}/pipe", f"{inside}", f"{inside}/none",
        f"host{inside}/a%20b.png", "/dev/zero", "/proc/self/environ", f"{inside}/%00", "",
    ):  # fmt: skip
        found = await outcome(f"file://{name}", limits)
        assert found == "400 x x is no file that may be read"
    assert "use a data:" in str(await outcome(f"file://{inside}/a%20b.png", LIMITS))


@pytest.mark.parametrize("swapped", ["in/deep", "in/deep/a"])
async def test_a_link_that_is_made_meanwhile_leads_nowhere(
    swapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for directory in (tmp_path / "in" / "deep", tmp_path / "out" / "deep"):
        directory.mkdir(parents=True)
        (directory / "a").write_bytes(IMAGE)
    really_open = os.open

    def open_later(path: Path, flags: int) -> int:
        inside = tmp_path / swapped
        inside.rename(tmp_path / "was")
        inside.symlink_to(tmp_path / swapped.replace("in/", "out/"))
        return really_open(path, flags)

    monkeypatch.setattr("epd.api.prompts.media.os.open", open_later)
    limits = Limits(allowed_local_media_path=str(tmp_path / "in"))
    found = await outcome(f"file://{tmp_path}/in/deep/a", limits)
    assert found == "400 x x is no file that may be read"


async def test_no_server_leads_to_a_file(site: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(IMAGE)
    limits = Limits(allow_private_networks=True, allowed_local_media_path=str(tmp_path))
    found = await outcome(moved(site, f"file://{tmp_path}/a"), limits)
    assert "leads to 'file:" in str(found)
