"""The Trace Event format, which https://ui.perfetto.dev and chrome://tracing draw.

A process (`pid`) has tracks (`tid`).  Slices of a track lie side by side or within each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TraceEvent = dict[str, Any]


def document(events: Iterable[TraceEvent]) -> dict[str, Any]:
    """The JSON object format of the specification."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def process(pid: int, name: str) -> TraceEvent:
    return _named("process_name", pid, 0, name)


def track(pid: int, tid: int, name: str) -> TraceEvent:
    return _named("thread_name", pid, tid, name)


def part(pid: int, tid: int, name: str, began_s: float, ended_s: float) -> TraceEvent:
    """A slice."""
    lasted_us = max(0.0, ended_s - began_s) * 1e6
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": began_s * 1e6, "dur": lasted_us}


def moment(pid: int, tid: int, name: str, at_s: float, scope: str = "t") -> TraceEvent:
    """`scope`: "t", of its track; "p", of its process; "g", of all."""
    return {"ph": "i", "s": scope, "pid": pid, "tid": tid, "name": name, "ts": at_s * 1e6}


def _named(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
