"""Many runs: what is counted, and that Ctrl-C ends them with what there is."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from epd.cli.main import main
from epd_lab.sim import drills
from epd_lab.sim.campaigns.runner import SimJob, Summary, execute_all
from epd_lab.sim.run import run
from epd_lab.sim.workload import Workload
from epd_lab.sim.world import World


def jobs(interrupt_at: int = -1) -> Iterator[SimJob]:
    for seed in range(40):
        if seed == interrupt_at:
            signal.raise_signal(signal.SIGINT)
        yield SimJob("drill", "quiet", seed)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_an_interrupted_search_still_sums_up(workers: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    summary = execute_all(jobs(interrupt_at=11), 40, workers)
    assert summary.interrupted and 0 < summary.reports <= 11 and summary.steps > 0
    assert signal.getsignal(signal.SIGINT) is before


def spin(plan: object, *, only_whether: bool) -> None:
    while True:
        pass


def test_a_run_without_an_end_fails_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_lab.sim.campaigns.runner.RUN_LIMIT_S", 0.1)
    monkeypatch.setattr("epd_lab.sim.campaigns.runner.run", spin)
    summary = execute_all([SimJob("drill", "quiet", seed) for seed in range(4)], 4, 2)
    assert [report.job.seed for report in summary.failures] == [0, 1, 2, 3]
    assert "[liveness]" in summary.failures[0].violations[0]


def test_failures_end_a_search_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_lab.sim.campaigns.runner.run", lambda plan, **_: 1 / 0)
    all_jobs = [SimJob("drill", "quiet", seed) for seed in range(30)]
    assert len(execute_all(all_jobs, 30, 1).failures) == 30
    assert len(execute_all(all_jobs, 30, 1, stop_after=2).failures) == 2


def test_all_drills_are_one_search_and_the_summary_is_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(drills.by_name(name) for name in ("quiet", "kill-encode"))
    monkeypatch.setattr("epd_lab.sim.drills.DRILLS", few)
    few_seeds = ["--first-seed", "1", "--seeds", "2"]
    assert main(["sim", "drill", "all", *few_seeds, "--jobs", "2", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["passed"] == 2 * (2 + 1), "two seeds each, and one in which nothing happens"
    assert not found["interrupted"]
    assert found["drills"]["kill-encode"] == {"seeds": 2, "failed": 0, "fired": 2}
    assert "kill-encode" in told.err


@pytest.mark.parametrize(
    ("fired", "reports", "share", "too_seldom"),
    [
        (44, 50, 0.9, False), (37, 50, 0.9, False), (36, 50, 0.9, True), (49, 50, 1.0, True),
        (50, 50, 1.0, False), (0, 50, 0.0, False), (5, 10, 0.9, True), (840, 1000, 0.9, True),
    ],
)  # fmt: skip
def test_a_drill_may_be_unlucky(
    *, fired: int, reports: int, share: float, too_seldom: bool
) -> None:
    assert Summary(reports, fired).fires_too_seldom(share) == too_seldom


def test_a_failing_seed_is_named_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epd_lab.sim.campaigns.runner.run", lambda plan, **_: 1 / 0)
    summary = execute_all([SimJob("drill", "quiet", 3)], 1, 1)
    assert summary.failures[0].violations[0].startswith("[simulator]")
    assert "replay drill quiet --seed 3" in capsys.readouterr().err


def num_worlds() -> int:
    return sum(type(thing) is World for thing in gc.get_objects())


def test_what_runs_leave_behind_is_found() -> None:
    """A search of many thousand runs needs no more memory than one of fifty."""
    quiet = replace(drills.by_name("quiet"), work=Workload(4))
    gc.collect()
    left, before = [], num_worlds()  # what a test that failed has kept is not ours
    for num_runs in (5, 20):
        gc.collect()
        for seed in range(num_runs):
            result = run(quiet.plan(seed))
            assert result.passed
            assert num_worlds() <= before
        left.append(gc.collect())
    assert left[1] <= 2 * left[0]  # of nothing, nothing
