"""Do the drills notice the bugs that are put back?  One hunt per mutant.

It ends with the first seed that some drill notices.  How sharp each drill is counts `measure`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from epd_lab.sim import drills
from epd_lab.sim.campaigns.runner import SIMULATOR, Report, SimJob, execute


def noticed(report: Report) -> bool:
    """A checker objected; a simulator that broke down has noticed nothing."""
    return any(not line.startswith(SIMULATOR) for line in report.violations)


@dataclass(frozen=True, slots=True)
class Hunt:
    """A mutant under the drills that name it, seed by seed; then under the swarm's seed for it."""

    mutant: str
    seeds: range


@dataclass(frozen=True, slots=True)
class Catch:
    """How a hunt ended; `report` is the run that noticed, or None: the mutant survived."""

    mutant: str
    runs: int
    report: Report | None


def hunt(task: Hunt) -> Catch:
    """Runs in a worker."""
    runs = 0
    for runs, job in enumerate(_jobs(task), 1):
        report = execute(job)
        if noticed(report):
            return Catch(task.mutant, runs, report)
    return Catch(task.mutant, runs, None)


def _jobs(task: Hunt) -> Iterator[SimJob]:
    for seed in task.seeds:
        for drill in drills.naming(task.mutant):
            yield SimJob("drill", drill.name, seed, task.mutant)
