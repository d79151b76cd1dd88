"""Every bug that is put back is noticed by a drill that claims it."""

from __future__ import annotations

import pytest

from epd.sim import drills
from epd.sim.run import run
from epd.sim.swarm import draw_plan
from tests.sim.mutants import MUTANTS

MAX_SEEDS = 60


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    claiming = [drill for drill in drills.DRILLS if name in drill.mutants]
    assert claiming, f"no drill claims to catch {name}"
    with MUTANTS[name]():
        for seed in range(MAX_SEEDS):
            if any(run(drill.plan(seed)).violations for drill in claiming):
                return
    pytest.fail(f"{name} survived {MAX_SEEDS} seeds")


def test_drills_name_mutants_that_exist() -> None:
    named = {name for drill in drills.DRILLS for name in drill.mutants}
    assert named == set(MUTANTS)


def test_a_mutant_leaves_no_trace() -> None:
    plan = draw_plan(3)
    before = run(plan).digest
    for manager in MUTANTS.values():
        with manager():
            pass
    assert run(plan).digest == before
