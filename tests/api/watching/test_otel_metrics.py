"""Metrics of requests at a collector, under the names of OpenTelemetry's GenAI conventions."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import openai
import pytest

from epd.api.watching import otel
from epd.api.watching.metering import NO_METER
from epd.api.watching.otel_metrics import build_meter
from epd.cli.configure.settings import gateway_config
from epd.config import ConfigError, Settings
from tests.api.fakes import FakeFrontend, failed, said, serving
from tests.api.test_server import HI, openai_client
from tests.api.watching.collector import Collector, collecting, values
from tests.api.watching.test_tracing import QUICK_S

ANSWER = [said("a"), 0.03, said("bc", "stop")]


def points(collector: Collector, name: str) -> list[tuple[dict[str, Any], int, float]]:
    """Attributes, count and sum of each series of a histogram."""
    metric = collector.metrics[f"gen_ai.server.{name}"]
    assert metric.unit == "s"
    return [
        (values(point.attributes), point.count, point.sum) for point in metric.histogram.data_points
    ]


async def ask(url: str, *scripts: Any, num_requests: int = 1) -> None:
    """Requests of a server that exports there, and has ended then."""
    async with (
        serving(FakeFrontend(*scripts), metrics=url) as (server, *_),
        openai_client(server) as client,
    ):
        for _ in range(num_requests):
            with contextlib.suppress(openai.APIError):
                await client.chat.completions.create(model="tiny", messages=HI)


async def test_requests_become_histograms() -> None:
    async with collecting() as collector:
        await ask(collector.url, ANSWER, ANSWER, [failed("engine", 500)], num_requests=3)
    assert collector.resource["service.name"] == "epd"
    by_error = {one[0].get("error.type"): one for one in points(collector, "request.duration")}
    attributes, count, total_s = by_error[None]
    assert count == 2 and total_s >= 0.06
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "epd",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
    }
    assert by_error["engine"][1] == 1
    ((_, count, _),) = points(collector, "time_to_first_token")
    assert count == 2
    ((_, count, total_s),) = points(collector, "time_per_output_token")
    assert count == 2 and 0.03 <= total_s < QUICK_S  # two tokens behind the first, 15 ms each


@pytest.mark.parametrize("dead", [True, False], ids=["nobody listens", "it never answers"])
async def test_a_dead_collector_disturbs_neither_requests_nor_the_end(dead: bool) -> None:
    async with collecting() as collector:
        collector.gate.clear()
        began_s = time.perf_counter()
        await ask("http://127.0.0.1:9" if dead else collector.url, ANSWER)
        assert time.perf_counter() - began_s < otel.CLOSE_S + QUICK_S
        assert not collector.metrics


def test_the_environment_may_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def endpoint() -> str:
        return gateway_config(Settings(), "gateway", "").otlp_metrics_endpoint

    assert endpoint() == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://x/y")
    assert endpoint() == ""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x")
    assert endpoint() == "env"
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert endpoint() == ""


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"metrics are to be exported.*pip install 'epd\[otel\]'"):
        build_meter("http://127.0.0.1:4318", "tiny")
    assert build_meter("", "tiny") is NO_METER
