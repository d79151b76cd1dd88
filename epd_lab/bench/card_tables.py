"""The tables of docs/cards, peers.md, topologies.md and transports.md, from reports
under docs/bench.

A card's file, such as h200.json, has rows in the form of gpu.json (`epd bench gpu`), each with its
date and its number of runs (`repeats`).  It names the reports that stand beside it whole.  Names of
figures carry their units.  A report of `epd bench probe`, `formats`, `peer` or `hop` is a table of
its own.  `epd diagrams` writes the tables, `epd diagrams --check` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from epd.topology import parse_topology
from epd_lab.bench import peer_table, split_table
from epd_lab.bench.costs import formats, probe_table
from epd_lab.bench.servers.figures import stream_name
from epd_lab.bench.transports import hop_table
from epd_lab.bench.workload import NAMED
from epd_lab.diagrams.page import markdown_table

PLACE = re.compile(
    r"(<!-- table of (\w+\.json), by `epd diagrams` -->\n).*?(<!-- end -->)", re.DOTALL
)
HEADER = [
    *("GPUs", "shape", "workload", "topology", "req/s"),
    *("TTFT p50 / p99, ms", "TPOT p50, ms", "ITL p99, ms", "n", "date"),
]


def with_tables(document: str, folder: Path) -> str:
    """The document with each marked table written anew from its file in `folder`."""
    return PLACE.sub(lambda m: f"{m[1]}\n{table(folder / m[2])}\n\n{m[3]}", document)


def table(path: Path) -> str:
    """By number of GPUs, shape and workload; topologies in the order in which they came."""
    report = msgspec.json.decode(path.read_bytes())
    if "sides" in report:
        return peer_table.table(report)
    if "runs" in report:
        return hop_table.table(report)
    if "splits" in report:
        return split_table.table(report, path.parent)
    if "whole" in report:
        return formats.table(report)
    if "reports" not in report:
        return probe_table.table(report)
    rows = list(_rows(report, path.parent))
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    workloads = list(NAMED)
    rows.sort(
        key=lambda row: (row["gpus"], shapes.index(row["shape"]), workloads.index(row["workload"]))
    )
    return markdown_table(HEADER, [_cells(row) for row in rows])


def _rows(found: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    for named in found["reports"]:
        report = msgspec.json.decode((folder / named["file"]).read_bytes())
        for row in report["rows"]:
            if row["server"] in named["servers"] and row["stream"] in named["streams"]:
                yield {
                    **row,
                    "gpus": len(parse_topology(row["server"])),
                    "repeats": report["repeats"],
                    "date": named["date"],
                    "shape": named["shape"],
                }
    yield from found["rows"]


def _cells(row: dict[str, Any]) -> list[str]:
    workload, stream, found = row["workload"], row["stream"], row["figures"]
    first = [found[name] for name in ("ttft_ms_p50", "ttft_ms_p99") if name in found]
    return [
        str(row["gpus"]),
        row["shape"],
        stream_name(workload, stream),
        f"`{row['server']}`",
        _rounded(found, "req_per_s", 2 if found["req_per_s"] < 1 else 1),
        " / ".join(f"{value:.0f}" for value in first),
        _rounded(found, "tpot_ms_p50", 1),
        _rounded(found, "itl_ms_p99", 1),
        str(row["repeats"]),
        row["date"],
    ]


def _rounded(figures: dict[str, float], name: str, places: int) -> str:
    return f"{figures[name]:.{places}f}" if name in figures else ""
