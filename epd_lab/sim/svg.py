"""A timeline as SVG: one lane per process, machines and slots as bars, faults as marks.

Virtual time is uneven: milliseconds of work, then seconds of waiting for a clock.  The axis
therefore cuts out what is longer than `GAP_S` without any change, and says how much it cut.
A run of many retries has many gaps: together they get a part of the width, never all of it.
Everything of a bar is in its tooltip; what fits is written on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from xml.sax.saxutils import escape

from epd_lab.sim.timeline import Bar, Mark, Timeline

WIDTH, LEFT, TOP = 1500, 190, 74.0
ROW, BAR_HEIGHT = 13, 10
GAP_S, GAP_WIDTH = 0.12, 34.0
GAP_SHARE = 0.4  # of the width, that all gaps together may take
GROUPS = ("GENERATION", "ENCODING", "EMBEDDING", "REQUEST", "OUTGOING", "INCOMING", "KV blocks")
CHAR_WIDTH = 5.2

WAITS = "#b9d3ee"
WORKS = "#68a8ec"
TROUBLE = "#f0a13a"
HOLDS = "#9fd0a0"
COLOURS = (("waits", WAITS), ("works", WORKS), ("memory leased", HOLDS), ("in trouble", TROUBLE))
WORKING = frozenset(
    "PREPARED ENCODING LOADING RUNNING WRITING TRANSFERRING STREAMING DECODING PUBLISHING "
    "WRITTEN".split()
)
TROUBLED = frozenset(
    "MIGRATING CANCELLING STOPPING ABORTING CALLED_OFF CANCEL_PENDING EXPIRE_PENDING QUARANTINED "
    "ABANDONED PREEMPTED".split()
)
FAILED = frozenset(["FAILED", "EXPIRED", "REJECTED"])
BAD_MARKS = frozenset(["fault", "violation", "kill", "stall", "expelled", "device_lost"])


class Axis:
    """Seconds to pixels, without the gaps in which nothing changed."""

    def __init__(self, times: Iterable[float]) -> None:
        known = sorted(set(times)) or [0.0, 1.0]
        self.gaps = [(a, b) for a, b in pairwise(known) if b - a > GAP_S]
        self.from_s, self.to_s = known[0], known[-1]
        self.gap_width = min(GAP_WIDTH, GAP_SHARE * (WIDTH - LEFT) / max(1, len(self.gaps)))
        worked_s = self.to_s - self.from_s - sum(b - a for a, b in self.gaps)
        width = WIDTH - LEFT - 20 - self.gap_width * len(self.gaps)
        self.px_per_s = width / max(worked_s, 1e-6)

    def x(self, at_s: float) -> float:
        at_s = min(max(at_s, self.from_s), self.to_s)
        cut_s, cut_px = 0.0, 0.0
        for start, end in self.gaps:
            if at_s >= end:
                cut_s, cut_px = cut_s + end - start, cut_px + self.gap_width
            elif at_s > start:
                share = (at_s - start) / (end - start)
                cut_s, cut_px = cut_s + at_s - start, cut_px + self.gap_width * share
        return LEFT + (at_s - self.from_s - cut_s) * self.px_per_s + cut_px

    def ticks(self) -> list[float]:
        worked_s = (WIDTH - LEFT) / self.px_per_s
        step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 1e9) if worked_s / s < 16)
        first = int(self.from_s / step) + 1
        found = [n * step for n in range(first, int(self.to_s / step) + 1)]
        return [t for t in found if not any(a < t < b for a, b in self.gaps)]


def draw(timeline: Timeline, title: str, until_s: float) -> str:
    """The image as SVG text; `until_s`: leave out what begins later (the probes, silence)."""
    bars = [bar for bar in timeline.bars if bar.from_s <= until_s]
    marks = [mark for mark in timeline.marks if mark.at_s <= until_s or mark.kind == "violation"]
    first_s = min((bar.from_s for bar in bars), default=0.0)
    shown = [mark for mark in marks if mark.at_s >= first_s - GAP_S and mark.kind != "spawn"]
    shown += [m for m in marks if m.kind == "spawn" and m.at_s > first_s]
    times = [t for bar in bars for p in bar.pieces for t in (p.from_s, p.to_s) if t <= until_s]
    times += [mark.at_s for mark in shown]
    axis = Axis(times)
    body: list[str] = []
    y = TOP
    for lane in timeline.lanes:
        own = [bar for bar in bars if bar.lane == lane]
        drawn, height = _lane(lane, own, [m for m in shown if m.lane == lane], axis, y)
        body.append(drawn)
        y += height
    for mark in shown:
        if not mark.lane:
            x = axis.x(mark.at_s)
            line = f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y}" stroke="#c00"/>'
            body.append(f"<g>{_tip(mark.text)}{line}</g>")
    found = next((mark.text for mark in shown if mark.kind == "violation"), "")
    size = f'width="{WIDTH}" height="{y + 30}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="9"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    ground = f'<rect {size} fill="white"/>'
    return "\n".join([opening, ground, _head(title, found), _grid(axis, y), *body, "</svg>"])


def _head(title: str, found: str) -> str:
    parts = [f'<text x="10" y="18" font-size="13" font-weight="bold">{escape(title)}</text>']
    if found:
        parts.append(f'<text x="10" y="36" font-size="11" fill="#c00">{escape(found[:210])}</text>')
    x = 10.0
    for name, colour in COLOURS:
        parts.append(f'<rect x="{x}" y="46" width="14" height="9" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="54">{name}</text>')
        x += 30 + CHAR_WIDTH * len(name)
    parts.append(f'<text x="{x}" y="54" fill="#c00">▲ fault   ✕ ended badly</text>')
    return "\n".join(parts)


def _grid(axis: Axis, bottom: float) -> str:
    parts, free_x = [], 0.0
    for tick in axis.ticks():
        x = axis.x(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>')
        if free_x < x < WIDTH - 24:
            label = f'text-anchor="middle" fill="#666">{tick:.2f} s'
            parts.append(f'<text x="{x:.1f}" y="{TOP - 4}" {label}</text>')
            free_x = x + 48
    return "\n".join([*parts, *_gaps(axis, bottom)])


def _gaps(axis: Axis, bottom: float) -> list[str]:
    """Shaded; where they are close together, the first says how much all of them cut."""
    parts: list[str] = []
    close: list[tuple[float, float]] = []
    for n, (start, end) in enumerate(axis.gaps):
        x = axis.x(start)
        height = f'height="{bottom - TOP}" fill="#f4f4f4"'
        tip = _tip(f"{start:.3f} s to {end:.3f} s: nothing changed")
        parts.append(
            f'<g>{tip}<rect x="{x:.1f}" y="{TOP}" width="{axis.gap_width:.1f}" {height}/></g>'
        )
        close.append((x, end - start))
        following = axis.gaps[n + 1 : n + 2]
        if not following or axis.x(following[0][0]) - close[0][0] > 52:
            at = f'x="{close[0][0]:.1f}" y="{bottom + 12}" fill="#999"'
            parts.append(f"<text {at}>≈ {sum(cut for _, cut in close):.1f} s</text>")
            close = []
    return parts


def _lane(lane: str, bars: list[Bar], marks: list[Mark], axis: Axis, y: float) -> tuple[str, float]:
    parts, at = [], y + 17.0
    groups = [g for g in GROUPS if any(bar.group == g for bar in bars)]
    slots = sorted({bar.group for bar in bars} - set(groups), key=_natural)
    for group in (*groups, *slots):
        rows = _pack([bar for bar in bars if bar.group == group])
        parts.append(f'<text x="22" y="{at + 9}" fill="#666">{group.lower()}</text>')
        for row in rows:
            parts.extend(_bar(bar, axis, at) for bar in row)
            at += ROW
        at += 3 if group in GROUPS else 0
    height = max(at - y + 4, 30.0)
    frame = (
        f'<line x1="0" y1="{y}" x2="{WIDTH}" y2="{y}" stroke="#888"/>'
        f'<text x="10" y="{y + 13}" font-size="12" font-weight="bold">{lane}</text>'
    )
    down = _down(marks, axis, y, height)
    return "\n".join([frame, down, *parts, *_marks(marks, axis, y, height)]), height


def _natural(group: str) -> tuple[str, int]:
    name, _, number = group.rpartition(" ")
    return name, int(number)


def _pack(bars: list[Bar]) -> list[list[Bar]]:
    """Bars into as few rows as will do."""
    rows: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda b: (b.from_s, b.label)):
        row = next((r for r in rows if r[-1].to_s < bar.from_s), None)
        if row is None:
            rows.append(row := [])
        row.append(bar)
    return rows


def _bar(bar: Bar, axis: Axis, y: float) -> str:
    parts, longest = [], (0.0, 0.0)
    for piece in bar.pieces:
        x = axis.x(piece.from_s)
        width = max(axis.x(piece.to_s) - x, 0.6)
        longest = max(longest, (width, x))
        colour = _colour(piece.state)
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>'
        )
    told = "; ".join(f"{p.state} {p.from_s:.4f}-{p.to_s:.4f}" for p in bar.pieces)
    start, end = axis.x(bar.from_s), axis.x(bar.to_s)
    label = _short(bar.label)
    if end - start > CHAR_WIDTH * len(label) + 4:
        parts.append(f'<text x="{start + 2:.1f}" y="{y + 8.5}" fill="#123">{escape(label)}</text>')
    if bar.ended in FAILED:
        parts.append(f'<text x="{end:.1f}" y="{y + 9}" fill="#c00" font-size="10">✕</text>')
    tip = _tip(f"{bar.label}: {told}; {bar.ended or 'never ended'}")
    return f"<g>{tip}{''.join(parts)}</g>"


def _short(label: str) -> str:
    """Ids and hashes to their first digits."""
    if re.fullmatch(r"[0-9a-f]{64}", label):
        return label[:6]
    return re.sub(r"^gateway-([0-9a-f]{4})[0-9a-f]{12}", r"\1", label)


def _colour(state: str) -> str:
    if state == "LEASED":
        return HOLDS
    if state in TROUBLED:
        return TROUBLE
    return WORKS if state in WORKING else WAITS


def _down(marks: list[Mark], axis: Axis, y: float, height: float) -> str:
    """Grey where the process was dead, orange where it was stopped."""
    parts, since, colour = [], -1.0, ""
    for mark in (*marks, Mark(axis.to_s, "", "spawn", "")):
        if mark.kind in ("kill", "exit", "stall"):
            since, colour = mark.at_s, "#d8d8d8" if mark.kind != "stall" else "#fbe6c8"
        elif mark.kind in ("spawn", "resume") and since >= 0:
            x, end = axis.x(since), axis.x(mark.at_s)
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 1}" width="{end - x:.1f}" height="{height - 2}" '
                f'fill="{colour}"/>'
            )
            since = -1.0
    return "".join(parts)


def _marks(marks: list[Mark], axis: Axis, y: float, height: float) -> list[str]:
    parts, free_x = [], 0.0
    for mark in marks:
        x = axis.x(mark.at_s)
        colour = "#c00" if mark.kind in BAD_MARKS else "#777"
        sign = "▲" if mark.kind in BAD_MARKS else "▵"
        text = mark.text if mark.kind == "fault" else mark.kind
        line = (
            f'<line x1="{x:.1f}" y1="{y + 1}" x2="{x:.1f}" y2="{y + height - 1}" '
            f'stroke="{colour}" stroke-dasharray="3 2"/>'
        )
        label = ""
        if x >= free_x and mark.kind not in ("kill", "stall"):  # their fault says it already
            x_text = min(x + 2, WIDTH - CHAR_WIDTH * (len(text) + 3))
            label = (
                f'<text x="{x_text:.1f}" y="{y + 12}" fill="{colour}">{sign} {escape(text)}</text>'
            )
            free_x = x_text + CHAR_WIDTH * (len(text) + 3)
        parts.append(f"<g>{_tip(f'{mark.at_s:.4f} s: {mark.kind} {mark.text}')}{line}{label}</g>")
    return parts


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>"
