"""Export of traces to an OpenTelemetry collector, by OTLP over HTTP.

Theory of operation
-------------------
The loop works at the ends of a request only: at its head it reads `traceparent` and draws ids, at
its end it puts the record into a bounded queue.  A thread of its own makes spans of records, and
the SDK's batch processor sends them from another.  What the queue cannot take is dropped and
counted: a collector that is slow, or dead, costs its own traces and nothing else.  Closing gives
the threads a moment, then forbids further tries and leaves them behind; they end with the answer
that they wait for.

The library is optional (`pip install epd[otel]`).  It reads `OTEL_SERVICE_NAME`, the
`OTEL_EXPORTER_OTLP_*`, `OTEL_TRACES_SAMPLER*` and `OTEL_BSP_*` variables by itself.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar
from urllib.parse import urlsplit

from epd import __version__
from epd.api.watching.otel_spans import SpanData, spans_of
from epd.api.watching.tracing import Record, Tracer
from epd.config import ConfigError
from epd.frontend import Metric
from epd.in_thread import in_thread

S = TypeVar("S")
R = TypeVar("R", bound=Enum)

MAX_RECORDS = 256  # requests whose spans are to be made
MAX_SPANS = 8192  # of requests, made and not yet exported
MAX_BATCH = 512
CLOSE_S = 1.0  # for what is there when the gateway ends
TRACES_PATH = "/v1/traces"
FROM_ENVIRONMENT = "env"  # an endpoint that the SDK finds by itself

log = logging.getLogger(__name__)


def build_tracer(endpoint: str) -> Tracer:
    """For `GatewayConfig.otlp_traces_endpoint`.  Raises ConfigError without the library."""
    if not endpoint:
        return Tracer()
    with needs_library("traces", "--otlp-traces-endpoint"):
        return OtelTracer(whole(endpoint, TRACES_PATH))


@contextmanager
def needs_library(what: str, flag: str) -> Iterator[None]:
    """Raises ConfigError without it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} are to be exported, and {error.name} is not installed: "
            f"pip install 'epd[otel]', or drop {flag} and OTEL_EXPORTER_OTLP_*"
        ) from None


def whole(endpoint: str, path: str) -> str:
    """With the signal's path where it has none; empty: the SDK finds one by itself."""
    if endpoint == FROM_ENVIRONMENT:
        return ""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + path


def resource() -> dict[str, str]:
    """Who exports."""
    named = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "epd"}
    return {**named, "service.version": __version__}


class OtelTracer(Tracer):
    """Makes and exports spans, off the loop."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._counts: Counter[str] = Counter()
        self._num_made = 0  # spans that were given to the processor
        exporter = OTLPSpanExporter(endpoint=endpoint or None)
        exporter.export = _counted(exporter.export, self._counts)  # type: ignore[assignment, method-assign]
        self._stop_exporting: Callable[[], None] = exporter.shutdown
        self._provider = TracerProvider(
            resource=Resource.create({**resource()}), shutdown_on_exit=False
        )
        self._processor = BatchSpanProcessor(
            exporter, max_queue_size=MAX_SPANS, max_export_batch_size=MAX_BATCH
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("epd", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._records: queue.Queue[Record | None] = queue.Queue(MAX_RECORDS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="epd-otel", daemon=True)
        self._thread.start()

    # --- on the loop ------------------------------------------------------------------------------

    def begin(self, headers: Mapping[bytes, bytes]) -> object:
        from opentelemetry.trace import SpanKind

        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        parent = self._propagator.extract(carrier)
        root = self._tracer.start_span("request", context=parent, kind=SpanKind.SERVER)
        return root if root.is_recording() else None

    def response_header(self, context: object) -> bytes:
        from opentelemetry.trace import Span

        assert isinstance(context, Span)  # it began here
        known = context.get_span_context()
        return b"00-%032x-%016x-%02x" % (known.trace_id, known.span_id, known.trace_flags)

    def hand_over(self, record: Record) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._counts["refused"] += 1  # each count has one thread that writes it

    def samples(self) -> Iterator[Metric]:
        text = "spans sent to the collector, and not taken by it"
        for outcome in ("exported", "failed"):
            labels = (("outcome", outcome),)
            yield Metric("epd_trace_spans_total", self._counts[outcome], labels, "counter", text)
        dropped = self._counts["refused"] + self._counts["dropped"]
        text = "requests whose spans were dropped: the collector is slower than they come"
        yield Metric("epd_traces_dropped_total", dropped, (), "counter", text)

    async def close(self) -> None:
        """Bounded by about `CLOSE_S`, whatever the collector does."""

        def wait() -> None:
            if not self._ended.wait(CLOSE_S):
                self._stop_exporting()  # nothing is tried again; its threads end soon

        try:
            self._records.put_nowait(None)
        except queue.Full:
            log.warning("traces: %s requests are not exported any more", MAX_RECORDS)
        await in_thread(wait, "epd-otel-close")
        if not self._ended.is_set():
            log.warning("traces: the collector does not take what is left; it is dropped")

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._emit(record)
            except Exception:
                log.exception("a request's trace could not be made")
                self._counts["dropped"] += 1
        self._provider.shutdown()
        self._ended.set()

    def _emit(self, record: Record) -> None:
        from opentelemetry.trace import Span, Status, StatusCode

        data = spans_of(record)
        num_spans = sum(1 for _ in data)
        waiting = self._num_made - self._counts["exported"] - self._counts["failed"]
        if waiting + num_spans > MAX_SPANS:
            self._counts["dropped"] += 1
            return
        self._num_made += num_spans
        root = record.context
        assert isinstance(root, Span)  # it began here
        root.update_name(data.name)
        self._fill(root, data)
        if (why := _fault(record)) is not None:
            root.set_status(Status(StatusCode.ERROR, why))
        root.end(_ns(data.ended_s))

    def _fill(self, span: object, data: SpanData) -> None:
        from opentelemetry.trace import Span, set_span_in_context

        assert isinstance(span, Span)
        span.set_attributes(data.attributes)
        within = set_span_in_context(span)
        for child in data.children:
            made = self._tracer.start_span(child.name, within, start_time=_ns(child.began_s))
            self._fill(made, child)
            made.end(_ns(max(child.began_s, child.ended_s)))


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)


def _fault(record: Record) -> str | None:
    """Of ours; that a client sent nonsense, or left, is none (HTTP conventions)."""
    kind, message = record.error
    return message if kind and not 400 <= record.status < 500 else None


def _counted(
    export: Callable[[Sequence[S]], R], counts: Counter[str]
) -> Callable[[Sequence[S]], R]:
    """Counts what an exporter does, span by span."""

    def counting(spans: Sequence[S]) -> R:
        done = False
        try:
            result = export(spans)
            done = result.name == "SUCCESS"
        finally:
            counts["exported" if done else "failed"] += len(spans)
        return result

    return counting
