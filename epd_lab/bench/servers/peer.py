"""`epd bench peer`: servers side by side on the same cards, of which one is loaded at a time.

All serve from the beginning to the end.  Each repeat sends the same bytes to each of them, with
images that none has seen, and another one begins; so does what warms them up.  Open arrivals, at a
share of the rate of the slowest, follow the first repeat of all workloads: a run that is cut short
has something of each.  What the cards take from one side's first request to its last answer is that
side's energy: the others are idle, and so in both figures.
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
    seconds: float  # begin no repeat that would end later, except the first ones


Sides = Sequence[tuple[str, Server]]
Run = tuple[list[Sample], Figures]  # of one stream and server


async def measure(plan: ServePlan, beside: Beside, known: Callable[[Any], None]) -> dict[str, Any]:
    """Everything; `known` gets the report so far after each repeat.  Raises ServerError."""
    until_s = time.monotonic() + beside.seconds
    async with AsyncExitStack() as stack:
        sides = []
        for target in plan.targets:
            url = await stack.enter_async_context(target.up())
            server = await stack.enter_async_context(connected(url, plan.request_timeout_s))
            sides.append((target.name, server))
        found = await _report(sides, beside)
        rounds = Rounds(plan, beside, sides, await sides[0][1].wording())
        for workload in plan.workloads:
            await rounds.warm(workload)
        for repeat in range(plan.repeats):
            for workload in plan.workloads:
                if not repeat or time.monotonic() + rounds.took_s[workload.name] <= until_s:
                    await rounds.closed(workload, repeat)
                    found["rows"] = rounds.rows()
                    known(found)
            for workload in () if repeat or not beside.open_s else plan.workloads:
                await rounds.opened(workload)
                found["rows"] = rounds.rows()
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


class Rounds:
    """Runs in turns, and what they came to."""

    def __init__(self, plan: ServePlan, beside: Beside, sides: Sides, wording: Wording) -> None:
        self._plan, self._beside, self._sides, self._wording = plan, beside, sides, wording
        self._runs: dict[Workload, list[list[Run]]] = {}
        self.took_s: dict[str, float] = {}  # the latest repeat of each workload

    async def warm(self, workload: Workload) -> None:
        (stream,) = workload.streams
        assert isinstance(stream.arrival, Closed)
        count = max(1, stream.arrival.concurrency // WARM_SHARE)
        await self._round(_only(workload, replace(stream, name="warm", count=count)), 0)

    async def closed(self, workload: Workload, repeat: int) -> None:
        began_s = time.monotonic()
        self._runs.setdefault(workload, []).append(await self._round(workload, repeat))
        self.took_s[workload.name] = time.monotonic() - began_s

    async def opened(self, workload: Workload) -> None:
        """Of a workload with a closed run, by whose rate it goes."""
        (stream,), (first, *_) = workload.streams, self._runs[workload]
        rate = round(self._beside.share * min(told["req_per_s"] for _, told in first), 2)
        count = math.ceil(rate * self._beside.open_s)
        if count:
            opened = _only(
                workload, replace(stream, name="open", arrival=Poisson(rate), count=count)
            )
            self._runs[opened] = [await self._round(opened, 0)]

    def rows(self) -> Rows:
        """Of each workload and server, in the order of the workloads."""
        order = [workload.name for workload in self._plan.workloads]
        runs = sorted(self._runs.items(), key=lambda pair: order.index(pair[0].name))
        return [
            row_of(
                name, workload, workload.streams[0], *zip(*(run[i] for run in done), strict=True)
            )
            | {"repeats": len(done)}
            for workload, done in runs
            for i, (name, _) in enumerate(self._sides)
        ]

    async def _round(self, workload: Workload, repeat: int) -> list[Run]:
        """The same requests to one server after the other; the runs in the order of the sides."""
        (stream,) = workload.streams
        title = f"{workload.name} {stream.name} {repeat + 1}"
        requests = await requests_of(workload, self._wording, title, repeat)
        runs: dict[str, Run] = {}
        for name, server in self._sides if repeat % 2 == 0 else self._sides[::-1]:
            before_j = energy_j()
            by_stream, late_s = await send(server, f"{name} {title}", workload, requests)
            after_j = energy_j()
            samples = by_stream[stream.name]
            told = figures(samples, self._plan.slo, late_s) | _goodput(samples, self._plan.slo)
            if before_j and after_j:
                told["j_per_req"] = (after_j - before_j) / len(samples)
            runs[name] = samples, told
        return [runs[name] for name, _ in self._sides]


def _goodput(samples: Sequence[Sample], slo: Slo) -> Figures:
    """Requests a second with their first token in time and 99 of 100 gaps below each bound."""
    bounds = {ms: Slo(slo.ttft_s, math.inf, ms / 1e3) for ms in GAPS_MS}
    found = {ms: figures(samples, bound)["goodput_req_per_s"] for ms, bound in bounds.items()}
    return {peer_table.goodput_name(ms): per_s for ms, per_s in found.items()}


def _only(workload: Workload, stream: Stream) -> Workload:
    return replace(workload, streams=(stream,))


def run(plan: ServePlan, beside: Beside, save: Path) -> int:
    """Measure, write after each repeat, and print; 1 if a request failed."""

    def known(found: dict[str, Any]) -> None:
        save.write_text(json.dumps(found, indent=1) + "\n")

    found = uvloop.run(measure(plan, beside, known))
    print(peer_table.table(found))
    return 1 if any_failed(found["rows"]) else 0
