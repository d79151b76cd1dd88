"""The page at /ui in a real browser, with real workers behind it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from epd.tiny import SAMPLES
from tests.e2e.client import Reply, data_url, in_session, png, post, post_all, question
from tests.e2e.server import SLOW, Server, serving
from tests.pages.browser import browsing, picture, window

IMAGES = [data_url(path.read_bytes()) for path in sorted(SAMPLES.glob("*.png"))]
SOON_MS = 10_000 * SLOW
TALL = (1280, 1400)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@contextmanager
def asking(server: Server, *bodies: dict[str, Any]) -> Iterator[None]:
    """Requests that run meanwhile, each answered in the end; the browser has this thread's loop."""
    replies: list[Reply] = []
    thread = threading.Thread(
        target=lambda: replies.extend(asyncio.run(post_all(server.base_url, bodies)))
    )
    thread.start()
    yield
    thread.join()
    assert [reply.status for reply in replies] == [200] * len(bodies)


@pytest.mark.long
def test_states_light_up_while_a_request_is_served(browser: Browser, apart: Server) -> None:
    body = question("Tell me more.", IMAGES[0]) | {"max_tokens": 1500, "ignore_eos": True}
    with window(browser) as page:
        page.goto(f"{apart.base_url}/ui")
        expect(page.get_by_role("button", name="STREAMING: none")).to_have_count(1)
        with asking(apart, *[body] * 4):
            lit = page.get_by_role("button", name="STREAMING: 4")
            expect(lit).to_be_visible(timeout=SOON_MS)
            expect(page.locator(".flow").first).to_be_visible(timeout=SOON_MS)
            picture(page, "serving")
            lit.click()
            page.get_by_role("table", name="oldest in STREAMING").get_by_role(
                "button"
            ).first.click()
            events = page.get_by_role("table", name="events by time")
            for name in ("gateway", "p0", "d0"):
                expect(events.get_by_role("columnheader", name=name)).to_be_visible(timeout=SOON_MS)
            picture(page, "request")
        expect(events).to_contain_text("FINISHED", timeout=SOON_MS)


def test_a_snapshot_is_a_page_of_its_own(browser: Browser, apart: Server, tmp_path: Path) -> None:
    with asking(apart, *(question("What is the total?", image) for image in IMAGES)):
        pass
    path = tmp_path / "cluster.html"
    command = [sys.executable, "-m", "epd", "snapshot", "--url", apart.base_url]
    path.write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
    with window(browser) as page:
        page.goto(path.as_uri())
        for name in ("gateway", "e0", "p0", "d0"):
            expect(page.locator(f"[data-process={name}]")).to_be_visible()
        page.get_by_role("navigation").get_by_role("button", name="EMBEDDING").click()
        page.get_by_role("button", name="RESIDENT: ").click()
        image = page.get_by_role("table", name="oldest in RESIDENT").get_by_role("button")
        image.first.click()
        events = page.get_by_role("table", name="events by time")
        expect(events.get_by_role("columnheader", name="p0")).to_be_visible()


@contextmanager
def load_on(server: Server, num_clients: int) -> Iterator[None]:
    """Clients that ask on and on, each time about an image that nobody has seen."""
    is_over = threading.Event()
    statuses: set[int] = set()

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        random = Random(number)
        while not is_over.is_set():
            image = Image.frombytes("RGB", (112, 112), random.randbytes(3 * 112 * 112))
            body = question("What is the total?", png(image), max_tokens=16)
            statuses.add((await post(session, server.base_url, body)).status)

    async def work(session: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(client(session, number) for number in range(num_clients)))

    thread = threading.Thread(target=lambda: asyncio.run(in_session(work)))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert statuses == {200}


@pytest.mark.long
def test_under_load_the_rooms_of_a_stopped_encoder_are_two_clicks_or_one_command_away(
    browser: Browser,
) -> None:
    """Its end frees them.  Its supervisor, which would end it within seconds, stands still, too, as
    all does on a host that hangs."""
    with serving("2e2p2d", timing__request_timeout_s=120) as server, window(browser, TALL) as page:
        page.goto(f"{server.base_url}/ui")
        encoder = page.locator("[data-process=e0]")
        expect(encoder).to_have_class("node", timeout=SOON_MS)
        expect(page.locator("header")).to_contain_text("6 of 6 instances")
        first = server.instances()["e0"]["epoch"]
        late = page.get_by_role("region", name="trouble").get_by_role("button", name="INCOMING")
        pid = server.pid("e0")
        with load_on(server, 8):
            page.get_by_role("navigation").get_by_role("button", name="ENCODING").click()
            expect(page.locator(".flow").first).to_be_visible(timeout=SOON_MS)
            expect(page.locator(".cluster text").first).to_contain_text("iB/s", timeout=SOON_MS)
            for stopped in (server.process.pid, pid):
                os.kill(stopped, signal.SIGSTOP)
            expect(encoder).to_have_class("node late", timeout=SOON_MS)
            late.filter(has_text="QUARANTINED").click(timeout=SOON_MS)
            page.get_by_role("button", name="gateway-").first.click(timeout=SOON_MS)
            story = page.get_by_role("table", name="events by time")
            expect(story).to_contain_text("QUARANTINED", timeout=SOON_MS)
            picture(page, "quarantined")
            command = [sys.executable, "-m", "epd", "list", "transfers", "--late", "--json"]
            listed = subprocess.run(
                [*command, "--url", server.base_url], check=True, capture_output=True
            )
            found = json.loads(listed.stdout)["machines"]
            assert ("INCOMING", "QUARANTINED") in {(one["machine"], one["state"]) for one in found}
        page.emulate_media(color_scheme="dark")
        picture(page, "quarantined-dark")
        server.send(signal.SIGCONT)
        expect(encoder).to_have_class("node", timeout=SOON_MS)
        assert server.instances()["e0"]["epoch"] != first
        os.kill(server.pid("e0"), signal.SIGSTOP)
        with window(browser, (400, 900)) as afterwards:
            afterwards.goto(f"{server.base_url}/ui")
            card = afterwards.locator("[data-process=e0].late")
            expect(card).to_be_visible(timeout=SOON_MS)
            picture(afterwards, "stopped-before-it-was-opened")
        expect(late).to_have_count(0, timeout=SOON_MS)
