"""Measurements as images: bars of `epd bench serve`, lines of `epd bench hop`, a run of `epd bench
chaos` over time."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from epd_lab.bench.machine import counted, sentence
from epd_lab.bench.servers.figures import by_stream, stream_name
from epd_lab.bench.transports.hop_senders import ON_HOST, WAYS
from epd_lab.diagrams.svg import PALETTE, SOFT, Canvas

if TYPE_CHECKING:
    from epd_lab.bench.chaos.verdict import Run

FIGURES = (
    ("requests per second", "req_per_s", 1),
    ("within the SLO, per second", "goodput_req_per_s", 1),
    ("TTFT p50, ms", "ttft_ms_p50", 0),
    ("TPOT p50, ms", "tpot_ms_p50", 1),
    ("ITL p99, ms", "itl_ms_p99", 0),
)
LEFT, TOP, LONGEST, COLUMN, BAR, BETWEEN, LEGEND = 150, 64, 170, 230, 16, 18, 130
OURS = {"local", *ON_HOST, "file-medium"}
WIDTH, HEIGHT, GAP = 430, 330, 90  # of a panel's plot area, in px
TITLE, PLAIN, NOTE = "sans strong", "sans", f"sans {SOFT}"


def bars(found: dict[str, Any]) -> str:
    """An SVG of all rows of `found` that are no ratios: a bar per server, a column per figure.
    Those of one workload and one column are to scale; the longest of them fills the column."""
    rows = [row for row in found["rows"] if "errors" in row]
    colours = dict(zip(dict.fromkeys(row["server"] for row in rows), itertools.cycle(PALETTE)))
    canvas = Canvas("Servers under load, per workload")
    for x, (server, colour) in zip(itertools.count(LEFT, LEGEND), colours.items()):
        canvas.line([(x, 21), (x + 14, 21)], colour, 14)
        canvas.text(x + 20, 26, server, classes=PLAIN)
    for x, (title, _, _) in zip(itertools.count(LEFT, COLUMN), FIGURES):
        canvas.text(x, TOP - 14, title, classes=TITLE)
    y = TOP
    for of, alike in by_stream(rows).items():
        canvas.text(16, y + len(alike) * BAR / 2 + 4, stream_name(*of), 13, TITLE)
        for x, (_, key, digits) in zip(itertools.count(LEFT, COLUMN), FIGURES):
            longest = max(row["figures"][key] for row in alike) or 1.0
            for top, row in zip(itertools.count(y, BAR), alike):
                value = row["figures"][key]
                end = x + LONGEST * value / longest
                canvas.line([(x, top + 7), (end, top + 7)], colours[row["server"]], BAR - 3)
                canvas.text(end + 5, top + 11, f"{value:.{digits}f}", classes=PLAIN)
        y += len(alike) * BAR + BETWEEN
    machine = [sentence(found["machine"])] if "machine" in found else []  # none where predicted
    where = "; ".join([*counted(found.get("gpus", [])), *machine])
    canvas.text(16, y + 14, f"medians of {found['repeats']}; {where}", classes=NOTE)
    return canvas.render(LEFT + len(FIGURES) * COLUMN + 10, y + 34)


def lines(found: dict[str, Any]) -> str:
    """An SVG of all ways, by size: latency of one item, and throughput; references are dashed."""
    rows = [row for row in found["rows"] if row["in_flight"] == 1]
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    colours = dict(zip(WAYS, itertools.cycle(PALETTE)))
    latency = {w: [(r["nbytes"], r["latency_us"]["p50"] / 1e3) for r in rows if r["way"] == w]
               for w in ways}  # fmt: skip
    rate = {w: [(r["nbytes"], r["gb_per_s"]) for r in rows if r["way"] == w]
            for w in ways if w != "local"}  # fmt: skip  # which moves nothing
    canvas = Canvas("What a hop costs, by size and transport")
    _panel(canvas, 70, "ready to usable, p50, ms", latency, colours)
    right = 70 + WIDTH + GAP
    _panel(canvas, right, "one item at a time, GB/s", rate, colours)
    x = right + WIDTH + 24
    for y, way in zip(itertools.count(TOP + 14, 22), ways):
        canvas.line([(x, y), (x + 22, y)], _look(way, colours), 2)
        canvas.text(x + 30, y + 4, way, classes=PLAIN)
    note = f"size of the item; {sentence(found['machine'])}"
    canvas.text(70, TOP + HEIGHT + 48, note, classes=NOTE)
    return canvas.render(x + 170, TOP + HEIGHT + 60)


def _look(way: str, colours: dict[str, str]) -> str:
    return colours[way] if way in OURS else f"{colours[way]} held"


def _panel(
    canvas: Canvas, left: int, title: str, points: dict[str, list[tuple[int, float]]],
    colours: dict[str, str],
) -> None:  # fmt: skip
    """One pair of logarithmic axes."""
    xs = sorted({x for line in points.values() for x, _ in line})
    ys = [math.log10(y) for line in points.values() for _, y in line]
    low, high = math.floor(min(ys)), math.ceil(max(ys))
    span = max(math.log2(xs[-1] / xs[0]), 1e-9)
    at_x = {x: left + WIDTH * math.log2(x / xs[0]) / span for x in xs}

    def at_y(exponent: float) -> float:
        return TOP + HEIGHT * (high - exponent) / max(high - low, 1)

    canvas.text(left, TOP - 18, title, 15, TITLE)
    for decade in range(low, high + 1):
        y = at_y(decade)
        canvas.line([(left, y), (left + WIDTH, y)], SOFT, 0.2)
        canvas.text(left - 8, y + 4, f"{10.0**decade:g}", classes=f"{PLAIN} right")
    for x in xs:
        canvas.line([(at_x[x], TOP), (at_x[x], TOP + HEIGHT)], SOFT, 0.2)
        canvas.text(at_x[x] + 16, TOP + HEIGHT + 18, _size(x), classes=f"{PLAIN} right")
    for way, line in points.items():
        canvas.line([(at_x[x], at_y(math.log10(y))) for x, y in line], _look(way, colours), 2)


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"


BINS, FAULTS = 120, ("kill", "stop", "cut", "disk", "descriptors")


def chaos(run: Run) -> str:
    """An SVG over the time of a run: the rate of answers, and each stream's longest pause where it
    ended, above the faults; a row of these for each kind."""
    width, half = 2 * WIDTH, HEIGHT // 2
    seconds = max(run.lasted_s, 1.0)
    per_bin = seconds / BINS
    rate = [0.0] * BINS
    pauses = []
    for answer in run.answers:
        if answer.is_whole:
            rate[min(BINS - 1, int(answer.ended_s / per_bin))] += 1 / per_bin
        if answer.pauses:
            begin_s, end_s = max(answer.pauses, key=lambda pause: pause[1] - pause[0])
            pauses.append((end_s, end_s - begin_s))
    canvas = Canvas("Under chaos: rate, pauses, faults")

    def at_x(at_s: float) -> float:
        return 70 + width * min(1.0, at_s / seconds)

    def axis(top: float, title: str, most: float) -> None:
        canvas.text(70, top - 8, title, classes=TITLE)
        for share in (0.0, 0.5, 1.0):
            y = top + half * (1 - share)
            canvas.line([(70, y), (70 + width, y)], SOFT, 0.2)
            canvas.text(62, y + 4, f"{most * share:.3g}", classes=f"{PLAIN} right")

    most = max(rate) or 1.0
    axis(TOP, "answers per second", most)
    steps = [(at_x((n + 0.5) * per_bin), TOP + half * (1 - r / most)) for n, r in enumerate(rate)]
    canvas.line(steps, PALETTE[0])
    top = TOP + half + GAP // 2
    longest = max([run.wish.max_pause_s, *(s for _, s in pauses)])
    axis(top, "longest pause of each stream, s (dashed: the bound)", longest)
    bound = top + half * (1 - run.wish.max_pause_s / longest)
    canvas.line([(70, bound), (70 + width, bound)], f"{PALETTE[1]} held", 1)
    for at_s, pause_s in pauses:
        canvas.dot(at_x(at_s), top + half * (1 - pause_s / longest), PALETTE[1], 2)
    top += half + 30
    for row, kind in enumerate(FAULTS):
        y = top + 18 * row
        canvas.text(62, y + 4, kind, classes=f"{PLAIN} right")
        for at_s, fault in run.faults:
            if fault.kind == kind:
                ends_s = at_s + max(fault.lasts_s, seconds / 400)
                canvas.line([(at_x(at_s), y), (at_x(ends_s), y)], PALETTE[2 + row], 8)
    note = f"{run.wish.topology}, seed {run.wish.seed}, {seconds:.0f} s"
    canvas.text(70, top + 18 * len(FAULTS) + 10, note, classes=NOTE)
    return canvas.render(70 + width + 20, top + 18 * len(FAULTS) + 24)
