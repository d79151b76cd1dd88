"""The figures of `epd bench hop` as an image: latency of one item, and throughput, by size."""

from __future__ import annotations

import math
from typing import Any

from epd_lab.bench.hop_senders import ON_HOST
from epd_lab.bench.machine import sentence

COLOURS = {
    "memcpy": "#52606d", "local": "#0b7a75", "shm": "#2f6fb0", "tcp": "#c05621",
    "mooncake": "#7b3fa0", "mooncake-raw": "#b58ad0", "file": "#2f855a",
    "safetensors-shm": "#b7950b", "safetensors-disk": "#d69e2e", "safetensors-fsync": "#9b2c2c",
    "file-medium": "#7fb894", "safetensors-medium": "#6b4423",
}  # fmt: skip
OURS = {"local", *ON_HOST, "file-medium"}
WIDTH, HEIGHT = 430, 330  # of a panel's plot area
LEFT, TOP, GAP = 70, 60, 90
STYLE = (
    'text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; '
    "font-size: 12px } .title { font-size: 15px; font-weight: 600 } "
    ".grid { stroke: #e1e5ea } .line { fill: none; stroke-width: 2 } "
    ".reference { stroke-dasharray: 5 4 }"
)


class Panel:
    """One pair of logarithmic axes."""

    def __init__(
        self, left: float, title: str, points: dict[str, list[tuple[float, float]]]
    ) -> None:
        self._left = left
        self._title = title
        self._points = points
        xs = [x for line in points.values() for x, _ in line]
        ys = [y for line in points.values() for _, y in line]
        self._x_range = (math.log10(min(xs)), math.log10(max(xs)))
        self._y_range = (math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))))

    def _x(self, x: float) -> float:
        low, high = self._x_range
        return self._left + WIDTH * (math.log10(x) - low) / max(high - low, 1e-9)

    def _y(self, y: float) -> float:
        low, high = self._y_range
        return TOP + HEIGHT * (1 - (math.log10(y) - low) / max(high - low, 1e-9))

    def draw(self) -> list[str]:
        parts = [f'<text class="title" x="{self._left}" y="{TOP - 18}">{self._title}</text>']
        for decade in range(self._y_range[0], self._y_range[1] + 1):
            y = self._y(10.0**decade)
            parts.append(
                f'<path class="grid" d="M{self._left} {y:.1f}h{WIDTH}"/>'
                f'<text x="{self._left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}'
                "</text>"
            )
        for x in sorted({x for line in self._points.values() for x, _ in line}):
            at = self._x(x)
            parts.append(
                f'<path class="grid" d="M{at:.1f} {TOP}v{HEIGHT}"/>'
                f'<text x="{at:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{_size(x)}</text>'
            )
        for way, line in self._points.items():
            path = "L".join(f"{self._x(x):.1f} {self._y(y):.1f}" for x, y in line)
            kind = "line" if way in OURS else "line reference"
            parts.append(f'<path class="{kind}" stroke="{COLOURS[way]}" d="M{path}"/>')
        return parts


def plot(found: dict[str, Any]) -> str:
    """An SVG of all ways; references are dashed."""
    rows = [row for row in found["rows"] if row["in_flight"] == 1]
    ways = [way for way in COLOURS if any(row["way"] == way for row in rows)]
    latency = {
        way: [(r["nbytes"], r["latency_us"]["p50"] / 1e3) for r in rows if r["way"] == way]
        for way in ways
    }
    throughput = {
        way: [(r["nbytes"], r["gb_per_s"]) for r in rows if r["way"] == way]
        for way in ways if way != "local"  # moves nothing
    }  # fmt: skip
    right = LEFT + WIDTH + GAP
    parts = Panel(LEFT, "ready to usable, p50, ms", latency).draw()
    parts += Panel(right, "one item at a time, GB/s", throughput).draw()
    legend = right + WIDTH + 24
    for index, way in enumerate(ways):
        y = TOP + 14 + 22 * index
        parts.append(
            f'<path class="line" stroke="{COLOURS[way]}" d="M{legend} {y}h22"/>'
            f'<text x="{legend + 30}" y="{y + 4}">{way}</text>'
        )
    width, height = legend + 170, TOP + HEIGHT + 60
    parts.append(
        f'<text x="{LEFT}" y="{height - 12}" fill="#52606d">size of the item; '
        f"{sentence(found['machine'])}</text>"
    )
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="What a hop costs, by size and transport">'
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([opening, *parts, "</svg>"]) + "\n"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"
