"""Traces as a collector sees them; and that a collector which is not there disturbs nobody."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from epd.api.watching import otel
from epd.api.watching.otel import build_tracer
from epd.api.watching.otel_spans import spans_of
from epd.api.watching.tracing import Record, Tracer
from epd.cli.configure.settings import build_settings, gateway_config
from epd.config import ConfigError, Settings
from epd.frontend import TimelineEntry
from tests.api.fakes import FakeFrontend, failed, said, serving
from tests.api.test_server import HI, openai_client
from tests.api.watching.collector import collecting, values
from tests.patience import PATIENCE_S

QUICK_S = 8.0  # on a busy machine; whoever waited for the exporter would wait for 10 s
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def no_thread_outlives_its_tracer() -> Iterator[None]:
    """One that does would go on drawing random back-off times, in the middle of other tests."""
    before = set(threading.enumerate())
    yield
    give_up_s = time.monotonic() + PATIENCE_S
    for thread in set(threading.enumerate()) - before:
        if thread.name.lower().startswith(("epd-otel", "otel")):
            thread.join(max(0.0, give_up_s - time.monotonic()))
            assert not thread.is_alive(), thread


@asynccontextmanager
async def traced(url: str, *scripts: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """A server that exports there; closed with all that it had to export."""
    frontend = FakeFrontend(*scripts)
    async with serving(frontend, url) as (server, *_), openai_client(server) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.with_raw_response.create(
        model="tiny", messages=HI, **fields
    )


async def test_a_request_becomes_spans_of_its_clients_trace() -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with collecting() as collector, traced(collector.url) as client:
        raw = await ask(client, extra_headers=headers, max_tokens=9, temperature=0.5)
    root = collector.root
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert raw.headers["traceresponse"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    assert root.name == "chat tiny"
    assert root.status.code == root.status.STATUS_CODE_UNSET
    found = values(root.attributes)
    assert found.pop("gen_ai.latency.e2e") > found.pop("gen_ai.latency.time_to_first_token") > 0
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "gw-1-0",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["stop"],
        "http.response.status_code": 200,
    }
    assert wanted.items() <= found.items()
    (prepare,), (chunk,) = collector.named("prepare"), collector.named("prefill chunk")
    assert {prepare.trace_id, chunk.trace_id} == {root.trace_id}
    assert prepare.parent_span_id == root.span_id
    assert chunk.end_time_unix_nano - chunk.start_time_unix_nano == pytest.approx(2.5e6, rel=1e-3)
    assert collector.resource["service.name"] == "epd"


async def test_what_is_not_sampled_is_not_exported() -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    async with collecting() as collector, traced(collector.url) as client:
        raw = await ask(client, extra_headers=headers)
        await ask(client, extra_headers={"traceparent": "nonsense"})
    assert "traceresponse" not in raw.headers
    assert collector.root.trace_id.hex() != TRACE


async def test_errors_are_the_spans_status() -> None:
    scripts = [failed("engine", 500)], [said("h"), 0.1, failed("lost", 503)]
    async with collecting() as collector, traced(collector.url, *scripts) as client:
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in await client.chat.completions.create(
                model="tiny", messages=HI, stream=True)]  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            await ask(client, max_tokens=-1)
    roots = [span for span in collector.spans if span.kind == span.SPAN_KIND_SERVER]
    told = [
        (span.status.code, values(span.attributes)["error.type"], span.status.message)
        for span in roots
    ]
    error, unset = roots[0].status.STATUS_CODE_ERROR, roots[0].status.STATUS_CODE_UNSET
    assert told[:2] == [(error, "engine", "it broke"), (error, "lost", "it broke")]
    assert told[2][0] == unset  # a client's mistake is none of ours
    codes = [values(span.attributes)["http.response.status_code"] for span in roots]
    assert codes == [500, 200, 400]


async def test_the_environment_names_headers_and_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "reader")
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        endpoint = gateway_config(Settings(), "gateway", "").otlp_traces_endpoint
        async with traced(endpoint) as client:
            await ask(client)
    assert collector.headers["api-key"] == "secret"
    assert collector.resource["service.name"] == "reader"
    assert gateway_config(Settings(otlp_traces_endpoint="http://x/y"), "g", "").otlp_traces_endpoint
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not gateway_config(Settings(), "gateway", "").otlp_traces_endpoint


@pytest.mark.parametrize("dead", [True, False], ids=["nobody listens", "it never answers"])
async def test_a_dead_collector_disturbs_neither_requests_nor_the_end(dead: bool) -> None:
    async with collecting() as collector:
        collector.gate.clear()
        url = "http://127.0.0.1:9" if dead else collector.url
        async with traced(url) as client:
            for _ in range(3):
                began_s = time.perf_counter()
                await ask(client)
                assert time.perf_counter() - began_s < QUICK_S
            ended_s = time.perf_counter()
        assert time.perf_counter() - ended_s < otel.CLOSE_S + QUICK_S
        assert not collector.spans


async def test_what_a_slow_collector_does_not_take_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "MAX_SPANS", 5)
    monkeypatch.setattr(otel, "MAX_BATCH", 5)
    async with collecting() as collector:
        collector.gate.clear()
        tracer = build_tracer(collector.url)
        for _ in range(4):
            record = Record(tracer, tracer.begin({}), "chat")
            record.fetches = ((1.0, 2.0),)
            record.responded(200)
        give_up_s = time.monotonic() + PATIENCE_S
        while counted(tracer)["epd_traces_dropped_total"] < 2 and time.monotonic() < give_up_s:
            await asyncio.sleep(0.01)
        assert counted(tracer)["epd_traces_dropped_total"] == 2
        collector.gate.set()
        await tracer.close()
        assert len(collector.spans) == 4  # of two requests
        assert counted(tracer) == {
            "epd_trace_spans_total": 4, "epd_traces_dropped_total": 2
        }  # fmt: skip


def counted(tracer: Any) -> dict[str, float]:
    """Metrics by name, those of failures left out."""
    return {m.name: m.value for m in tracer.samples() if ("outcome", "failed") not in m.labels}


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'epd\[otel\]'"):
        build_tracer("http://127.0.0.1:4318")
    assert type(build_tracer("")) is Tracer


def test_addresses_of_other_protocols_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"OTLP over HTTP: http://host:4318/v1/traces"):
        build_settings(flags={"otlp_traces_endpoint": "grpc://host:4317"})
    assert otel.whole("http://host:4318/", "/v1/traces") == "http://host:4318/v1/traces"
    assert otel.whole("https://host/otlp/v1/traces", "/v1/traces") == "https://host/otlp/v1/traces"


def test_stays_become_spans_of_the_fields_words() -> None:
    """Two images of one encoder do not mix; what has no end yet lasts to the end."""

    def entry(machine: str, key: str, state: str, at_s: float, *more: Any) -> TimelineEntry:
        return TimelineEntry(machine, "x0", key, state, at_s, *more)

    record = Record(Tracer(), None, "chat", began_s=0.0, ended_s=9.0)
    record.fetches = ((0.1, 0.2), (0.1, 0.3))
    record.timelines = [
        [
            entry("GENERATION", "", "PREPARING", 0.0),
            entry("GENERATION", "", "PLACED", 0.5),
            entry("ENCODING", "aa", "QUEUED", 1.0),
            entry("ENCODING", "bb", "QUEUED", 1.1),
            entry("ENCODING", "aa", "ENCODING", 2.0),
            entry("ENCODING", "bb", "ENCODING", 3.0),
            entry("ENCODING", "aa", "RESIDENT", 4.0),
            entry("REQUEST", "1", "RUNNING", 5.0),
            entry("CHUNK", "1", "COMPUTED", 5.1, 0.2, 64),
            entry("REQUEST", "1", "WAITING_MID_PROMPT", 6.0),
            entry("REQUEST", "1", "RUNNING", 7.0),
            entry("CHUNK", "1", "COMPUTED", 7.1, 0.4, 32),
            entry("REQUEST", "1", "DECODING", 8.0),
            entry("GENERATION", "", "FINISHED", 9.0),
        ]
    ]
    root = spans_of(record)
    told = sorted((s.name, s.began_s, s.ended_s, len(s.children)) for s in root.children)
    assert told == [
        ("decode", 8.0, 9.0, 0),
        ("decode-image", 1.0, 2.0, 0),
        ("decode-image", 1.1, 3.0, 0),
        ("encode", 2.0, 4.0, 0),
        ("encode", 3.0, 9.0, 0),
        ("prefill", 5.0, 6.0, 1),
        ("prefill", 7.0, 8.0, 1),
        ("prepare", 0.0, 0.5, 2),
        ("wait", 6.0, 7.0, 0),
    ]
    assert root.attributes["gen_ai.latency.time_in_model_prefill"] == 2.0
    assert next(iter(root)) is root
