"""Affinity beside turns, at each load up to saturation: `python -m tests.plan.affinity` makes
docs/bench/affinity.json, in some minutes.

Eight instances that do everything, with the step costs of one H200.  Their caches are the same; by
turns, a request goes to the next instance, whatever that holds.  Half of the requests, or none,
begin with a text that was sent before, or have a picture that was.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from epd.roles import compose
from epd.scheduling.placement import Candidate, Image, Needs
from epd_lab.bench.servers.figures import Slo, figures
from epd_lab.bench.traces import form
from epd_lab.bench.traces.form import BLOCK_TOKENS, Picture, Trace, TraceRequest
from epd_lab.bench.traces.shapes import repeats, until
from epd_lab.bench.workload import FULL_HD, Workload
from epd_lab.plan.costs import BUNDLED, read
from epd_lab.plan.run import ForecastPlan, gpu_settings
from epd_lab.plan.traced import forecast

REPORT = Path(__file__).parents[2] / "docs/bench/affinity.json"
SLO = Slo(ttft_s=1.0, tpot_s=0.1)
BLOCKS, ANSWER, FOR_S = 8, 16, 3.0
LOADS = {"prefix": (6, 12, 18, 24), "picture": (8, 16, 24, 30)}  # of each instance
LIMITS = ("limits.max_open_requests=100000",)
BY_TURNS = ("placement=fixed", "encode_policy=round_robin", "prefix_affinity=false")


class Turn(NamedTuple):
    """See `placement.Rule`."""

    number: int

    def prefill(self, prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Candidate:
        return prefills[self.number % len(prefills)]

    def decode(self, prefill: Candidate, decodes: Sequence[Candidate]) -> Candidate:
        return prefill if prefill in decodes else decodes[self.number % len(decodes)]

    def encoder(self, image: Image, encoders: Sequence[Candidate], prefill: Candidate) -> Candidate:
        raise AssertionError("round_robin takes an encoder without a rule")


class Turns:
    """See `placement.MakeRule`."""

    def __init__(self) -> None:
        self._requests = itertools.count()

    def __call__(self, asked: Needs, candidates: Sequence[Candidate]) -> Turn:
        return Turn(next(self._requests))


class Case(NamedTuple):
    """One run."""

    kind: str  # what repeats: prefix, picture
    share: float  # of requests that repeat one
    per_s: float  # of each instance
    for_s: float
    instances: int = 8
    by_turns: bool = False


def trace_of(case: Case) -> Trace:
    draw, found = random.Random(f"{case.kind} {case.share} {case.per_s}"), []
    rate = case.per_s * case.instances
    arrivals = until(case.for_s, lambda: draw.expovariate(rate))
    for at_s, number in zip(arrivals, repeats(draw, case.share), strict=False):
        if case.kind == "prefix":
            blocks = tuple(range(number * BLOCKS, (number + 1) * BLOCKS))
            found.append(TraceRequest(at_s, BLOCKS * BLOCK_TOKENS + 256, ANSWER, blocks=blocks))
        else:
            found.append(TraceRequest(at_s, 64, ANSWER, (Picture(*FULL_HD, number),)))
    return form.ordered(found)


def run(case: Case) -> dict[str, float]:
    """Requests a second in all, and those within the SLO.  The gateway's own time is left out: its
    process would be the limit of eight instances."""
    costs = read(BUNDLED)
    host = replace(costs.host, request_ms=0.0, gateway_pixel_ns=0.0)
    settings = gpu_settings([*LIMITS, *(BY_TURNS if case.by_turns else ())])
    plan = ForecastPlan(
        replace(costs, host=host), f"{case.instances}epd", Workload("affinity", ()), settings
    )
    before = compose.RULES["fixed"]
    if case.by_turns:
        compose.RULES["fixed"] = Turns()
    try:
        samples = forecast(plan, trace_of(case))
    finally:
        compose.RULES["fixed"] = before
    found = figures(samples, SLO)
    names = ("req_per_s", "goodput_req_per_s", "ttft_ms_p50", "ttft_ms_p99", "failed", "requests")
    return {name: round(found[name], 2) for name in names}


def compared(case: Case) -> dict[str, Any]:
    ours, turns = run(case), run(case._replace(by_turns=True))
    return {**case._asdict(), "affinity": ours, "turns": turns}


def main() -> None:
    cases = [
        Case(kind, share, per_s, FOR_S)
        for kind, loads in LOADS.items()
        for share in (0.0, 0.5)
        for per_s in loads
    ]
    with ProcessPoolExecutor() as pool:
        rows = []
        for row in pool.map(compared, cases):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    found = {
        "what": "predicted for 8 NVIDIA H200 by step costs, n 1; affinity beside turns",
        "date": time.strftime("%Y-%m-%d"),
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
        "rows": rows,
    }
    REPORT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
