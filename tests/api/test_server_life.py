"""Refusals, failures, vanishing clients, and the end of the server itself, on the wire."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from epd.api.server import ApiServer
from epd.config import ConfigError, GatewayConfig
from epd.frontend import Leave, Refused
from tests.api.fakes import FakeFrontend, FakePreparer, failed, said, serving
from tests.api.wire import HI, Wire, exchange, is_well, request, until
from tests.patience import PATIENCE_S

# --- refusals, streams, disconnects ---------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
async def test_f39_refusals_carry_retry_after_and_cost_no_preparation(status: int):
    async with serving() as (server, frontend, preparer):
        frontend.refused[0] = Refused(status, "no place")
        found, headers, body = await exchange(server, request(HI))
        assert (found, headers["retry-after"]) == (status, "1")
        assert json.loads(body)["error"]["message"] == "no place"
        assert not preparer.entered.is_set()


async def test_f39_a_full_gateway_refuses_before_the_body_is_there():
    async with serving() as (server, frontend, _):
        frontend.refused[0], frontend.is_full = Refused(429, "no place", 7.0), True
        wire = await Wire.to(server)
        wire.writer.write(request(HI, content_length="4000000"))
        found, headers, body = await wire.answer()
        assert (found, headers["retry-after"]) == (429, "7")
        assert json.loads(body)["error"]["message"] == "no place"
        assert not frontend.streams


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
        assert {s.reasons[0] for s in frontend.streams} == {(Leave.GONE, "client disconnected")}


async def test_a_client_that_leaves_during_preparation_gives_its_place_back():
    async with serving() as (server, frontend, preparer):
        preparer.gate = asyncio.Event()
        wire = await Wire.to(server)
        wire.writer.write(request(HI))
        await until(preparer.entered.is_set)
        wire.drop()
        await until(frontend.streams[0].cancelled.is_set)
        preparer.gate.set()
        await until(lambda: not server._state.tasks)
        assert {why for why, _ in frontend.streams[0].reasons} == {Leave.GONE}
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


async def test_an_answer_that_is_complete_and_unread_is_dropped_too():
    """Less than the transport's high-water mark is left: nobody waits for it to be read."""
    script = [said("a" * 30_000, "stop")]
    async with serving(FakeFrontend(script), write_timeout_s=0.3) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.transport.pause_reading()
        for _ in range(400):  # until its answers fill the kernel's buffers
            wire.writer.write(request(HI))
            await asyncio.sleep(0.002)
            (connection,) = server._state.connections
            if connection.transport.get_write_buffer_size():
                break
        assert connection.transport.get_write_buffer_size()
        await until(lambda: not server._state.connections)


async def test_a_client_that_reads_slowly_is_not_dropped():
    much = said("a" * 200_000)
    script = [*[much] * 30, said("", "stop")]
    async with serving(FakeFrontend(script), write_timeout_s=0.5) as (server, _, _):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        sock.connect(("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
        Wire.opened.append(Wire(reader, writer))
        writer.write(request({**HI, "stream": True}, connection="close"))
        read = 0
        for _ in range(15):  # far longer than it may read nothing, and far less than all
            await asyncio.sleep(0.1)
            read += len(await reader.read(60_000))
        assert read < 1 << 20
        while more := await reader.read(1 << 20):
            read += len(more)
        assert read > 30 * 200_000


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
        busy = await Wire.to(server)
        busy.writer.write(request({**HI, "stream": True}))
        await busy.head()
        idle = await Wire.to(server)
        server.drain()
        for late in (idle, await Wire.to(server)):
            late.writer.write(request(HI))
            status, headers, body = await late.answer()
            assert (status, headers["retry-after"]) == (503, "1") and b"shutting down" in body
            assert await late.is_closed()
        for path, expected in (("/ready", 503), ("/health", 200), ("/v1/models", 200)):
            status, headers, body = await exchange(server, request(method="GET", path=path))
            assert (status, "retry-after" in headers) == (expected, expected == 503)
            assert (b'"shutting down"' in body) == (path == "/ready")
        gate.set()
        async with asyncio.timeout(PATIENCE_S):
            assert (await busy.reader.readuntil(b"[DONE]")).count(b"error") == 0
        busy.drop()
        await server.close()
        with pytest.raises(OSError):
            await Wire.to(server)


async def test_close_ends_open_requests_in_bounded_time():
    async with serving(FakeFrontend([said("h"), asyncio.Event()])) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(request({**HI, "stream": True}))
        await wire.head()
        async with asyncio.timeout(PATIENCE_S):
            await server.close()
            rest = await wire.reader.read()
        assert frontend.streams[0].reasons == [(Leave.FAULT, "the gateway is shutting down")]
        assert b'"error"' in rest and b"[DONE]" not in rest
        assert not server._state.tasks
        wire.drop()
