"""Export of metrics to an OpenTelemetry collector, by OTLP over HTTP, under GenAI's names.

Every request counts, sampled by a trace or not.  The loop only adds to histograms as a request
ends; a thread of the SDK exports them once a minute (`OTEL_METRIC_EXPORT_INTERVAL`, milliseconds).
A collector that is dead costs log lines and nothing else.  All other samples are in `/metrics`.

Names, units and bounds of the histograms are those of OpenTelemetry's semantic conventions for
generative AI servers.  The library is optional (`pip install epd[otel]`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from epd import __version__
from epd.api.watching.metering import NO_METER, Meter
from epd.api.watching.otel import CLOSE_S, needs_library, resource, whole
from epd.api.watching.tracing import Record
from epd.in_thread import in_thread

METRICS_PATH = "/v1/metrics"
DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
BEHIND_FIRST = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def build_meter(endpoint: str, model: str) -> Meter:
    """For `GatewayConfig.otlp_metrics_endpoint`.  Raises ConfigError without the library."""
    if not endpoint:
        return NO_METER
    with needs_library("metrics", "--otlp-metrics-endpoint"):
        return OtelMeter(whole(endpoint, METRICS_PATH), model)


class OtelMeter(Meter):
    """`endpoint` empty: the SDK finds one by itself."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint or None))
        self._provider = MeterProvider(
            [reader], Resource.create({**resource()}), shutdown_on_exit=False
        )
        meter = self._provider.get_meter("epd", __version__)
        self._attributes = {
            "gen_ai.provider.name": "epd",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }
        self._duration, self._first, self._per_token = (
            meter.create_histogram(
                f"gen_ai.server.{name}", "s", text, explicit_bucket_boundaries_advisory=bounds
            )
            for name, text, bounds in (
                ("request.duration", "from a request's head to the end of its answer", DURATION),
                ("time_to_first_token", "of answers, from the request's head", FIRST),
                ("time_per_output_token", "of answers, behind the first token", BEHIND_FIRST),
            )
        )

    def measure(self, record: Record) -> None:
        attributes: Mapping[str, str] = {
            **self._attributes,
            "gen_ai.operation.name": record.operation,
        }
        failed = {"error.type": record.error[0]} if record.error[0] else {}
        self._duration.record(record.ended_s - record.began_s, {**attributes, **failed})
        if not record.first_token_s:
            return
        self._first.record(record.first_token_s - record.began_s, attributes)
        num_more = record.num_output_tokens - 1
        if num_more > 0:
            self._per_token.record((record.ended_s - record.first_token_s) / num_more, attributes)

    async def close(self) -> None:
        """Bounded by about `CLOSE_S`, whatever the collector does."""
        shut_down = partial(self._provider.shutdown, timeout_millis=CLOSE_S * 1000)
        with suppress(TimeoutError):  # the SDK logs what it could not export
            await asyncio.wait_for(in_thread(shut_down, "epd-otel-metrics"), CLOSE_S)
