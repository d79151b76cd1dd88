"""The pages for people: true, whole in themselves, and safe to look at."""

from __future__ import annotations

import gzip
import hashlib
import re

import pytest

from epd.api.web import PAGES, cluster_page
from epd.frontend import Readiness
from epd.fsm.tables import TABLES
from tests.api.fakes import FakeFrontend, serving
from tests.api.wire import Wire, exchange, request

INSTANCES = [
    {"instance": "e0", "roles": ["encode"], "state": "READY", "assigned": 2},
    {"instance": "<b>", "roles": ["prefill", "decode"], "state": "LOST", "assigned": 0},
]


async def page(path: str, readiness: Readiness, **headers: str) -> tuple[dict[str, str], str]:
    frontend = FakeFrontend()
    frontend.readiness = readiness
    async with serving(frontend) as (server, _, _):
        raw = request(method="GET", path=path, **headers)
        status, told, body = await exchange(server, raw)
    assert (status, told["content-type"]) == (200, "text/html; charset=utf-8")
    return told, body.decode()


async def test_the_first_page_says_what_runs_here():
    _, text = await page("/", Readiness(True, "", INSTANCES))
    assert "<h1>tiny</h1>" in text and "context of 200 tokens" in text
    assert 'class="ready">Ready.' in text
    assert "http://test/v1/chat/completions" in text
    assert "<tr><td>e0</td><td>encode</td><td>READY</td><td>2</td></tr>" in text
    assert "@" not in re.sub("@media", "", text), "every field was filled in"


async def test_what_is_not_ready_says_why_and_nothing_is_markup():
    _, text = await page("/", Readiness(False, "no <prefill>", INSTANCES))
    assert "Not ready: no &lt;prefill&gt;." in text
    assert "<td>&lt;b&gt;</td>" in text
    hostile = request(method="GET", path="/").replace(b"host: test", b'host: x"><script>')
    async with serving() as (server, _, _):
        status, _, body = await exchange(server, hostile)
    assert status == 400 or b"<script>" not in body


@pytest.mark.parametrize("path", ["/", "/docs", "/ui"])
async def test_nothing_is_loaded_from_elsewhere(path: str):
    headers, text = await page(path, Readiness(True, "", []))
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"""(src|href|fetch\()\s*=?\s*["'](https?:)?//""", text)
    assert "<style>:root" in text


def test_the_page_of_machines_runs_only_what_it_came_with() -> None:
    page, headers = cluster_page()
    policy = dict(headers)[b"content-security-policy"].decode()
    assert "unsafe" not in policy and "script-src 'sha256-" in policy
    assert len(gzip.compress(page)) < 100_000
    for line in (PAGES / "vendor" / "SHA256SUMS").read_text().splitlines():
        checksum, name = line.split()
        assert hashlib.sha256((PAGES / "vendor" / name).read_bytes()).hexdigest() == checksum


def test_the_page_counts_states_that_there_are() -> None:
    text = "".join(path.read_text() for path in PAGES.glob("ui*.js"))
    states = {f"{table.name} {state.name}" for table in TABLES for state in table.states}
    counted = set(re.findall('"([A-Z_]+ [A-Z_]+)"', text))
    assert len(counted) > 10 and counted <= states


async def test_a_page_can_be_asked_for_by_its_head():
    async with serving() as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(request(method="HEAD", path="/docs"))
        status, headers = await wire.head()
    assert status == 200 and int(headers["content-length"]) > 1000
