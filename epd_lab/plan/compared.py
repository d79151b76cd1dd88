"""What was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from epd.config import ConfigError
from epd_lab.bench.servers.figures import stream_name
from epd_lab.plan.costs import Comparison
from epd_lab.plan.search import TIE

Rows = Sequence[dict[str, Any]]
FIGURES = (
    ("req/s", "req_per_s"),
    ("TTFT p50", "ttft_ms_p50"),
    ("p99", "ttft_ms_p99"),
    ("TPOT p50", "tpot_ms_p50"),
    ("ITL p50", "itl_ms_p50"),
    ("p99", "itl_ms_p99"),
)


@dataclass(frozen=True, slots=True)
class MeasuredReport:
    """What was measured: rows with their `key` (server, workload, stream), and under which SLO."""

    name: str
    date: str
    slo: dict[str, float]
    rows: list[dict[str, Any]]
    repeats: int = 1


def read_report(path: Path) -> MeasuredReport:
    """Of a `gpu.json`, or of what `epd bench serve --save` wrote, without ratios.

    Raises ConfigError.
    """
    try:
        found = msgspec.json.decode(path.read_bytes())
        rows = [
            {"key": (row["server"], row["workload"], row["stream"]), "figures": row["figures"]}
            for row in found["rows"]
            if " / " not in row["server"]
        ]
        date, slo = found.get("date", ""), found.get("slo", {})
        return MeasuredReport(path.name, date, slo, rows, found.get("repeats", 1))
    except OSError as error:
        raise ConfigError(f"--measured {path}: {error.strerror}") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--measured {path} has no rows of figures; give the gpu.json of `epd bench gpu`, or "
            "what `epd bench serve --save` wrote"
        ) from error


def comparison(predicted: Rows, report: MeasuredReport) -> Comparison:
    """By goodput of all streams of a workload together.  The better of two is also right where
    their measured goodput is alike (`TIE`)."""
    keyed = [{"key": (r["server"], r["workload"]), "figures": r["figures"]} for r in predicted]
    ours, theirs = goodput(keyed), goodput(report.rows)
    by_workload: dict[str, list[str]] = {}
    for server, workload in theirs:
        by_workload.setdefault(workload, []).append(server)
    right = pairs = 0
    for workload, servers in by_workload.items():
        if len(servers) > 1:
            first, second = sorted(servers, key=lambda name: -theirs[name, workload])[:2]
            is_alike = theirs[second, workload] >= theirs[first, workload] * (1 - TIE)
            right += is_alike or ours[first, workload] > ours[second, workload]
            pairs += 1
    off = [
        (workload, server, round(ours[server, workload] / rate - 1, 3))
        for (server, workload), rate in theirs.items()
        if rate
    ]
    return Comparison(report.name, report.date, tuple(off), (right, pairs))


def goodput(rows: Rows) -> dict[tuple[str, str], float]:
    """By server and workload, of all its streams together."""
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        server, workload = row["key"][:2]
        rate = row["figures"]["goodput_req_per_s"]
        found[server, workload] = found.get((server, workload), 0.0) + rate
    return found


def errors(predicted: Rows, measured: Rows) -> list[tuple[tuple[str, str, str], dict[str, float]]]:
    """For each row that both have, by how much of the measured figure the prediction is off."""
    by_key = {row["key"]: row["figures"] for row in measured}
    found = []
    for row in predicted:
        key = (row["server"], row["workload"], row["stream"])
        if (truth := by_key.get(key)) is not None:
            wanted = [name for _, name in FIGURES if truth.get(name)]
            found.append((key, {name: row["figures"][name] / truth[name] - 1 for name in wanted}))
    return found


def table(predicted: Rows, measured: Rows) -> str:
    """Two lines for each row that both have: predicted, measured; errors behind."""
    truths = {row["key"]: row["figures"] for row in measured}
    figures = {(r["server"], r["workload"], r["stream"]): r["figures"] for r in predicted}
    head = f"{'topology':10} {'workload':18} {'':10}"
    lines = [head + "".join(f"{title:>10}" for title, _ in FIGURES)]
    for key, off in errors(predicted, measured):
        server, workload, stream = key
        name = stream_name(workload, stream)
        for title, found in (("predicted", figures[key]), ("measured", truths[key])):
            cells = "".join(f"{found.get(name, 0.0):10.1f}" for _, name in FIGURES)
            lines.append(f"{server:10} {name:18} {title:10}{cells}")
        cells = "".join(f"{off[n]:+10.0%}" if n in off else f"{'':10}" for _, n in FIGURES)
        lines.append(f"{'':29} {'error':10}{cells}")
    if len(lines) == 1:
        lines.append("nothing that was predicted was measured there: names must be equal")
    return "\n".join(lines)
