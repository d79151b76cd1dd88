"""Timelines of requests as a trace for https://ui.perfetto.dev.

A request is a process, a machine a track, and a state a slice.  Machines are the request at the
gateway, its images' encodings, its transfers, its life at prefill and at decode, the chunks of its
prompt.  Times are those of the server's timeline, laid from the moment at which the client sent the
request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from epd_lab.bench.servers.openai_load import Sample
from epd_lab.trace_events import TraceEvent, document, moment, part, process, track


def chrome_trace(samples: Iterable[tuple[str, Sample]]) -> dict[str, Any]:
    """`samples`: name and request."""
    return document(event for pid, one in enumerate(samples, 1) for event in _request(pid, *one))


def _request(pid: int, name: str, sample: Sample) -> Iterator[TraceEvent]:
    yield process(pid, f"{name} {pid}")
    yield part(pid, 0, "request", sample.sent_s, sample.ended_s)
    yield track(pid, 0, "client")
    if sample.ttft_s:
        yield moment(pid, 0, "first text", sample.sent_s + sample.ttft_s)
    tracks: dict[str, list[dict[str, Any]]] = {}
    for event in sample.timeline:
        machine, key = event["machine"], event.get("key", "")
        tracks.setdefault(f"{machine} {key}".rstrip(), []).append(event)
    for tid, (machine, events) in enumerate(sorted(tracks.items()), 1):
        yield track(pid, tid, machine)
        for event, following in zip(events, [*events[1:], events[-1]], strict=True):
            lasted_ms = event.get("ms", following["t_ms"] - event["t_ms"])
            began_s = sample.sent_s + event["t_ms"] / 1e3
            yield part(pid, tid, event["state"], began_s, began_s + lasted_ms / 1e3)
