"""`epd bench serve`: an OpenAI server, or several, under the field's vision workloads.

A server is an URL, or a topology that is started for the measurement and stopped after it.  Servers
are measured one after another on the same requests; each workload's figures are medians of several
repeats, each with new images.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from epd.cli.start.plan import StartPlan as ClusterPlan
from epd.cli.start.supervisor import running
from epd.runtime.lag import watch_lag
from epd_lab.bench import plots
from epd_lab.bench.machine import describe
from epd_lab.bench.servers.figures import (
    Figures,
    Slo,
    by_stream,
    figures,
    median_of,
    ratios,
    spread_of,
    stages_ms,
    table,
)
from epd_lab.bench.servers.openai_load import Sample, Server, connected, send_all
from epd_lab.bench.servers.timelines import chrome_trace
from epd_lab.bench.workload import Stream, Wording, Workload, bodies

PROGRESS_S = 1.0
LAG_PERIOD_S = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send: an URL, or a cluster to start."""

    name: str
    url: str = ""
    cluster: Callable[[], ClusterPlan] | None = None  # planned anew for each start

    @asynccontextmanager
    async def up(self) -> AsyncIterator[str]:
        """Its base URL, while it serves."""
        if self.cluster is None:
            yield self.url
            return
        cluster = self.cluster()
        assert cluster.gateway is not None
        async with running(cluster):
            yield f"http://{cluster.gateway.host}:{cluster.gateway.port}"


Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to measure."""

    targets: tuple[Target, ...]
    workloads: tuple[Workload, ...]
    repeats: int
    slo: Slo
    trace: Path | None = None  # of all requests, for Perfetto
    request_timeout_s: float = 600.0


class ServeProgress:
    """A line on stderr now and then: what is done of a run."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._done = self._failed = 0
        self._began_s = self._shown_s = time.perf_counter()

    def done(self, sample: Sample) -> None:
        self._done += 1
        if sample.error:
            self._failed += 1
            if self._failed == 1:
                self._say(f"first failure: {sample.error}")
        if time.perf_counter() - self._shown_s >= PROGRESS_S or self._done == self._total:
            self._shown_s = time.perf_counter()
            age_s = self._shown_s - self._began_s
            self._say(f"{self._done}/{self._total} in {age_s:.1f} s, {self._failed} failed")

    def _say(self, text: str) -> None:
        print(f"{self._title}: {text}", file=sys.stderr, flush=True)


async def measure(
    plan: ServePlan, told: Callable[[Rows], None] = lambda rows: None
) -> dict[str, Any]:
    """Everything; rows of figures per workload, stream and server.  `told`: gets those of one
    workload and server, as soon as they are measured."""
    rows: Rows = []
    traced: list[tuple[str, Sample]] = []
    for target in plan.targets:
        async with target.up() as url, connected(url, plan.request_timeout_s) as server:
            for workload in plan.workloads:
                known = await _measure_one(server, target.name, workload, plan, traced)
                rows += known
                told(known)
    if plan.trace is not None:
        plan.trace.write_text(json.dumps(chrome_trace(traced)))
    return {"machine": describe(), "repeats": plan.repeats, "rows": arranged(rows, plan)}


async def _measure_one(
    server: Server, name: str, workload: Workload, plan: ServePlan, traced: list[tuple[str, Sample]]
) -> Rows:
    title = f"{name} {workload.name} {{}}/{plan.repeats}"
    runs = [
        await run_once(server, title.format(repeat + 1), workload, repeat)
        for repeat in range(plan.repeats)
    ]
    rows = []
    for stream in workload.streams:
        samples = [run[stream.name] for run, _ in runs]
        repeats = [figures(run[stream.name], plan.slo, late_s) for run, late_s in runs]
        if plan.trace is not None:
            traced += [(f"{name} {stream.name}", s) for one in samples for s in one]
        rows.append(row_of(name, workload, stream, samples, repeats))
    return rows


def row_of(
    name: str,
    workload: Workload,
    stream: Stream,
    samples: Sequence[Sequence[Sample]],
    repeats: Sequence[Figures],
) -> dict[str, Any]:
    """What the repeats of a server's stream came to: of each its samples, and its figures."""
    return {
        "workload": workload.name,
        "stream": stream.name,
        "server": name,
        "arrival": str(stream.arrival),
        "figures": median_of(repeats),
        "spread": spread_of(repeats),
        "stages_ms": stages_ms(sample for one in samples for sample in one),
        "errors": sorted({s.error for one in samples for s in one if s.error})[:5],
    }


async def run_once(
    server: Server, title: str, workload: Workload, repeat: int
) -> tuple[dict[str, list[Sample]], list[float]]:
    """One repeat: make the bodies, then send all streams at once; also how late this loop was."""
    requests = await requests_of(workload, await server.wording(), title, repeat)
    return await send(server, title, workload, requests)


async def requests_of(
    workload: Workload, wording: Wording, title: str, repeat: int
) -> list[list[bytes]]:
    """The bodies of each stream."""

    def made(count: int) -> None:
        if count % 64 == 0:
            print(f"{title}: {count} requests made", file=sys.stderr, flush=True)

    return [
        await asyncio.to_thread(bodies, workload, stream, wording, repeat, made)
        for stream in workload.streams
    ]


async def send(
    server: Server, title: str, workload: Workload, requests: Sequence[Sequence[bytes]]
) -> tuple[dict[str, list[Sample]], list[float]]:
    """All streams at once; the samples of each, and how late this loop was."""
    progress = ServeProgress(title, sum(map(len, requests)))
    late_s: list[float] = []
    watching = asyncio.create_task(watch_lag(late_s.append, LAG_PERIOD_S))
    zero_s = time.perf_counter()
    try:
        samples = await asyncio.gather(
            *(
                send_all(server, wanted, stream.arrival, zero_s, progress.done)
                for stream, wanted in zip(workload.streams, requests, strict=True)
            )
        )
    finally:
        watching.cancel()
    by_name = {s.name: found for s, found in zip(workload.streams, samples, strict=True)}
    return by_name, late_s


def arranged(rows: Rows, plan: ServePlan) -> Rows:
    """By workload, as they were asked for, and behind them each other server by the first."""
    order = [workload.name for workload in plan.workloads]
    ordered = sorted(rows, key=lambda row: order.index(row["workload"]))
    return ordered + compared(ordered)


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each other server by the first, per workload and stream."""
    return [
        {
            "workload": workload,
            "stream": stream,
            "server": f"{other['server']} / {first['server']}",
            "figures": ratios(first["figures"], other["figures"]),
        }
        for (workload, stream), (first, *others) in by_stream(rows).items()
        for other in others
    ]


def run(plan: ServePlan, *, as_json: bool, save: Path | None, plot: Path | None) -> int:
    """Measure and print; `save` keeps the JSON, `plot` an image of it."""
    found = uvloop.run(measure(plan))
    text = json.dumps(found, indent=2)
    if save is not None:
        save.write_text(text + "\n")
    if plot is not None:
        plot.write_text(plots.bars(found))
    print(text if as_json else table(found["rows"]))
    return 1 if any_failed(found["rows"]) else 0


def any_failed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a request failed; rows that compare have no errors of their own."""
    return any(row["figures"].get("failed") and "errors" in row for row in rows)
