"""Requests with an Idempotency-Key, on the wire: they run once, and each answer is whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from epd.config import AccessConfig, IdempotencyConfig
from epd.frontend import Leave, Refused
from tests.api.fakes import FakeFrontend, failed, said, serving
from tests.api.wire import HI, Wire, exchange, refused, request, until

STREAM = {**HI, "stream": True}
MESSAGES = {**HI, "model": "tiny", "max_tokens": 9, "stream": True}
RESPONSES = {"model": "tiny", "input": "hi", "stream": True}
PATHS = [
    ("/v1/chat/completions", HI),
    ("/v1/chat/completions", STREAM),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
    ("/v1/messages", MESSAGES),
    ("/v1/responses", RESPONSES),
]


def keyed(body: dict[str, Any], key: str = "k", **more: str) -> bytes:
    return request(body, idempotency_key=key, **more)


def halves() -> tuple[FakeFrontend, asyncio.Event]:
    """Each answer stops in the middle until the event."""
    gate = asyncio.Event()
    return FakeFrontend([said("he"), gate, said("llo"), said("", "stop")]), gate


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_all_get_the_whole_answer_while_it_runs_and_behind_it(
    path: str, body: dict[str, Any]
) -> None:
    frontend, gate = halves()
    async with serving(frontend) as (server, _, _):
        raw = keyed(body, path=path)
        first, second = await Wire.to(server), await Wire.to(server)
        first.writer.write(raw)
        await until(lambda: frontend.generations)
        second.writer.write(raw)
        await until(lambda: len(server._state.tasks) == 3)
        gate.set()
        status, headers, joined = await second.answer()
        assert (status, headers["idempotent-replayed"]) == (200, "true")
        assert (await first.answer())[2] == joined
        again = await exchange(server, raw)
        assert (again[0], again[2]) == (200, joined) and b"llo" in joined
        assert again[1]["x-request-id"] == headers["x-request-id"]
        assert "idempotent-replayed" not in (await exchange(server, request(body, path=path)))[1]
    assert len(frontend.generations) == 2


async def test_the_first_one_reads_the_same_bytes_and_is_counted_once() -> None:
    async with serving() as (server, frontend, _):
        first = await exchange(server, keyed(STREAM))
        again = await exchange(server, keyed(STREAM, x_request_id="mine"))
        assert first[2] == again[2] and again[1]["x-request-id"] == "mine"
        assert "idempotent-replayed" not in first[1]
        told = (await exchange(server, request(method="GET", path="/metrics")))[2].decode()
        (line,) = [x for x in told.split("\n") if "responses_total" in x and "chat" in x]
        assert line.endswith((" 2.0", " 2"))
    assert len(frontend.generations) == 1


async def test_it_outlives_its_connection_for_a_while() -> None:
    frontend, gate = halves()
    async with serving(frontend, idempotency=IdempotencyConfig(linger_s=0.2)) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(keyed(STREAM))
        await wire.head()
        wire.drop()
        await until(lambda: not server._state.connections)
        retry = await Wire.to(server)
        retry.writer.write(keyed(STREAM))
        await asyncio.sleep(0.3)  # longer than it would linger
        assert not frontend.streams[0].cancelled.is_set()
        gate.set()
        assert b"[DONE]" in (await retry.answer())[2]
        frontend.scripts = [[said("he"), asyncio.Event()]]
        wire = await Wire.to(server)
        wire.writer.write(keyed(STREAM, "another"))
        await wire.head()
        wire.drop()
        await until(frontend.streams[1].cancelled.is_set)
        assert frontend.streams[1].reasons == [(Leave.GONE, "client disconnected")]
        await until(lambda: not server._state.tasks)
        frontend.scripts = [[said("hello", "stop")]]
        assert b"hello" in (await exchange(server, keyed(STREAM, "another")))[2]


async def other_tenants_run_their_own(**headers: Any) -> list[bytes]:
    """Answers to one key and body, of these callers one after another."""
    scripts = [[said(text, "stop")] for text in ("one", "two", "three")]
    access = AccessConfig(api_keys=("a", "b"))
    async with serving(FakeFrontend(*scripts), access=access) as (server, _, _):
        callers = [
            {"authorization": "Bearer a"},
            {"authorization": "Bearer b"},
            {"authorization": "Bearer a", "x_epd_tenant": "t"},
            {"x_api_key": "a"},
        ]
        return [(await exchange(server, keyed(HI, **caller)))[2] for caller in callers]


async def test_no_answer_crosses_api_keys_or_tenants() -> None:
    bodies = await other_tenants_run_their_own()
    texts = [json.loads(body)["choices"][0]["message"]["content"] for body in bodies]
    assert texts == ["one", "two", "three", "one"]


async def test_an_answer_across_tenants_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.api.http.idempotency.tenant_of", lambda *_: "")
    with pytest.raises(AssertionError):
        await test_no_answer_crosses_api_keys_or_tenants()


@pytest.mark.parametrize("anthropic", [False, True])
async def test_another_body_under_the_key_is_refused(*, anthropic: bool) -> None:
    path = "/v1/messages" if anthropic else "/v1/chat/completions"
    async with serving() as (server, frontend, _):
        await exchange(server, keyed(MESSAGES, path=path))
        status, _, body = await exchange(server, keyed({**MESSAGES, "max_tokens": 8}, path=path))
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (422, "idempotency_key_reused")
        assert error["type"] == "invalid_request_error"
        other = await refused(server, keyed({"prompt": "hi"}, path="/v1/completions"), 422)
        assert other["param"] == "Idempotency-Key"
    assert len(frontend.generations) == 1


@pytest.mark.parametrize("key", ["", "with space", "a" * 256])
async def test_a_key_has_a_form(key: str) -> None:
    async with serving() as (server, _, _):
        assert (await refused(server, keyed(HI, key), 400))["param"] == "Idempotency-Key"


async def test_what_failed_is_not_kept() -> None:
    good = [said("good", "stop")]
    scripts = [[failed("lost", 503)], [said("h"), 0.02, failed("lost", 503)], good]
    async with serving(FakeFrontend(*scripts)) as (server, frontend, _):
        frontend.refused[0] = Refused(429, "no place")
        assert (await exchange(server, keyed(STREAM)))[0] == 429
        frontend.refused.clear()
        assert (await exchange(server, keyed(STREAM)))[0] == 503
        assert b"[DONE]" not in (await exchange(server, keyed(STREAM)))[2]
        assert b"good" in (await exchange(server, keyed(STREAM)))[2]
        assert b"good" in (await exchange(server, keyed(STREAM)))[2]
    assert len(frontend.generations) == 3


async def test_who_waits_gets_the_failure_too() -> None:
    gate = asyncio.Event()
    async with serving(FakeFrontend([gate, failed("lost", 503)])) as (server, frontend, _):
        wires = [await Wire.to(server) for _ in range(2)]
        for wire in wires:
            wire.writer.write(keyed(HI))
        await until(lambda: len(server._state.tasks) == 3 and frontend.generations)
        gate.set()
        assert [(await wire.answer())[0] for wire in wires] == [503, 503]


async def num_runs(config: IdempotencyConfig, *keys: str, pause_s: float = 0.0) -> int:
    script = [said("x" * 2000), 0.01, said("y" * 2000, "stop")]
    async with serving(FakeFrontend(script), idempotency=config) as (server, frontend, _):
        for key in keys:
            status, _, body = await exchange(server, keyed(STREAM, key))
            assert status == 200 and b"yyy" in body and b"[DONE]" in body
            await asyncio.sleep(pause_s)
        return len(frontend.generations)


async def test_answers_are_kept_within_bounds_of_number_bytes_and_time() -> None:
    roomy = IdempotencyConfig()
    assert await num_runs(roomy, "a", "b", "a", "b") == 2
    assert await num_runs(IdempotencyConfig(max_answers=1), "a", "b", "b", "a") == 3
    assert await num_runs(IdempotencyConfig(max_nbytes=15_000), "a", "b", "a", "c", "b", "a") == 4
    assert await num_runs(IdempotencyConfig(max_nbytes=3000), "a", "a") == 2
    assert await num_runs(IdempotencyConfig(keep_s=0.05), "a", "a", pause_s=0.1) == 2


async def test_more_open_ones_than_may_be_kept_are_refused() -> None:
    frontend, gate = halves()
    config = IdempotencyConfig(max_answers=1)
    async with serving(frontend, idempotency=config) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.write(keyed(STREAM))
        await wire.head()
        assert (await refused(server, keyed(STREAM, "b"), 429))["code"] == "overloaded"
        gate.set()


async def test_a_body_that_is_too_large_or_breaks_off_leaves_nothing() -> None:
    async with serving(max_body_nbytes=1000) as (server, frontend, _):
        await refused(server, keyed({"messages": "x" * 2000}), 413)
        wire = await Wire.to(server)
        wire.writer.write(keyed(HI)[:-3])
        await until(lambda: len(server._state.tasks) == 1)
        wire.drop()
        await until(lambda: not server._state.tasks)
        assert server._intake is not None and server._intake.nbytes == 0
        assert (await exchange(server, keyed(HI)))[0] == 200
        await until(lambda: not server._state.tasks)
        assert server._intake.nbytes == 0
    assert len(frontend.generations) == 1


async def test_the_servers_end_ends_what_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd.api.server.GRACE_S", 0.05)
    async with serving(FakeFrontend([said("h"), asyncio.Event()])) as (server, frontend, _):
        wire = await Wire.to(server)
        wire.writer.write(keyed(STREAM))
        await wire.head()
        wire.drop()
        await until(lambda: not server._state.connections)
    assert frontend.streams[0].cancelled.is_set() and not server._state.tasks


async def test_an_answer_that_does_not_fit_waits_for_its_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("epd.api.http.recording.MAX_UNREAD", 2)
    much = said("\x01" * 100_000)  # six bytes each in JSON
    script = [step for _ in range(30) for step in (much, 0.0)]
    frontend = FakeFrontend([*script, asyncio.Event()])
    small = IdempotencyConfig(max_nbytes=5000)
    async with serving(frontend, idempotency=small) as (server, _, _):
        wire = await Wire.to(server)
        wire.writer.transport.pause_reading()
        wire.writer.write(keyed(STREAM))
        await until(lambda: frontend.streams and frontend.streams[0].updates.qsize() > 5)
        wire.drop()
        await until(frontend.streams[0].cancelled.is_set)
        await until(lambda: not server._state.tasks)
