"""The drills under the seeds that are worth it (sim/campaigns/measure.py), the swarm under past
failing ones, and kills at some steps.

The full numbers are `python -m epd sim drill all --seeds 1000` and so on; these are CI's share.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from epd.cli.main import main
from epd_lab.sim import drills
from epd_lab.sim.campaigns.measure import MISSED_BY_FEW, DrillMeasures
from epd_lab.sim.campaigns.runner import SimJob, execute
from epd_lab.sim.campaigns.search import nth_kill, num_kills
from epd_lab.sim.run import WAITED_OUT, run
from epd_lab.sim.swarm.plans import draw_plan

MEASURED = DrillMeasures.stored()
CATALOGUE = Path(__file__).parents[3] / "docs/faults.md"

# fmt: off
PAST = (  # seeds that once failed, the latest last
    4, 5, 9, 10, 16, 21, 22, 35,
    66, 91, 101, 103, 115, 122, 132, 232,
    288, 384, 413, 473, 1022, 1451, 7158, 11918,
    42828, 71480, 100223, 100719, 106449, 300221, 601001, 900314,
    901228, 901955, 7200126, 7300300, 7500062, 100010180, 100103045, 100113809,
)
# fmt: on
# Of plans in which time-outs are drawn, too.
PAST_VARIED = (1796000003421, 1797000002512, 92000365, 95000386, 95001331)
PAST_OF_DRILLS = (
    ("signs-of-life-lost", 500008),
    ("rank-dies-encoding", 500029),
    ("lost-before-it-was-told-of", 500014),
    ("an-image-is-poison", 500098),
)
each_drill = pytest.mark.parametrize("drill", drills.DRILLS, ids=lambda drill: drill.name)
QUICK = {fault: d.name for d in reversed(drills.DRILLS) for fault in d.covers}


@pytest.mark.parametrize(
    "drill",
    [
        pytest.param(d, id=d.name, marks=() if d.name in QUICK.values() else pytest.mark.long)
        for d in drills.DRILLS
    ],
)
def test_drill(drill: drills.Drill) -> None:
    """Until it has happened; the first seed is one in which silence is waited out.  The quick tests
    have one drill of each fault."""
    seeds = sorted(
        MEASURED.seeds(drill.name, MISSED_BY_FEW), key=lambda seed: seed % WAITED_OUT > 0
    )
    for seed in seeds:
        report = execute(SimJob("drill", drill.name, seed))
        assert report.violations == (), report.job.command()
        if report.fired:
            return
    pytest.fail(f"it happened in none of {seeds}")


@pytest.mark.parametrize(("name", "seed"), PAST_OF_DRILLS)
def test_drill_under_past_failing_seeds(name: str, seed: int) -> None:
    report = execute(SimJob("drill", name, seed))
    assert report.violations == (), report.job.command()


@pytest.mark.long
@each_drill
def test_drill_under_many_seeds(drill: drills.Drill) -> None:
    reports = [execute(SimJob("drill", drill.name, seed)) for seed in MEASURED.seeds(drill.name)]
    for report in reports:
        assert report.violations == (), report.job.command()
    fired, share = sum(report.fired for report in reports), drill.must_fire
    assert fired >= max(1, int(share * len(reports))), f"it happened in {fired} of {len(reports)}"


@pytest.mark.long
@each_drill
def test_what_a_drill_is_about_does_not_happen_without_it(drill: drills.Drill) -> None:
    """Else its signs would prove nothing."""
    if not drill.fires and not drill.faults:
        assert not drill.covers, "nothing shows that it happened"
        return
    report = execute(SimJob("calm", drill.name, 0))
    assert report.violations == (), report.job.command()


def test_a_sign_that_shows_anyway_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sign = "ENCODING:Requested"
    careless = replace(drills.by_name("kill-encode"), fires=(sign,))
    monkeypatch.setattr("epd_lab.sim.drills.DRILLS", (careless,))
    assert sign in execute(SimJob("calm", "kill-encode", 0)).violations[0]
    assert main(["sim", "drill", "kill-encode", "--seeds", "1", "--jobs", "1"]) == 1
    assert main(["sim", "replay", "calm", "kill-encode", "--seed", "0"]) == 1


def test_a_drill_whose_fault_never_happened_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However few its seeds are."""
    never = replace(drills.by_name("kill-encode"), fires=("INCOMING:NOWHERE>NOWHERE",))
    monkeypatch.setattr("epd_lab.sim.drills.DRILLS", (never,))
    assert main(["sim", "drill", "kill-encode", "--seed", "1", "--jobs", "1"]) == 1
    assert "what it is about happened in none of its seeds" in capsys.readouterr().out


def test_all_faults_and_all_signs_make_a_drill() -> None:
    drill = drills.by_name("kill-encode")
    result = run(drill.plan(1))
    assert drill.fired(result)
    assert not replace(drill, fires=(*drill.fires, "INCOMING:NOWHERE>NOWHERE")).fired(result)
    assert not replace(drill, faults=drill.faults * 2).fired(result), "one of two happened"


# Each was cured with a drill, a checker or a test of its own.
@pytest.mark.parametrize(
    "seed", [*(pytest.param(s, marks=pytest.mark.long) for s in PAST[:-6]), *PAST[-6:]]
)
def test_seeds_that_once_failed(seed: int) -> None:
    assert run(draw_plan(seed)).violations == []


@pytest.mark.parametrize("seed", PAST_VARIED)
def test_varied_seeds_that_once_failed(seed: int) -> None:
    report = execute(SimJob("swarm", "", seed))
    assert report.violations == (), report.job.command()


@pytest.mark.parametrize("topology", ["1e1p1d", "1epd"])
def test_kill_at_some_steps(topology: str) -> None:
    for number in range(0, num_kills(topology), 97):
        plan = nth_kill(topology, number)
        result = run(plan)
        assert result.violations == [], str(plan.faults)


def test_what_may_fail_has_a_reason() -> None:
    for drill in drills.DRILLS:
        assert drill.may_fail == drills.NOTHING or drill.why, drill.name


def test_every_fault_of_the_catalogue_has_a_drill_or_a_reason_or_another_test() -> None:
    rows = re.findall(r"^\| (F\d+) \| .*? \| (.*) \|$", CATALOGUE.read_text(), re.MULTILINE)
    covered = {fault for drill in drills.DRILLS for fault in drill.covers}
    assert len(rows) > 80
    assert covered | drills.NOT_REACHABLE.keys() <= dict(rows).keys()
    assert not covered & drills.NOT_REACHABLE.keys()
    for fault, rule in rows:
        is_elsewhere = rule.startswith("Open: ") or "`tests/" in rule
        assert fault in covered or fault in drills.NOT_REACHABLE or is_elsewhere, fault
