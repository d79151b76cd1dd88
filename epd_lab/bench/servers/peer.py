"""`epd bench peer`: servers side by side on the same cards, of which one is loaded at a time.

All serve from the beginning to the end.  Each repeat sends the same bytes to each of them, with
images that none has seen, and begins with another one; so does what warms them up.  Then come open
arrivals at a share of the capacity of the slowest.  What the cards take from one side's first
request to its last answer is that side's energy: the others are idle, and so in both figures.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from epd_lab.bench import peer_table
from epd_lab.bench.gpu import VERSIONS, version
from epd_lab.bench.machine import describe, energy_j, gpus
from epd_lab.bench.servers.figures import Figures, Slo, figures
from epd_lab.bench.servers.openai_load import Sample, Server, ServerError, connected
from epd_lab.bench.servers.serve import Rows, ServePlan, any_failed, requests_of, row_of, send
from epd_lab.bench.workload import Closed, Poisson, Stream, Wording, Workload

GAPS_MS = (25, 50, 100, 200)
WARM_SHARE = 2  # one of so many users asks before the first repeat


@dataclass(frozen=True, slots=True)
class Beside:
    """What is measured besides `ServePlan`."""

    flags: dict[str, str]  # of each server, for the report
    share: float  # of the least capacity arrives in the open loop
    open_s: float  # for how long; 0: there is none
    seconds: float  # begin no repeat that would end later


Sides = Sequence[tuple[str, Server]]
Run = tuple[list[Sample], Figures]  # of one stream and server


async def measure(plan: ServePlan, beside: Beside, known: Callable[[Any], None]) -> dict[str, Any]:
    """Everything; `known` gets the report so far after each workload.  Raises ServerError."""
    began_s = time.monotonic()
    async with AsyncExitStack() as stack:
        sides = []
        for target in plan.targets:
            url = await stack.enter_async_context(target.up())
            server = await stack.enter_async_context(connected(url, plan.request_timeout_s))
            sides.append((target.name, server))
        found = await _report(sides, beside)
        wording = await sides[0][1].wording()
        for index, workload in enumerate(plan.workloads, 1):
            until_s = began_s + beside.seconds * index / len(plan.workloads)
            found["rows"] += await _workload(plan, beside, sides, workload, wording, until_s)
            known(found)
    return found


async def _report(sides: Sides, beside: Beside) -> dict[str, Any]:
    models = sorted({server.model for _, server in sides})
    if len(models) > 1:
        raise ServerError(
            f"the servers call their models {', '.join(models)}, and a request has the name of "
            "one: no two would get the same bytes; start them with one --served-model-name"
        )
    return {
        "gpus": gpus(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in VERSIONS},
        "machine": describe(),
        "open_share": beside.share,
        "sides": [
            {
                "name": name,
                "version": json.loads(await server.text("/version"))["version"],
                "flags": beside.flags.get(name, ""),
            }
            for name, server in sides
        ],
        "rows": [],
    }


async def _workload(
    plan: ServePlan, beside: Beside, sides: Sides, workload: Workload, wording: Wording,
    until_s: float,
) -> Rows:  # fmt: skip
    """The rows of each server in the closed loop, and those in the open one."""
    (stream,) = workload.streams
    assert isinstance(stream.arrival, Closed)
    until_s -= beside.open_s * len(sides)
    few = replace(stream, name="warm", count=max(1, stream.arrival.concurrency // WARM_SHARE))
    await _round(plan.slo, sides, _only(workload, few), wording, 0)
    runs: list[list[Run]] = []
    took_s = 0.0
    while len(runs) < plan.repeats and (not runs or time.monotonic() + took_s <= until_s):
        began_s = time.monotonic()
        runs.append(await _round(plan.slo, sides, workload, wording, len(runs)))
        took_s = time.monotonic() - began_s
    rows = _rows(sides, workload, runs)
    rate = round(beside.share * min(row["figures"]["req_per_s"] for row in rows), 2)
    if count := math.ceil(rate * beside.open_s):
        opened = replace(stream, name="open", arrival=Poisson(rate), count=count)
        alone = _only(workload, opened)
        rows += _rows(sides, alone, [await _round(plan.slo, sides, alone, wording, 0)])
    return rows


async def _round(
    slo: Slo, sides: Sides, workload: Workload, wording: Wording, repeat: int
) -> list[Run]:
    """The same requests to one server after the other; the runs in the order of `sides`."""
    (stream,) = workload.streams
    title = f"{workload.name} {stream.name} {repeat + 1}"
    requests = await requests_of(workload, wording, title, repeat)
    runs: dict[str, Run] = {}
    for name, server in sides if repeat % 2 == 0 else sides[::-1]:
        before_j = energy_j()
        by_stream, late_s = await send(server, f"{name} {title}", workload, requests)
        after_j = energy_j()
        samples = by_stream[stream.name]
        told = figures(samples, slo, late_s) | _goodput(samples, slo)
        if before_j and after_j:
            told["j_per_req"] = (after_j - before_j) / len(samples)
        runs[name] = samples, told
    return [runs[name] for name, _ in sides]


def _goodput(samples: Sequence[Sample], slo: Slo) -> Figures:
    """Requests a second with their first token in time and 99 of 100 gaps below each bound."""
    bounds = {ms: Slo(slo.ttft_s, math.inf, ms / 1e3) for ms in GAPS_MS}
    found = {ms: figures(samples, bound)["goodput_req_per_s"] for ms, bound in bounds.items()}
    return {peer_table.goodput_name(ms): per_s for ms, per_s in found.items()}


def _rows(sides: Sides, workload: Workload, runs: Sequence[Sequence[Run]]) -> Rows:
    (stream,) = workload.streams
    return [
        row_of(name, workload, stream, *zip(*(run[index] for run in runs), strict=True))
        | {"repeats": len(runs)}
        for index, (name, _) in enumerate(sides)
    ]


def _only(workload: Workload, stream: Stream) -> Workload:
    return replace(workload, streams=(stream,))


def run(plan: ServePlan, beside: Beside, save: Path) -> int:
    """Measure, write after each workload, and print; 1 if a request failed."""

    def known(found: dict[str, Any]) -> None:
        save.write_text(json.dumps(found, indent=1) + "\n")

    found = uvloop.run(measure(plan, beside, known))
    print(peer_table.table(found))
    return 1 if any_failed(found["rows"]) else 0
