"""How fast the simulator is on one core: what `epd bench sim` prints."""

from __future__ import annotations

import time
from dataclasses import dataclass

from epd.sim.drills import Drill
from epd.sim.run import run
from epd.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Speed:
    """Loop steps and whole runs (24 requests on 1e1p1d, checked and drained) per second."""

    steps_per_s: float
    runs_per_s: float


def measure(num_runs: int = 20) -> Speed:
    """Run the same drill under `num_runs` seeds on this core."""
    drill = Drill("bench", (), work=Workload(24, spread_s=2.0))
    plans = [drill.plan(seed) for seed in range(num_runs)]
    started_s = time.perf_counter()
    steps = sum(run(plan).steps for plan in plans)
    took_s = time.perf_counter() - started_s
    return Speed(round(steps / took_s, 1), round(num_runs / took_s, 2))
