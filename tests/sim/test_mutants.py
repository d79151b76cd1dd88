"""Every bug that is put back is noticed by each drill that claims it."""

from __future__ import annotations

import pytest

from epd_lab.sim import drills
from epd_lab.sim.hunt import noticed
from epd_lab.sim.measure import MISSED_BY_FEW, Measured
from epd_lab.sim.run import run
from epd_lab.sim.runner import Job, execute
from epd_lab.sim.swarm import draw_plan
from epd_lab.sim.swarm_ranks import NOTICED
from tests.sim.mutants import MUTANTS

MEASURED = Measured.stored()
NOT_MEASURED = range(20)
PAIRS = [(drill.name, mutant) for drill in drills.DRILLS for mutant in drill.mutants]


@pytest.mark.parametrize(("drill", "mutant"), PAIRS)
def test_mutant_is_caught(drill: str, mutant: str) -> None:
    """In one of the very seeds that are run of the drill; first in those that noticed it before."""
    caught = MEASURED.caught.get((drill, mutant))
    seeds = NOT_MEASURED if caught is None else MEASURED.seeds(drill, MISSED_BY_FEW)
    likely = sorted(seeds, key=lambda seed: seed not in (caught or ()))
    assert any(noticed(execute(Job("drill", drill, seed, mutant))) for seed in likely)


@pytest.mark.parametrize("mutant", NOTICED)
def test_groups_of_the_swarm_notice_bugs(mutant: str) -> None:
    """In a seed that has none without."""
    seed = NOTICED[mutant]
    assert execute(Job("swarm", "", seed)).violations == ()
    assert noticed(execute(Job("swarm", "", seed, mutant)))
    with MUTANTS[mutant]():
        assert run(draw_plan(seed)).violations == [], "it takes groups"


def test_drills_and_the_swarm_name_mutants_that_exist() -> None:
    named = {name for drill in drills.DRILLS for name in drill.mutants}
    assert named | NOTICED.keys() == set(MUTANTS)


def test_a_mutant_leaves_no_trace() -> None:
    plan = draw_plan(3)
    before = run(plan).digest
    for manager in MUTANTS.values():
        with manager():
            pass
    assert run(plan).digest == before
