"""Keys and certificates are what their files are now, and wrong files change nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from epd.api.http import reloading
from epd.api.http.identity import digest_of
from epd.api.http.key_file import ApiKey, read_keys
from epd.api.server import ApiServer
from epd.config import AccessConfig, ConfigError, KeyLimits
from epd.frontend import GenerationUpdate
from tests.api.fakes import FakeFrontend, serving
from tests.api.http.certificates import make_certificate
from tests.api.wire import HI, Wire, exchange, refused, request, until
from tests.key_files import key, write_keys
from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "INTERVAL_S", 0.02)


@asynccontextmanager
async def guarded(
    tmp_path: Path, keys: Sequence[ApiKey], frontend: FakeFrontend | None = None, **more: Any
) -> AsyncIterator[tuple[ApiServer, FakeFrontend, str]]:
    path = str(tmp_path / "keys.jsonl")
    write_keys(path, keys)
    async with serving(frontend, access=AccessConfig(key_file=path, **more)) as (server, fake, _):
        yield server, fake, path


async def status_of(server: ApiServer, name: str) -> int:
    return (await exchange(server, request(HI, authorization=f"Bearer {name}")))[0]


async def comes_to(server: ApiServer, name: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await status_of(server, name) != status:
            await asyncio.sleep(0.01)


async def metrics(server: ApiServer) -> str:
    return (await exchange(server, request(method="GET", path="/metrics")))[2].decode()


async def test_a_removed_key_is_refused_and_open_streams_go_on(tmp_path: Path) -> None:
    gate = asyncio.Event()
    frontend = FakeFrontend([gate, GenerationUpdate((104,), (), "stop")], [gate])
    async with guarded(tmp_path, [key("ann"), key("bob")], frontend) as (server, _, path):
        wire = await Wire.to(server)
        wire.writer.write(request({**HI, "stream": True}, authorization="Bearer ann"))
        await until(lambda: frontend.generations)
        frontend.scripts[1:] = [[GenerationUpdate((104,), (), "stop")]]
        write_keys(path, [key("bob"), key("eve")])
        await comes_to(server, "ann", 401)
        assert [await status_of(server, name) for name in ("bob", "eve")] == [200, 200]
        gate.set()
        status, _, body = await wire.answer()
        assert status == 200 and body.endswith(b"data: [DONE]\n\n")


async def test_without_a_key_in_the_file_nobody_is_let_in(tmp_path: Path) -> None:
    async with guarded(tmp_path, []) as (server, _, path):
        assert await status_of(server, "ann") == 401
        write_keys(path, [key("ann")])
        await comes_to(server, "ann", 200)
        write_keys(path, [])
        await comes_to(server, "ann", 401)
        assert (await exchange(server, request(HI)))[0] == 401


async def test_a_key_expires_while_it_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = datetime.now(UTC) + timedelta(hours=1)
    async with guarded(tmp_path, [key("ann", expires_at=ends), key("bob")]) as (server, _, _):
        assert await status_of(server, "ann") == 200
        (line,) = [
            line
            for line in (await metrics(server)).splitlines()
            if line.startswith("epd_api_key_expiry_seconds")
        ]
        assert line.startswith('epd_api_key_expiry_seconds{key="ann"} 35')
        now_s = time.time()
        monkeypatch.setattr("epd.api.http.access.time.time", lambda: now_s + 3601)
        error = await refused(server, request(HI, authorization="Bearer ann"), 401)
        assert "has expired" in error["message"]
        assert await status_of(server, "bob") == 200


async def test_a_wrong_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with guarded(tmp_path, [key("ann")]) as (server, _, path):
        good = Path(path).read_text()
        Path(path).write_text(good + '{"name": "bob"}\n')
        await until(lambda: "line 2" in caplog.text)
        assert "keys.jsonl, line 2: " in caplog.text and "stays in use" in caplog.text
        assert [await status_of(server, name) for name in ("ann", "bob")] == [200, 401]
        await asyncio.sleep(0.1)
        assert caplog.text.count("line 2") == 1, "a file that stays wrong is one line of the log"
        assert 'epd_reloads_total{outcome="failed",what="keys"} 1.0' in await metrics(server)
        Path(path).unlink()
        await until(lambda: "cannot be read" in caplog.text)
        assert await status_of(server, "ann") == 200
        write_keys(path, [key("bob")])
        await comes_to(server, "bob", 200)
        assert await status_of(server, "ann") == 401


async def test_a_gateway_does_not_begin_with_a_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.touch(0o644)
    for words in ("chmod 600", "cannot be read"):
        with pytest.raises(ConfigError, match=words):
            async with serving(access=AccessConfig(key_file=str(path))):
                pass
        path.unlink(missing_ok=True)


async def test_files_are_read_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []

    def watched(path: str) -> dict[bytes, ApiKey]:
        readers.append(threading.current_thread())
        return read_keys(path)

    monkeypatch.setattr(reloading, "read_keys", watched)
    async with guarded(tmp_path, [key("ann")]) as (server, _, path):
        write_keys(path, [key("bob")])
        await comes_to(server, "bob", 200)
    assert len(readers) == 2 and threading.main_thread() not in readers


async def test_a_file_that_is_not_read_in_time_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "READ_TIMEOUT_S", 0.05)
    held, is_slow = threading.Event(), threading.Event()

    def slow(path: str) -> dict[bytes, ApiKey]:
        if is_slow.is_set():
            held.wait(PATIENCE_S)
        return read_keys(path)

    monkeypatch.setattr(reloading, "read_keys", slow)
    keys = [key("ann", operator=True)]
    async with guarded(tmp_path, keys) as (server, _, path):
        is_slow.set()
        write_keys(path, [*keys, key("bob")])
        raw = request(path="/reload", authorization="Bearer ann")
        assert "not read within 0.05 s" in (await refused(server, raw, 409))["message"]
        assert await status_of(server, "ann") == 200
        held.set()
        await comes_to(server, "bob", 200)


# --- operators ------------------------------------------------------------------------------------


async def test_only_an_operator_looks_at_the_cluster_or_changes_it(tmp_path: Path) -> None:
    keys = [key("ann"), key("root", operator=True)]
    async with guarded(tmp_path, keys, api_keys=("flag",)) as (server, _, path):
        asked = [("GET", "/state"), ("POST", "/reload"), ("POST", "/v1/load_lora_adapter")]
        for method, target in asked:
            raw = request(method=method, path=target, authorization="Bearer ann")
            assert (await refused(server, raw, 403))["code"] == "not_an_operator"
        models = request(method="GET", path="/v1/models", authorization="Bearer ann")
        assert (await exchange(server, models))[0] == 200
        for name in ("root", "flag"):
            raw = request(method="GET", path="/state", authorization=f"Bearer {name}")
            assert (await exchange(server, raw))[0] == 200
        reload = request(method="POST", path="/reload", authorization="Bearer root")
        status, _, body = await exchange(server, reload)
        assert (status, json.loads(body)) == (200, {"reloaded": ["keys"], "keys": 3})
        Path(path).write_text("{}\n")
        error = await refused(server, reload, 409)
        assert "line 1" in error["message"] and "stays in use" in error["message"]
        assert await status_of(server, "ann") == 200


async def test_without_such_files_nothing_is_reloaded() -> None:
    async with serving() as (server, _, _):
        await refused(server, request(path="/reload"), 404)


# --- tenants --------------------------------------------------------------------------------------


async def test_keys_of_one_tenant_share_and_those_of_another_do_not(tmp_path: Path) -> None:
    keys = [
        key("ann", tenant="acme"),
        key("bob", tenant="acme"),
        key("eve", tenant="else"),
        key("acme"),  # no tenant's name gives what a tenant has
    ]
    async with guarded(tmp_path, keys) as (server, frontend, path):
        for one in keys:
            assert await status_of(server, one.name) == 200
        named = request(HI, authorization="Bearer eve", x_epd_tenant="acme")
        assert (await exchange(server, named))[0] == 200
        ann, bob, *others = [one.scope for one in frontend.generations]
        assert ann == bob and len({ann, *others}) == 4
        write_keys(path, [ApiKey("ann2", digest_of(b"fresh").hex(), "acme")])
        await comes_to(server, "fresh", 200)
        assert frontend.generations[-1].scope == ann, "a key may be replaced"


async def test_limits_are_of_the_key(tmp_path: Path) -> None:
    one, two = (KeyLimits(requests_per_minute=n) for n in (1, 2))
    async with guarded(tmp_path, [key("ann", limits=one), key("bob")]) as (server, _, path):
        assert [await status_of(server, "ann") for _ in range(2)] == [200, 429]
        assert [await status_of(server, "bob") for _ in range(3)] == [200, 200, 200]
        write_keys(path, [key("ann", limits=two)])
        await comes_to(server, "bob", 401)
        headers = (await exchange(server, request(HI, authorization="Bearer ann")))[1]
        assert headers["x-ratelimit-limit-requests"] == "2"


@pytest.mark.parametrize("sent", [{"x_api_key": "a"}, {"authorization": "bearer a"}])
async def test_without_keys_each_that_is_sent_counts_for_itself(sent: dict[str, str]) -> None:
    async with serving(per_key=KeyLimits(requests_per_minute=1)) as (server, _, _):
        for headers, status in ((sent, 200), ({"authorization": "Bearer a"}, 429)):
            assert (await exchange(server, request(HI, **headers)))[0] == status
        for named in ({}, {"x_epd_tenant": "c"}):
            assert (await exchange(server, request(HI, **named)))[0] == 200


# --- certificates ---------------------------------------------------------------------------------


def client() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def connected(port: int, name: str | None = None) -> tuple[Wire, bytes]:
    """And the certificate that was shown; `name`: of the server, as the client asks for it."""
    streams = await asyncio.open_connection("127.0.0.1", port, ssl=client(), server_hostname=name)
    wire = Wire(*streams)
    Wire.opened.append(wire)
    return wire, streams[1].get_extra_info("ssl_object").getpeercert(binary_form=True)


async def test_new_connections_get_the_new_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_certificate(tmp_path, days=2)
    async with serving(access=config) as (server, _, _):
        old, first = await connected(server.port)
        old.writer.write(request(method="GET", path="/metrics"))
        shown = (await old.answer())[2].decode()
        (left,) = [line for line in shown.splitlines() if line.startswith("epd_certificate_exp")]
        assert 1.9 < float(left.split()[1]) / 86400 < 2.01
        make_certificate(tmp_path, days=30)
        async with asyncio.timeout(PATIENCE_S):
            while (await connected(server.port))[1] == first:
                await asyncio.sleep(0.02)
        fresh, second = await connected(server.port, "any.example")
        assert second != first
        for wire in (old, fresh):
            wire.writer.write(request(HI))
            assert (await wire.answer())[0] == 200
        caplog.clear()
        (tmp_path / "key.pem").write_text("no key")
        await until(lambda: "belong together" in caplog.text)
        wire, third = await connected(server.port)
        wire.writer.write(request(method="GET", path="/metrics"))
        shown = (await wire.answer())[2].decode()
        assert third == second
        assert 'epd_reloads_total{outcome="failed",what="certificate"}' in shown
