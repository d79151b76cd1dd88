"""Runs of the simulator as tests, one by one, so that the nearest to a mutant can be chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epd_lab.sim import drills
from epd_lab.sim.campaigns.runner import SimJob, execute

DRILL_SEEDS = 5
SWARM_SEEDS = 200

JOBS = {
    job.title(): job
    for job in (
        *(
            SimJob("drill", drill.name, seed)
            for seed in range(DRILL_SEEDS)
            for drill in drills.DRILLS
        ),
        *(SimJob("swarm", "", seed) for seed in range(SWARM_SEEDS)),
    )
}


@pytest.mark.parametrize("title", JOBS)
def test_run(title: str, record_property: Callable[[str, object], None]) -> None:
    report = execute(JOBS[title])
    if JOBS[title].kind == "drill":
        record_property("fired", report.fired)
    assert report.violations == (), JOBS[title].command()


def must_fire(title: str) -> int:
    """In how many of its seeds the fault of this run's drill must really happen."""
    return int(drills.by_name(JOBS[title].name).must_fire * DRILL_SEEDS)
