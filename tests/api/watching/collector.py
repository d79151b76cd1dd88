"""An OpenTelemetry collector for tests: OTLP over HTTP, its spans as plain values."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Spans and metrics that came, in order; `gate` holds answers back."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}  # the last export's, by name
        self.resource: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.gate.wait()
        assert request.content_type == "application/x-protobuf"
        self.headers = dict(request.headers)
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = values(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(content_type="application/x-protobuf")

    async def take_metrics(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.gate.wait()
        for resource_metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            self.resource = values(resource_metrics.resource.attributes)
            for scope in resource_metrics.scope_metrics:
                self.metrics.update({metric.name: metric for metric in scope.metrics})
        return web.Response(content_type="application/x-protobuf")

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    @property
    def root(self) -> Any:
        (root,) = [span for span in self.spans if span.kind == span.SPAN_KIND_SERVER]
        return root


def values(attributes: Any) -> dict[str, Any]:
    """Attributes of a span as plain values."""
    found = {}
    for pair in attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        found[pair.key] = value
    return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    app.router.add_post("/v1/metrics", collector.take_metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    collector.url = f"http://127.0.0.1:{port}"
    try:
        yield collector
    finally:
        collector.gate.set()
        await runner.cleanup()
