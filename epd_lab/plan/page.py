"""Predictions as a Markdown table, the best of each column of a workload in bold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epd.topology import parse_topology
from epd_lab.bench.servers.figures import by_stream, stream_name

COLUMNS = (  # title, figure, places, whether more is better
    ("req/s", "req_per_s", 1, True),
    ("good/s per GPU", "goodput_req_per_s", 1, True),
    ("TTFT p50", "ttft_ms_p50", 0, False),
    ("TTFT p99", "ttft_ms_p99", 0, False),
    ("TPOT p50", "tpot_ms_p50", 1, False),
    ("ITL p50", "itl_ms_p50", 1, False),
    ("ITL p99", "itl_ms_p99", 1, False),
)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table; times in milliseconds."""
    titles = ("workload", "topology", *(title for title, _, _, _ in COLUMNS))
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for (workload, stream), group in by_stream(rows).items():
        alike = [(row["server"], [_value(row, name) for _, name, _, _ in COLUMNS]) for row in group]
        columns = zip(*(values for _, values in alike), strict=True)
        best = [
            (max if more else min)(round(value, places) for value in column)
            for column, (_, _, places, more) in zip(columns, COLUMNS, strict=True)
        ]
        name = stream_name(workload, stream)
        for server, values in alike:
            cells = (
                f"**{value:.{places}f}**" if round(value, places) == top else f"{value:.{places}f}"
                for value, top, (_, _, places, _) in zip(values, best, COLUMNS, strict=True)
            )
            lines.append(f"| {name} | {server} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _value(row: dict[str, Any], name: str) -> float:
    value = float(row["figures"][name])
    return value / len(parse_topology(row["server"])) if name == "goodput_req_per_s" else value
