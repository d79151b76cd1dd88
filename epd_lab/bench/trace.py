"""Timelines of requests as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

One process per request, one track per machine (the request at the gateway, its images' encodings,
its transfers, its life at prefill and at decode, the chunks of its prompt), one slice per state.
Times are those of the server's timeline, laid from the moment at which the client sent the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from epd_lab.bench.openai_load import Sample


def chrome_trace(samples: Iterable[tuple[str, Sample]]) -> dict[str, Any]:
    """The JSON object format of the Trace Event specification; `samples`: name and request."""
    events: list[dict[str, Any]] = []
    for pid, (name, sample) in enumerate(samples, 1):
        events.append(_named("process_name", pid, 0, f"{name} {pid}"))
        events += _request(pid, sample)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _request(pid: int, sample: Sample) -> Iterator[dict[str, Any]]:
    yield _slice(pid, 0, "request", sample.sent_s, sample.ended_s)
    yield _named("thread_name", pid, 0, "client")
    if sample.ttft_s:
        first_s = sample.sent_s + sample.ttft_s
        yield {"ph": "i", "s": "t", "pid": pid, "tid": 0, "ts": first_s * 1e6, "name": "first text"}
    tracks: dict[str, list[dict[str, Any]]] = {}
    for event in sample.timeline:
        machine, key = event["machine"], event.get("key", "")
        tracks.setdefault(f"{machine} {key}".rstrip(), []).append(event)
    for tid, (machine, events) in enumerate(sorted(tracks.items()), 1):
        yield _named("thread_name", pid, tid, machine)
        for event, following in zip(events, [*events[1:], events[-1]], strict=True):
            lasted_ms = event.get("ms", following["t_ms"] - event["t_ms"])
            began_s = sample.sent_s + event["t_ms"] / 1e3
            yield _slice(pid, tid, event["state"], began_s, began_s + lasted_ms / 1e3)


def _slice(pid: int, tid: int, name: str, began_s: float, ended_s: float) -> dict[str, Any]:
    duration_us = max(0.0, ended_s - began_s) * 1e6
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": began_s * 1e6, "dur": duration_us,
    }  # fmt: skip


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
