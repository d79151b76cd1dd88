"""A timeline as a trace for https://ui.perfetto.dev: a process per lane, machines on its tracks.

A machine's life is a slice with its states within; a slot's slice lasts as long as its lease.
Machines of one table share as few tracks as will do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from epd_lab.sim.timeline import Bar, Timeline
from epd_lab.trace_events import TraceEvent, document, moment, part, process, track


def draw(timeline: Timeline) -> str:
    """The trace as JSON; times are virtual."""
    return json.dumps(document(_events(timeline)))


def _events(timeline: Timeline) -> Iterator[TraceEvent]:
    pids = {lane: pid for pid, lane in enumerate(timeline.lanes, 1)}
    for lane, pid in pids.items():
        yield process(pid, lane)
        yield track(pid, 0, "faults")
        own = [bar for bar in timeline.bars if bar.lane == lane]
        groups = dict.fromkeys(bar.group for bar in own)
        rows = [(group, row) for group in groups for row in _pack(own, group)]
        for tid, (group, row) in enumerate(rows, 1):
            yield track(pid, tid, group)
            for bar in row:
                name = f"{bar.label}: {bar.ended or 'never ended'}"
                yield part(pid, tid, name, bar.from_s, bar.to_s)
                for piece in bar.pieces:
                    yield part(pid, tid, piece.state, piece.from_s, piece.to_s)
    for mark in timeline.marks:
        scope = "p" if mark.lane else "g"
        yield moment(pids.get(mark.lane, 1), 0, f"{mark.kind} {mark.text}", mark.at_s, scope)


def _pack(bars: list[Bar], group: str) -> list[list[Bar]]:
    """Bars of a group into as few rows as will do: none of a row begins before another's end."""
    rows: list[list[Bar]] = []
    for bar in sorted((b for b in bars if b.group == group), key=lambda b: (b.from_s, b.label)):
        row = next((r for r in rows if r[-1].to_s <= bar.from_s), None)
        if row is None:
            rows.append(row := [])
        row.append(bar)
    return rows
