"""The API on the wire: broken, slow, oversized and vanishing clients; every status by its bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from epd.api.connection import MAX_HEAD_NBYTES
from epd.api.port import Metric, Readiness, Refused
from epd.api.server import ApiServer
from epd.config import ConfigError, GatewayConfig
from tests.api.fakes import FakeFrontend, FakePreparer, failed, said, serving

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def request(
    body: bytes | dict[str, Any] = b"", *, method: str = "POST", path: str = CHAT, **headers: str
) -> bytes:
    """A request's bytes; header names with _ for -."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    fields = {"content_type": "application/json", "content_length": str(len(data)), **headers}
    lines = [f"{method} {path} HTTP/1.1", "host: test"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Wire:
    """One connection; dropped at the end of its test if not before."""

    opened: ClassVar[list[Wire]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, server: ApiServer) -> Wire:
        wire = cls(*await asyncio.open_connection("127.0.0.1", server.port))
        cls.opened.append(wire)
        return wire

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(10):
            raw = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = raw.rstrip().split("\r\n")
        return int(status.split()[1]), dict(line.split(": ", 1) for line in lines)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        async with asyncio.timeout(10):
            if "content-length" in headers:
                return (
                    status,
                    headers,
                    await self.reader.readexactly(int(headers["content-length"])),
                )
            body = b""
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
        return status, headers, body

    async def is_closed(self) -> bool:
        async with asyncio.timeout(10):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    def drop(self) -> None:
        self.writer.transport.abort()


@pytest.fixture(autouse=True)
async def drop_wires() -> AsyncIterator[None]:
    yield
    while Wire.opened:
        wire = Wire.opened.pop()
        wire.drop()
        with suppress(OSError):
            await wire.writer.wait_closed()


async def exchange(server: ApiServer, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    wire = await Wire.to(server)
    wire.writer.write(raw)
    return await wire.answer()


async def refused(server: ApiServer, raw: bytes, status: int) -> dict[str, Any]:
    """The error object of an answer that must have this status, in OpenAI's format."""
    found, headers, body = await exchange(server, raw)
    assert found == status, body
    assert headers["content-type"] == "application/json"
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def is_well(server: ApiServer) -> bool:
    """A healthy neighbour gets its answer."""
    status, _, body = await exchange(server, request(HI))
    return status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "hello"


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated"),
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
        for _ in range(64):
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


# --- routes ---------------------------------------------------------------------------------------


async def test_unknown_paths_are_404():
    async with serving() as (server, _, _):
        error = await refused(server, request(method="GET", path="/v2/things"), 404)
        assert "/v2/things" in error["message"] and CHAT in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", CHAT, "POST"), ("POST", "/metrics", "GET"), ("DELETE", "/v1/models/tiny", "GET")],
)
async def test_wrong_methods_are_405(method: str, path: str, allowed: str):
    async with serving() as (server, _, _):
        status, headers, body = await exchange(server, request(method=method, path=path))
        assert (status, headers["allow"]) == (405, allowed)
        assert json.loads(body)["error"]["code"] == "method_not_allowed"


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


# --- refusals, streams, disconnects ---------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_f39_refusals_carry_retry_after_and_cost_no_preparation(status: int):
    async with serving() as (server, frontend, preparer):
        frontend.refused[0] = Refused(status, 3, "no place")
        found, headers, body = await exchange(server, request(HI))
        assert (found, headers["retry-after"]) == (status, "3")
        assert json.loads(body)["error"]["message"] == "no place"
        assert not preparer.entered.is_set()


async def test_a_stream_on_the_wire():
    async with serving(FakeFrontend([said("h"), said("i"), 0.02, said("!", "stop")])) as (
        server,
        _,
        _,
    ):
        _, headers, body = await exchange(server, request({**HI, "stream": True}))
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    values = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    texts = [value["choices"][0]["delta"]["content"] for value in values]
    assert texts == ["", "hi", "!"]  # what came in one turn of the loop leaves in one chunk


async def test_f34_an_error_after_the_headers_is_an_event_and_there_is_no_done():
    script = [said("h"), 0.02, failed("lost", 503, "instance d0 was lost")]
    async with serving(FakeFrontend(script)) as (server, _, _):
        status, _, body = await exchange(server, request({**HI, "stream": True}))
    assert status == 200
    assert b"[DONE]" not in body
    last = json.loads(body.decode().rstrip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == "instance d0 was lost"
    assert last["error"]["code"] == "lost"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_f43_a_client_that_leaves_cancels_all_its_choices(n: int, *, stream: bool):
    async with serving(FakeFrontend([said("h"), asyncio.Event()])) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request({**HI, "stream": stream, "n": n}))
        if stream:
            await wire.head()
        else:
            await until(lambda: len(frontend.generations) == n)
        wire.drop()
        await until(lambda: all(s.cancelled.is_set() for s in frontend.streams))
        await until(lambda: not server._state.tasks)
        assert len(frontend.streams) == n
        assert {s.reasons[0] for s in frontend.streams} == {"client disconnected"}


async def test_a_client_that_leaves_during_preparation_gives_its_place_back():
    async with serving() as (server, frontend, preparer):
        preparer.gate = asyncio.Event()
        wire = await Wire.to(server)
        wire.writer.write(request(HI))
        await until(preparer.entered.is_set)
        wire.drop()
        await until(frontend.streams[0].cancelled.is_set)
        preparer.gate.set()
        await until(lambda: frontend.given_back)
        assert not frontend.generations
        assert await is_well(server)


async def test_a_client_that_does_not_read_is_dropped():
    much = said("\x01" * 100_000)  # six bytes each in JSON
    script = [much, 0.01, *[much] * 30, asyncio.Event()]
    async with serving(FakeFrontend(script), write_timeout_s=0.2) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request({**HI, "stream": True}))
        await until(lambda: frontend.streams and frontend.streams[0].cancelled.is_set())
        wire.drop()


# --- life of the server ---------------------------------------------------------------------------


async def test_a_port_in_use_is_one_sentence():
    async with serving() as (server, _, _):
        second = ApiServer(FakeFrontend(), GatewayConfig(port=server.port), FakePreparer())
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{server.port} is in use; .* port"):
            await second.start()
        await second.close()


async def test_draining_refuses_new_and_finishes_open_requests():
    gate = asyncio.Event()
    async with serving(FakeFrontend([said("h"), gate, said("i", "stop")])) as (server, _, _):
        busy, idle = await Wire.to(server), await Wire.to(server)
        busy.writer.write(request({**HI, "stream": True}))
        await busy.head()
        server.drain()
        idle.writer.write(request(HI))
        status, headers, _ = await idle.answer()
        assert (status, "retry-after" in headers) == (503, True)
        with pytest.raises(OSError):
            await Wire.to(server)
        gate.set()
        async with asyncio.timeout(5):
            assert (await busy.reader.readuntil(b"[DONE]")).count(b"error") == 0
        busy.drop()
        idle.drop()


async def test_close_ends_open_requests_in_bounded_time():
    async with serving(FakeFrontend([said("h"), asyncio.Event()])) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request({**HI, "stream": True}))
        await wire.head()
        async with asyncio.timeout(5):
            await server.close()
            rest = await wire.reader.read()
        assert frontend.streams[0].reasons == ["the gateway is shutting down"]
        assert b'"error"' in rest and b"[DONE]" not in rest
        assert not server._state.tasks
        wire.drop()
