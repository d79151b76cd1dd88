"""Who may ask: keys, origins, TLS; and under which names the model is served."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from epd.api.http.access import warning
from epd.api.http.reloading import tls_context
from epd.api.server import ApiServer
from epd.config import AccessConfig, ConfigError, GatewayConfig
from epd.frontend import NO_ADAPTER, Adapter
from tests.api.fakes import FakeFrontend, FakePreparer, serving
from tests.api.http.certificates import make_certificate
from tests.api.wire import CHAT, HI, exchange, refused, request
from tests.patience import PATIENCE_S

KEYS = AccessConfig(api_keys=("first-key", "second-key"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "Bearer second-key"}, 200),
        ({"authorization": "bearer first-key"}, 200),
        ({"x_api_key": "second-key"}, 200),
        ({}, 401),
        ({"authorization": "Bearer first-ke"}, 401),
        ({"authorization": "Bearer first-key2"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "first-key"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"x_api_key": ""}, 401),
    ],
)
async def test_a_key_is_needed(headers: dict[str, str], status: int) -> None:
    async with serving(access=KEYS) as (server, frontend, _):
        found, sent, body = await exchange(server, request(HI, **headers))
    assert found == status
    assert ("www-authenticate" in sent) == (status == 401)
    assert bool(frontend.streams) == (status == 200)
    if status == 401:
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert b"first-key" not in body


async def test_what_needs_no_key() -> None:
    async with serving(access=KEYS) as (server, _, _):
        pages = ("/", "/docs", "/openapi.json", "/ui")
        for path in ("/health", "/ready", "/metrics", "/version", "/ping", *pages):
            assert (await exchange(server, request(method="GET", path=path)))[0] == 200
        page = (await exchange(server, request(method="GET", path="/")))[2]
        assert b"Authorization: Bearer KEY" in page and b"first-key" not in page
        for path in (CHAT, "/tokenize", "/v1/models", "/v1/models/tiny", "/unknown", "//health"):
            await refused(server, request(method="GET", path=path), 401)
        anthropic = await exchange(server, request(HI, path="/v1/messages"))
        assert json.loads(anthropic[2])["type"] == "error"


async def test_without_keys_nobody_is_asked() -> None:
    async with serving() as (server, _, _):
        assert (await exchange(server, request(HI, authorization="Bearer any")))[0] == 200


# --- browsers -------------------------------------------------------------------------------------

PAGE = "https://chat.example"
PAGES = AccessConfig(allowed_origins=(PAGE, "http://localhost:3000"), api_keys=("key",))


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        (PAGE, (), 403),
        ("null", (), 403),
        ("http://test:8000", (), 403),
        (PAGE, (PAGE,), 200),
        ("http://test", (), 200),  # its own page
        ("", (), 200),
    ],
)
async def test_a_page_of_another_origin_changes_nothing(
    origin: str, allowed: tuple[str, ...], status: int
) -> None:
    """Its browser asks for no leave where the body has no type, or text/plain."""
    sent = {"origin": origin, "content_type": ""} if origin else {}
    raw = request({"instance": "p0", "force": True}, path="/drain", **sent)
    access = AccessConfig(allowed_origins=allowed)
    async with serving(access=access) as (server, frontend, _):
        found, _, body = await exchange(server, raw)
        assert (found, bool(frontend.drained)) == (status, status == 200)
        assert (b"foreign_origin" in body) == (status == 403)


async def test_no_page_may_read_by_default() -> None:
    async with serving() as (server, _, _):
        headers = (await exchange(server, request(HI, origin=PAGE)))[1]
        assert not [name for name in headers if name.startswith("access-control")]
        status, headers, _ = await exchange(
            server, request(method="OPTIONS", origin=PAGE, access_control_request_method="POST")
        )
        assert (status, headers["allow"]) == (200, "POST, OPTIONS")
        assert "access-control-allow-origin" not in headers


async def test_a_page_asks_before_it_asks() -> None:
    async with serving(access=PAGES) as (server, _, _):
        raw = request(
            method="OPTIONS",
            origin=PAGE,
            access_control_request_method="POST",
            access_control_request_headers="authorization, content-type",
        )
        status, headers, body = await exchange(server, raw)
        assert (status, body) == (200, b"")
        assert headers["access-control-allow-origin"] == PAGE
        assert headers["access-control-allow-methods"] == "GET, POST"
        assert headers["access-control-allow-headers"] == "authorization, content-type"
        assert "access-control-allow-credentials" not in headers
        assert "connection" not in headers


@pytest.mark.parametrize("body", [HI, {**HI, "stream": True}, {"messages": []}])
async def test_a_page_reads_answers_and_errors(body: dict[str, object]) -> None:
    async with serving(access=PAGES) as (server, _, _):
        raw = request(body, origin=PAGE, authorization="Bearer key")
        headers = (await exchange(server, raw))[1]
        assert headers["access-control-allow-origin"] == PAGE
        assert headers["vary"] == "Origin"
        assert "x-request-id" in headers["access-control-expose-headers"]
        assert (await exchange(server, request(body, origin=PAGE)))[0] == 401


@pytest.mark.parametrize("origin", ["https://evil.example", "null", PAGE + ":444", "https://chat"])
async def test_other_pages_may_not(origin: str) -> None:
    async with serving(access=PAGES) as (server, _, _):
        raw = request(HI, origin=origin, authorization="Bearer key")
        headers = (await exchange(server, raw))[1]
        assert "access-control-allow-origin" not in headers
    async with serving(access=AccessConfig(allowed_origins=("*",))) as (server, _, _):
        headers = (await exchange(server, request(HI, origin=origin)))[1]
        assert headers["access-control-allow-origin"] == origin


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of 127.0.0.1 that signs itself, beside its key."""
    return Path(make_certificate(tmp_path).ssl_certfile)


async def health(port: int, context: ssl.SSLContext) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(request(method="GET", path="/health", connection="close"))
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_tls(certificate: Path) -> None:
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(certificate.with_name("key.pem"))}
    context = ssl.create_default_context(cafile=str(certificate))
    async with serving(access=AccessConfig(**files)) as (server, _, _):
        assert b"200 OK" in await health(server.port, context)
        with pytest.raises(ssl.SSLCertVerificationError):
            await health(server.port, ssl.create_default_context())
    both = AccessConfig(**files, ssl_ca_certs=str(certificate))
    async with serving(access=both) as (server, _, _):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            assert not await health(server.port, context)
            raise ConnectionError
        context.load_cert_chain(certificate, files["ssl_keyfile"])
        assert b"200 OK" in await health(server.port, context)


def test_tls_files_that_do_not_fit(certificate: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("no key")
    for config, words in (
        (AccessConfig(ssl_keyfile=str(certificate)), "--ssl-certfile"),
        (AccessConfig(ssl_certfile=str(certificate)), "belong together"),
        (AccessConfig(ssl_certfile=str(tmp_path / "none.pem")), "none.pem"),
        (AccessConfig(ssl_certfile=str(certificate), ssl_keyfile=str(other)), "other.pem"),
    ):
        with pytest.raises(ConfigError, match=words):
            tls_context(config)
    assert tls_context(AccessConfig()) is None


# --- names ----------------------------------------------------------------------------------------


async def test_the_model_has_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePreparer, "served_names", ("tiny", "gpt-4o"))
    async with serving() as (server, _, _):
        for name in ("tiny", "gpt-4o"):
            status, _, body = await exchange(server, request({**HI, "model": name}))
            assert (status, json.loads(body)["model"]) == (200, "tiny")
            raw = request(method="GET", path=f"/v1/models/{name}")
            assert json.loads((await exchange(server, raw))[2])["id"] == name
        listed = json.loads((await exchange(server, request(method="GET", path="/v1/models")))[2])
        assert [model["id"] for model in listed["data"]] == ["tiny", "gpt-4o"]
        error = await refused(server, request({**HI, "model": "other"}), 404)
        assert "'tiny' or 'gpt-4o'" in error["message"]


async def test_adapters_have_names_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by name, and named by the answer; what is asked of the model itself has none."""
    pirate = Adapter("pirate", "d" * 32)
    monkeypatch.setattr(FakePreparer, "adapters", {"pirate": pirate})
    async with serving() as (server, frontend, _):
        for name in ("tiny", "pirate"):
            status, _, body = await exchange(server, request({**HI, "model": name}))
            assert (status, json.loads(body)["model"]) == (200, name)
        assert [one.adapter for one in frontend.generations] == [NO_ADAPTER, pirate]
        listed = json.loads((await exchange(server, request(method="GET", path="/v1/models")))[2])
        assert [(m["id"], m.get("parent")) for m in listed["data"]] == [
            ("tiny", None),
            ("pirate", "tiny"),
        ]
        raw = request(method="GET", path="/v1/models/pirate")
        assert json.loads((await exchange(server, raw))[2])["root"] == pirate.digest
        error = await refused(server, request({**HI, "model": "other"}), 404)
        assert "'tiny' or 'pirate'" in error["message"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "server.example"])
def test_who_listens_beyond_this_host_without_a_key_is_warned(host: str) -> None:
    told = warning(host, AccessConfig())
    assert host in told and "--api-key" in told
    assert not warning(host, KEYS)
    assert not warning(host, AccessConfig(ssl_certfile="c.pem", ssl_ca_certs="ca.pem"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_who_is_alone_is_not_warned(host: str) -> None:
    assert not warning(host, AccessConfig())


@pytest.mark.parametrize(("access", "is_told"), [(AccessConfig(), True), (KEYS, False)])
async def test_the_warning_is_in_the_log(
    access: AccessConfig, caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    config = GatewayConfig(host="0.0.0.0", port=0, access=access)
    server = ApiServer(FakeFrontend(), config, FakePreparer())
    await server.start()
    await server.close()
    assert ("no API key is set" in caplog.text) == is_told
