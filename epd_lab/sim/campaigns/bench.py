"""How fast the simulator is on one core: what `epd bench sim` prints.

Seconds are CPU seconds of this process.  The simulator has one thread and never waits, so on a core
of its own they are wall-clock seconds, and on a shared one neighbours do not count.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from epd_lab.sim.campaigns.counts import count
from epd_lab.sim.campaigns.day import DEFAULTS, HOUR_S, MIX, Day, live_through
from epd_lab.sim.drills.drill import Drill
from epd_lab.sim.run import run
from epd_lab.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Speed:
    """Loop steps and whole runs (24 requests on 1e1p1d, checked and drained) per CPU second."""

    steps_per_s: float
    runs_per_s: float


def measure(num_runs: int = 20) -> Speed:
    """Run the same drill under `num_runs` seeds on this core."""
    drill = Drill("bench", (), work=Workload(24, spread_s=2.0))
    plans = [drill.plan(seed) for seed in range(num_runs)]
    run(plans[0])  # imports and caches
    started_s = time.process_time()
    steps = sum(run(plan).steps for plan in plans)
    took_s = time.process_time() - started_s
    return Speed(round(steps / took_s, 1), round(num_runs / took_s, 2))


def run_bench(repeats: int, hours: int, *, as_json: bool) -> int:
    """The best of `repeats` measurements: what others do on the machine only makes it slower.
    Then one day (or `hours` of it).  1 when the day broke an invariant."""
    best = max((measure() for _ in range(repeats)), key=lambda speed: speed.runs_per_s)
    day, request = live_through(hours), count().told()
    if as_json:
        speed = {"steps_per_s": best.steps_per_s, "runs_per_s": best.runs_per_s}
        print(json.dumps(speed | {"request": request} | told(day)))
    else:
        print(f"{best.steps_per_s:,.0f} steps/s, {best.runs_per_s:.1f} runs of 24 requests/s")
        print(
            f"{hours} hours at 1 request/s: {day.cpu_s:.1f} CPU s, {day.wall_s:.1f} s; "
            f"{day.num_tokens:,} tokens, {day.steps:,} steps"
        )
        print("a request: " + ", ".join(f"{n:g} {name}" for name, n in request.items()))
    for text in day.violations:
        print(text, file=sys.stderr)
    return 1 if day.violations else 0


def told(day: Day) -> dict[str, object]:
    """A day as programs read it, with the settings that are not the defaults."""
    return {
        "day": {
            "hours": day.num_requests // HOUR_S,
            "requests": day.num_requests,
            "tokens": day.num_tokens,
            "steps": day.steps,
            "cpu_s": round(day.cpu_s, 2),
            "wall_s": round(day.wall_s, 2),
            "violations": len(day.violations),
            "topology": "1e1p1d",
            "not_default": {"kv_blocks": DEFAULTS.num_blocks, "max_tokens": MIX.max_tokens},
        }
    }
