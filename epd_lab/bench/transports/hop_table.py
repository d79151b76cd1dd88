"""The table of hand-overs between two GPUs, from reports of `epd bench hop --device cuda --json`.

A report under docs/bench names for each run the state of the code (`kv`), and holds its rows.
"""

from __future__ import annotations

from typing import Any

from epd_lab.bench.machine import counted
from epd_lab.diagrams.page import markdown_table

HEADER = [
    *("KV, 311 MB", "`engine.kv_layer_groups`", "until all is there, p50 / p99, us", "GB/s"),
    *("behind the last group, p50 / p99, us", "CPU of all, us"),
]


def table(report: dict[str, Any]) -> str:
    cards = ", ".join(counted(report["gpus"]))
    lines = [line for run in report["runs"] for line in _lines(run)]
    return f"{cards}; {report['date']}; n {report['n']}.\n\n{markdown_table(HEADER, lines)}"


def _lines(run: dict[str, Any]) -> list[list[str]]:
    by_name = {row["what"]: row for row in run["rows"]}
    lines = []
    for name, row in by_name.items():
        kind, _, groups = name.partition("/")
        if kind == "KV":
            last = by_name.get(f"last/{groups}")
            rate, cpu = f"{row['gb_per_s']:.0f}", f"{row['cpu_us']:.0f}"
            lines.append([run["kv"], groups, _pair(row), rate, _pair(last) if last else "", cpu])
    return lines


def _pair(row: dict[str, Any]) -> str:
    return f"{row['p50_us']:.0f} / {row['p99_us']:.0f}"
