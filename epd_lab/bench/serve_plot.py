"""The figures of `epd bench serve` as an image: a bar per server, a column per figure.

Bars of one workload and one column are to scale; the longest of them fills the column.
"""

from __future__ import annotations

from typing import Any

from epd_lab.bench.machine import counted, sentence
from epd_lab.bench.serve_figures import by_stream

COLUMNS = (
    ("requests per second", "req_per_s", 1),
    ("within the SLO, per second", "goodput_req_per_s", 1),
    ("TTFT p50, ms", "ttft_ms_p50", 0),
    ("TPOT p50, ms", "tpot_ms_p50", 1),
    ("ITL p99, ms", "itl_ms_p99", 0),
)
COLOURS = ("#2f6fb0", "#c05621", "#0b7a75", "#7b3fa0", "#b7950b", "#52606d")
LEFT, TOP, WIDTH, GAP, BAR, BETWEEN, LEGEND = 150, 64, 170, 60, 16, 18, 130
STYLE = (
    'text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2933; '
    "font-size: 12px } .title { font-weight: 600 } .name { font-size: 13px; font-weight: 600 }"
)


def plot(found: dict[str, Any]) -> str:
    """An SVG of all rows that are not ratios."""
    rows = [row for row in found["rows"] if "errors" in row]
    servers = list(dict.fromkeys(row["server"] for row in rows))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(servers)}
    parts = [
        f'<text class="title" x="{LEFT + index * (WIDTH + GAP)}" y="{TOP - 14}">{title}</text>'
        for index, (title, _, _) in enumerate(COLUMNS)
    ]
    y = TOP
    for (workload, stream), bars in by_stream(rows).items():
        name = workload if workload == stream else f"{workload}: {stream}"
        middle = y + len(bars) * BAR / 2 + 4
        parts.append(f'<text class="name" x="16" y="{middle:.0f}">{name}</text>')
        for index, (_, key, digits) in enumerate(COLUMNS):
            left = LEFT + index * (WIDTH + GAP)
            longest = max(row["figures"][key] for row in bars) or 1.0
            for line, row in enumerate(bars):
                value = row["figures"][key]
                top, width = y + line * BAR, WIDTH * value / longest
                parts.append(
                    f'<rect x="{left}" y="{top}" width="{width:.1f}" height="{BAR - 3}" '
                    f'fill="{colours[row["server"]]}"/>'
                    f'<text x="{left + width + 5:.1f}" y="{top + 11}">{value:.{digits}f}</text>'
                )
        y += len(bars) * BAR + BETWEEN
    places = range(LEFT, LEFT + LEGEND * len(servers), LEGEND)
    legend = "".join(
        f'<rect x="{x}" y="14" width="14" height="14" fill="{colours[server]}"/>'
        f'<text x="{x + 20}" y="26">{server}</text>'
        for x, server in zip(places, servers, strict=True)
    )
    machine = [sentence(found["machine"])] if "machine" in found else []  # none where predicted
    where = "; ".join([*counted(found.get("gpus", [])), *machine])
    note = f"medians of {found['repeats']}; {where}"
    parts.append(f'<text x="16" y="{y + 14}" fill="#52606d">{note}</text>')
    width, height = LEFT + len(COLUMNS) * (WIDTH + GAP) + 10, y + 34
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Servers under load, per workload">'
        f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#ffffff"/>'
    )
    return "\n".join([opening, legend, *parts, "</svg>"]) + "\n"
