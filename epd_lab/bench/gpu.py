"""`epd bench gpu`: what one, two or four GPUs of a host do, unattended, in one command.

Topologies that share the GPUs out differently are measured one after another under the workloads of
`epd bench serve`, and each is compared with the first, the replicas.  Figures are written after
each workload, so that a measurement that is cut short keeps its own.  A topology that does not
start, or a server that dies, is a line of the report and not its end.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvloop

from epd_lab.bench import plots
from epd_lab.bench.costs.roofline import Roofline
from epd_lab.bench.machine import counted, describe, gpus
from epd_lab.bench.servers.figures import stream_name, table
from epd_lab.bench.servers.serve import Rows, ServePlan, any_failed, arranged, measure

_EVERY = ("text", "3x560", "1x1080p", "1x1080p-256", "4x1080p", "mixed")
SUITES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    1: (("1epd",), ("text", "3x560", "3x560-c1", "1x1080p", "4x1080p", "mixed")),
    2: (("2epd", "1epd", "1e1pd", "1ep1d", "1ep1ed"), _EVERY),
    4: (("4epd", "2ep2ed", "1e3pd", "2e1p1d", "1e2p1d"), _EVERY),
}
"""Number of GPUs: topologies, workloads."""
VERSIONS = ("torch", "triton", "transformers")


async def measure_all(
    plan: ServePlan, out: Path, rooflines: Mapping[str, Roofline] | None = None
) -> dict[str, Any]:
    """Every target of `plan`; `out` has gpu.json, gpu.md and gpu.svg of the figures so far.
    `rooflines`: of the GPUs of each target, where there is one."""
    rows: Rows = []
    broken: dict[str, str] = {}
    found: dict[str, Any] = {
        "gpus": gpus(),
        "versions": {name: version(name) for name in VERSIONS},
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d"),
        "repeats": plan.repeats,
        "slo": {name: bound for name, bound in asdict(plan.slo).items() if bound < math.inf},
        "broken": broken,
        "rows": rows,
    }

    def known(more: Rows) -> None:
        rows.extend(_bounded(row, plan, (rooflines or {}).get(row["server"])) for row in more)
        found["rows"] = arranged(rows, plan)
        _write(found, out)

    for target in plan.targets:
        try:
            await measure(replace(plan, targets=(target,)), known)
        except Exception as error:  # whatever one server does: the others are measured
            broken[target.name] = f"{type(error).__name__}: {error}"
            print(f"{target.name}: {broken[target.name]}", file=sys.stderr, flush=True)
            known([])  # what is written says so
    return found


def report(found: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    cards = ", ".join(counted(found["gpus"])) or "no GPU"
    head = [f"{cards}; {versions}; medians of {found['repeats']}"]
    rows: Sequence[dict[str, Any]] = found["rows"]
    errors = [
        f"{row['server']} {row['workload']} {row['stream']}: {error}"
        for row in rows
        for error in row.get("errors", ())
    ]
    broken = [f"{name} was not measured to the end: {why}" for name, why in found["broken"].items()]
    return "\n".join([*head, table(rows), *errors, *broken])


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table of medians, lowest and highest behind them, and the share of
    the bound by arithmetic."""
    titles = (
        "server", "workload", "req/s", "TTFT p50 / p99 ms", "TPOT p50 ms", "ITL p50 ms",
        "ITL p99 ms", "share of the roofline",
    )  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        if "spread" not in row:
            continue  # it compares two others
        told = row["figures"]
        bound = row["roofline"]
        cells = (
            row["server"],
            stream_name(row["workload"], row["stream"]),
            _spread(row, "req_per_s"),
            f"{told['ttft_ms_p50']:.0f} / {told['ttft_ms_p99']:.0f}",
            f"{told['tpot_ms_p50']:.2f}",
            f"{told['itl_ms_p50']:.1f}",
            _spread(row, "itl_ms_p99"),
            f"{told['req_per_s'] / bound:.0%} of {bound:.1f}" if bound else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(row: dict[str, Any], figure: str) -> str:
    low, high = row["spread"][figure]
    return f"{row['figures'][figure]:.1f} ({low:.1f} to {high:.1f})"


def _bounded(row: dict[str, Any], plan: ServePlan, roofline: Roofline | None) -> dict[str, Any]:
    """With `roofline`: requests a second, by arithmetic, of the prompts that were counted."""
    streams = {(w.name, s.name): s for w in plan.workloads for s in w.streams}
    stream, tokens = streams[row["workload"], row["stream"]], row["figures"]["prompt_tokens"]
    bound = roofline.requests_per_s(stream, tokens) if roofline is not None else None
    return row | {"roofline": bound}


def run(
    plan: ServePlan, out: Path, rooflines: Mapping[str, Roofline] | None = None, *, as_json: bool
) -> int:
    """Measure, write and print; 1 if a request failed or a topology could not be measured."""
    out.mkdir(parents=True, exist_ok=True)
    found = uvloop.run(measure_all(plan, out, rooflines))
    print(json.dumps(found, indent=2) if as_json else report(found))
    return 1 if found["broken"] or any_failed(found["rows"]) else 0


def _write(found: dict[str, Any], out: Path) -> None:
    (out / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
    tables = "\n".join(markdown(found["rows"]))
    (out / "gpu.md").write_text(f"```\n{report(found)}\n```\n\n{tables}\n")
    (out / "gpu.svg").write_text(plots.bars(found))


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
