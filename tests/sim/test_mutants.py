"""Every bug that is put back is noticed by a drill that claims it."""

from __future__ import annotations

import pytest

from epd.sim import drills
from epd.sim.run import run
from epd.sim.shrink import Shrinker
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


def test_shrinking_keeps_the_failure_and_little_else() -> None:
    drill = drills.by_name("slow-bytes")
    with MUTANTS["publish_before_commit"]():

        def fails(plan: object) -> bool:
            return any("[integrity]" in line for line in run(plan).violations)  # type: ignore[arg-type]

        plan = next(p for p in map(drill.plan, range(20)) if fails(p))
        shrinker = Shrinker(fails)
        shortest = shrinker.shrink(plan)
        assert fails(shortest)
    assert len(shortest.asks) <= 3 and len(shortest.faults) <= 1
    assert shrinker.runs_left >= 0
