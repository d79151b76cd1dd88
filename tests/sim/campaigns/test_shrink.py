"""A failure in a run of 24 requests comes down to what it needs: the shrinker, on real bugs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd_lab.sim import drills
from epd_lab.sim.campaigns.mutants import planted
from epd_lab.sim.campaigns.shrink import MAX_RUNS, Shrinker, checker_of
from epd_lab.sim.run import Plan, run

NUM_REQUESTS = 24
PLANTED = [  # (drill, mutant): bugs that need no fault, one, or memory that runs out
    ("slow-bytes", "publish_before_commit"),
    ("kill-decode", "migration_restarts_numbering"),
    ("few-blocks", "preempted_keeps_blocks"),
    ("late-images", "mid_prompt_is_forgotten"),
    ("same-image", "deepstack_is_dropped"),
    ("kill-encode", "grants_reach_the_successor"),
    ("hang-up-storm", "abort_frees_blocks"),
]
QUICK = 1  # the first


def first_failing(name: str) -> tuple[Plan, Shrinker]:
    drill = drills.by_name(name)
    drill = replace(drill, work=replace(drill.work, num_requests=NUM_REQUESTS))
    for plan in map(drill.plan, range(40)):
        shrinker = Shrinker.of(plan)
        if shrinker is not None:
            return plan, shrinker
    raise AssertionError("no seed notices the bug")


@pytest.mark.parametrize(
    ("drill", "mutant"),
    [
        pytest.param(*pair, marks=[] if n < QUICK else [pytest.mark.long])
        for n, pair in enumerate(PLANTED)
    ],
)
def test_a_planted_bug_comes_down_to_few_requests_and_one_fault(drill: str, mutant: str) -> None:
    with planted(mutant):
        plan, shrinker = first_failing(drill)
        assert len(plan.asks) == NUM_REQUESTS
        checker = checker_of(run(plan).violations[0])
        shortest = shrinker.shrink(plan)
        assert checker in map(checker_of, run(shortest).violations)
    most = 5 if drill == "few-blocks" else 3  # as many as fill the memory
    assert len(shortest.asks) <= most and len(shortest.faults) <= 1
    assert shrinker.runs <= MAX_RUNS == 100
    assert run(shortest).violations == [], "the shortest plan blames the bug and nothing else"


def test_a_budget_that_ends_early_still_fails() -> None:
    with planted("publish_before_commit"):
        plan, _ = first_failing("slow-bytes")
        shrinker = Shrinker(lambda p: bool(run(p).violations), max_runs=3)
        shortest = shrinker.shrink(plan)
        assert shrinker.runs == 3 and run(shortest).violations


def test_what_passes_is_not_shrunk() -> None:
    assert Shrinker.of(drills.by_name("quiet").plan(0)) is None
