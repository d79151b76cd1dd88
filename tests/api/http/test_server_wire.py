"""The API on the wire: broken, slow and oversized requests; every status by its bytes."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.api.http import connection
from epd.api.http.connection import MAX_HEAD_NBYTES, MAX_PIPELINED
from epd.api.server import ApiServer
from epd.config import GatewayConfig
from epd.frontend import Metric, Readiness
from tests.api.fakes import HELLO, FakeFrontend, FakePreparer, said, serving
from tests.api.wire import CHAT, HI, Wire, exchange, is_well, refused, request, until

# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty; send"),
        (b'{"messages": [', "truncated"),
        (b'{"a": 1,}', "byte 8"),
        (b"{'a': 1}", "byte 1"),
        (b'{"a": "\xff\xfe"}', "UTF-8"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": ' + b"[" * 50_000, "nested"),
        (b'{"temperature": 1e999}', "out of range"),
    ],
)
async def test_broken_bodies_are_400(body: bytes, says: str):
    async with serving() as (server, frontend, _):
        error = await refused(server, request(body), 400)
        assert says in error["message"] and error["code"] == "invalid_json"
        assert not frontend.streams
        assert await is_well(server)


@pytest.mark.parametrize("sent", ["text/plain", "application/x-www-form-urlencoded", "image/png"])
async def test_other_content_types_are_415(sent: str):
    async with serving() as (server, _, _):
        error = await refused(server, request(HI, content_type=sent), 415)
        assert sent in error["message"] and "application/json" in error["message"]


@pytest.mark.parametrize("sent", ["application/json; charset=utf-8", "Application/JSON", ""])
async def test_json_by_any_spelling_is_taken(sent: str):
    async with serving() as (server, _, _):
        status, _, _ = await exchange(server, request(HI, content_type=sent))
        assert status == 200


async def test_compressed_bodies_are_415():
    async with serving() as (server, _, _):
        error = await refused(server, request(HI, content_encoding="gzip"), 415)
        assert "gzip" in error["message"]


async def test_an_announced_oversized_body_is_413_before_it_is_sent():
    async with serving(max_body_nbytes=1000) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(request(b"", content_length="1001"))
        status, headers, body = await wire.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert "1000 bytes" in json.loads(body)["error"]["message"]
        wire.drop()
        assert await is_well(server)


async def test_an_unannounced_oversized_body_is_413_and_the_answer_arrives():
    """The client sends on after the answer: a plain close would reset the answer away."""
    async with serving(max_body_nbytes=100_000) as (server, _, _):
        wire = await Wire.to(server)
        head = request(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
        wire.writer.write(head)
        for _ in range(512):  # 32 MiB
            wire.writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await wire.writer.drain()
        status, _, _ = await wire.answer()
        assert status == 413
        assert await wire.is_closed()
        assert await is_well(server)


async def test_a_body_that_stops_coming_is_408():
    async with serving(read_timeout_s=0.1) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request(b'{"a"', content_length="100"))
        status, _, body = await wire.answer()
        assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")
        assert await wire.is_closed()
        assert not frontend.streams


async def test_a_truncated_body_leaves_nothing_behind():
    async with serving() as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request(b'{"a"', content_length="100"))
        await until(lambda: server._state.tasks)
        wire.drop()
        await until(lambda: not server._state.tasks)
        assert not frontend.streams
        assert await is_well(server)


# --- heads ----------------------------------------------------------------------------------------


OFFERS = {
    "h2c": {
        "connection": "Upgrade, HTTP2-Settings",
        "upgrade": "h2c",
        "http2_settings": "AAMAAABk",
    },
    "websocket": {"connection": "keep-alive, upgrade", "upgrade": "websocket"},
    "TLS": {"connection": "UPGRADE", "upgrade": "TLS/1.0, h2c"},
}


@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
async def test_an_offered_protocol_is_ignored(offer: dict[str, str], is_chunked: bool):
    """Fault F74: the body is read, however the bytes are cut, and so is the next request."""
    raw = request(HI, **offer)
    if is_chunked:
        body = json.dumps(HI).encode()
        head = request(b"", transfer_encoding="chunked", **offer)
        raw = head.replace(b"content-length: 0\r\n", b"")
        raw += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with serving() as (server, _, _):
        for cut in [*range(1, len(raw), 7), raw.index(b"\r\n\r\n") + 4, len(raw)]:
            wire = await Wire.to(server)
            wire.writer.write(raw[:cut])
            if cut < len(raw):
                await asyncio.sleep(0)
                wire.writer.write(raw[cut:])
            wire.writer.write(raw)
            for _ in range(2):
                status, headers, told = await wire.answer()
                assert status == 200 and "upgrade" not in headers
                assert json.loads(told)["choices"][0]["message"]["content"] == "hello"
            wire.drop()


async def test_a_tunnel_is_refused():
    async with serving() as (server, _, _):
        status, _, _ = await exchange(server, b"CONNECT test:443 HTTP/1.1\r\nhost: test\r\n\r\n")
        assert status == 400
        assert await is_well(server)


@pytest.mark.parametrize(
    "raw",
    [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 64],
)
async def test_what_is_no_http_is_400(raw: bytes):
    async with serving() as (server, _, _):
        error = await refused(server, raw, 400)
        assert error["code"] == "invalid_http"
        assert await is_well(server)


async def test_a_huge_head_is_400():
    async with serving() as (server, _, _):
        raw = request(HI, x_padding="x" * MAX_HEAD_NBYTES)
        assert (await refused(server, raw, 400))["code"] == "invalid_http"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_http_1_0_has_no_chunks(is_stream: bool):
    async with serving(FakeFrontend([said("a"), said("bc", "stop")])) as (server, *_):
        wire = await Wire.to(server)
        raw = request(HI | {"stream": is_stream}, connection="keep-alive")
        wire.writer.write(raw.replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await wire.head()
        assert status == 200 and "transfer-encoding" not in headers
        assert ("content-length" in headers) != is_stream
        if is_stream:
            assert headers["connection"] == "close"
            lines = (await wire.reader.read()).splitlines()
            assert all(line.startswith(b"data: ") for line in filter(None, lines))
            assert lines[-2] == b"data: [DONE]"


@pytest.mark.parametrize("raw", [b"", b"POST /v1/chat", b"POST / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_stops_coming_is_dropped(raw: bytes):
    async with serving(read_timeout_s=0.1) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(raw)
        assert await wire.is_closed()


async def test_a_connection_serves_many_requests():
    async with serving() as (server, _, _):
        wire = await Wire.to(server)
        for raw, status in ((request(HI), 200), (request({"n": 0}), 400), (request(HI), 200)):
            wire.writer.write(raw)
            assert (await wire.answer())[0] == status
        wire.writer.write(request(HI) + request(HI))  # pipelined
        assert [(await wire.answer())[0] for _ in range(2)] == [200, 200]
        wire.drop()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_who_leaves_with_a_request_behind_an_open_one_cancels_it(is_stream: bool):
    """uvicorn notes the end of a connection at the request that was read last."""
    script = [said("a"), 60.0] if is_stream else [60.0]
    async with serving(FakeFrontend(script)) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request(HI | {"stream": is_stream}))
        await until(lambda: frontend.streams)
        wire.writer.write(request(method="GET", path="/version"))
        await until(lambda: any(c.pipeline for c in server._state.connections))
        wire.drop()
        await until(lambda: not server._state.tasks, timeout_s=5)
        assert frontend.streams[0].cancelled.is_set()


@pytest.mark.parametrize("behind", [b"\0garbage\r\n\r\n", request(method="GET", path="/ping") * 40])
async def test_nothing_is_written_into_an_answer_that_has_begun(behind: bytes):
    """Also if the request that was read last still waits for its turn."""
    async with serving(FakeFrontend([said("a"), 60.0])) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(request(HI | {"stream": True}))
        assert (await wire.head())[0] == 200
        wire.writer.write(request(method="GET", path="/version") + behind)
        async with asyncio.timeout(5):
            assert b"HTTP/1.1" not in await wire.reader.read()


async def test_a_head_that_is_not_read_is_not_late():
    """The server itself stops reading while a request waits for its turn."""
    may_end = asyncio.Event()
    async with serving(FakeFrontend([may_end, *HELLO]), read_timeout_s=0.1) as (
        server,
        frontend,
        _,
    ):
        wire = await Wire.to(server)
        wire.writer.write(request(HI))
        await until(lambda: frontend.streams)
        last = request(method="GET", path="/health")
        wire.writer.write(request(method="GET", path="/version") + last[:20])
        await until(lambda: any(c.pipeline for c in server._state.connections))
        wire.writer.write(last[20:])
        await asyncio.sleep(0.3)
        may_end.set()
        assert [(await wire.answer())[0] for _ in range(3)] == [200] * 3


async def test_connections_are_fewer_than_files(monkeypatch: pytest.MonkeyPatch):
    """Else neither a picture nor a grammar finds one to open (errors 500)."""
    monkeypatch.setattr(connection, "most_connections", lambda: 2)
    async with serving() as (server, _, _):
        held = [await Wire.to(server) for _ in range(2)]
        await until(lambda: len(server._state.connections) == 2)
        status, headers, body = await (await Wire.to(server)).answer()
        assert (status, headers["connection"]) == (503, "close") and b"connections" in body
        held[0].drop()
        await until(lambda: len(server._state.connections) == 1)
        assert await is_well(server)


# --- routes ---------------------------------------------------------------------------------------


async def test_unknown_paths_are_404():
    async with serving() as (server, _, _):
        for path in ("/v2/things", "/v1/models/"):
            error = await refused(server, request(method="GET", path=path), 404)
            assert f"no such path {path};" in error["message"] and CHAT in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("POST", "/metrics", "GET"), ("DELETE", "/v1/models/tiny", "GET")],
)
async def test_wrong_methods_are_405(method: str, path: str, allowed: str):
    async with serving() as (server, _, _):
        status, headers, body = await exchange(server, request(method=method, path=path))
        assert (status, headers["allow"]) == (405, allowed)
        assert json.loads(body)["error"]["code"] == "method_not_allowed"


async def test_health_when_ready():
    frontend = FakeFrontend()
    config = GatewayConfig(port=0, health_when_ready=True)
    server = ApiServer(frontend, config, FakePreparer())
    await server.start()
    health = request(method="GET", path="/health")
    assert (await exchange(server, health))[0] == 200
    frontend.readiness = Readiness(False, "no healthy instance has the role decode", [])
    status, _, body = await exchange(server, health)
    assert status == 503 and b"role decode" in body
    await server.close()


async def test_health_ready_version():
    async with serving() as (server, frontend, _):
        for path in ("/health", "/ready", "/version"):
            assert (await exchange(server, request(method="GET", path=path)))[0] == 200
        frontend.readiness = Readiness(False, "no prefill instance", [{"instance": "e0"}])
        status, _, body = await exchange(server, request(method="GET", path="/ready"))
        assert status == 503
        assert json.loads(body) == {
            "ready": False,
            "reason": "no prefill instance",
            "instances": [{"instance": "e0"}],
            "stages": {},
        }
        assert (await exchange(server, request(method="GET", path="/health")))[0] == 200


async def test_head_has_no_body():
    async with serving() as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(request(method="HEAD", path="/health"))
        assert (await wire.head())[0] == 200
        wire.writer.write(request(method="GET", path="/health"))
        assert (await wire.answer())[2] == b'{"status":"ok"}'
        wire.drop()


async def test_metrics_are_read_by_prometheus():
    async with serving() as (server, frontend, _):
        frontend.samples = [
            Metric("epd_requests_total", 3, (("outcome", "ok"),), "counter", "ended requests"),
            Metric("epd_open_requests", 0.25),
            Metric("epd_requests_total", 2**60, (("outcome", 'a "b"\\\n'),), "counter"),
            Metric("epd_limit", float("inf")),
        ]
        _, headers, body = await exchange(server, request(method="GET", path="/metrics"))
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(body.decode())}
    requests = families["epd_requests"]
    assert (requests.type, requests.documentation) == ("counter", "ended requests")
    assert {s.labels["outcome"]: s.value for s in requests.samples} == {"ok": 3, 'a "b"\\\n': 2**60}
    assert families["epd_open_requests"].samples[0].value == 0.25
    assert families["epd_limit"].samples[0].value == float("inf")


# --- the client's name for its request ------------------------------------------------------------


async def test_a_client_s_request_id_comes_back_and_is_in_the_log(caplog: pytest.LogCaptureFixture):
    """On answers, streams and errors; two requests of one name are two requests."""
    caplog.set_level("INFO", logger="epd.api")
    name = "trace/7f:3a"
    raws = [
        request(HI, x_request_id=name),
        request({**HI, "stream": True}, x_request_id=name),
        request({**HI, "n": 0}, x_request_id=name),
        request(method="GET", path="/nowhere", x_request_id=name),
    ]
    async with serving() as (server, frontend, _):
        answers = [await exchange(server, raw) for raw in raws]
    assert [status for status, _, _ in answers] == [200, 200, 400, 404]
    assert {headers["x-request-id"] for _, headers, _ in answers} == {name}
    assert json.loads(answers[0][2])["id"] == "chatcmpl-gw-1-0"
    assert [stream.request_id for stream in frontend.streams] == ["gw-1-0", "gw-1-1"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"POST {CHAT} ({name}) is request {own}" for own in ("gw-1-0", "gw-1-1")]


@pytest.mark.parametrize("name", ["a b", "x" * 129, "caf\u00e9", "a\x01b"])
async def test_a_request_id_that_is_not_fit_for_a_log_is_refused(name: str):
    async with serving() as (server, frontend, _):
        raw = request(HI, x_request_id="@").replace(b"@", name.encode("latin-1"))
        error = await refused(server, raw, 400)
        assert error["param"] in ("X-Request-Id", None)  # None: the parser was faster
        assert not frontend.streams
        assert await is_well(server)


async def test_requests_that_do_not_wait_for_answers_are_few() -> None:
    """Thousands of them held the loop for half a second."""
    raw = request(method="GET", path="/health")
    async with serving() as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(raw * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            assert (await wire.answer())[0] == 200
        wire.writer.write(raw * 10_000)
        statuses = []
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                statuses.append((await wire.answer())[0])
        assert len(statuses) <= MAX_PIPELINED + 1
        assert await is_well(server)
