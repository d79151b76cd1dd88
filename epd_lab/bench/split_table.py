"""Where a split holds an SLO for more requests than replicas, and where it does not.

A report has loads that were planned or measured, and names the comparison (`epd bench gpu`) that
stands beside it whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epd_lab.diagrams.page import markdown_table
from epd_lab.plan.compared import goodput, read_report
from epd_lab.plan.topologies import is_replicas

HEADER = ["load", "SLO", "replicas, good/s", "split, good/s", "split by replicas", "how", "n"]


def table(report: dict[str, Any], folder: Path) -> str:
    """The largest gain of a split first; loads are named as in `epd plan`."""
    rows = [*report["splits"], *_beside(folder / report["beside"])]
    rows.sort(key=lambda row: row["split"][1] / row["replicas"][1], reverse=True)
    return markdown_table(HEADER, [_cells(row) for row in rows])


def _beside(path: Path) -> list[dict[str, Any]]:
    report, found = read_report(path), dict[str, dict[str, float]]()
    for (server, workload), rate in goodput(report.rows).items():
        found.setdefault(workload, {})[server] = rate
    slo = ",".join(f"{name.removesuffix('_s')}={_time(s)}" for name, s in report.slo.items())
    common = {"slo": slo, "how": f"measured {report.date}", "n": report.repeats}
    return [
        {
            "load": load,
            "replicas": _best(rates, replicas=True),
            "split": _best(rates, replicas=False),
            **common,
        }
        for load, rates in found.items()
    ]


def _time(s: float) -> str:
    return f"{s:.0f}s" if s >= 1 else f"{s * 1e3:.0f}ms"


def _best(rates: dict[str, float], *, replicas: bool) -> tuple[str, float]:
    some = [pair for pair in rates.items() if is_replicas(pair[0]) is replicas]
    return max(some, key=lambda pair: pair[1])


def _cells(row: dict[str, Any]) -> list[str]:
    (replicas, theirs), (split, its) = row["replicas"], row["split"]
    sides = f"`{replicas}`: {theirs:.2f}", f"`{split}`: {its:.2f}"
    return [row["load"], row["slo"], *sides, f"{its / theirs:.2f}", row["how"], str(row["n"])]
