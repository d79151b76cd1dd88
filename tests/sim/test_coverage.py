"""The tables of docs/simulation.md are those of the drills; `epd sim model` reports as promised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from epd.fsm.transfer import S
from epd.sim import coverage, drills
from epd.sim.cli_list import DOCUMENT
from epd.sim.hunt import Measured
from epd.sim.model.check import check_models
from epd.sim.model.pair import PairModel, Scenario
from epd.sim.model.scenarios import TRANSFER, Search


def test_document_is_up_to_date() -> None:
    assert not coverage.is_stale(DOCUMENT, Measured.stored()), "python -m epd sim list --write"


def test_a_stale_document_is_noticed_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "simulation.md"
    path.write_text(DOCUMENT.read_text().replace("`kill-encode`", "`kill-nobody`"))
    assert coverage.is_stale(path, Measured.stored())
    coverage.write(path, Measured.stored())
    assert path.read_text() == DOCUMENT.read_text()


def test_what_was_measured_is_still_there_and_noticed() -> None:
    """A drill or mutant that is new says "not measured" until somebody measures again."""
    measured = Measured.stored()
    assert measured.num_seeds >= 20
    assert measured.fired.keys() <= {drill.name for drill in drills.DRILLS}
    named = {(drill.name, mutant) for drill in drills.DRILLS for mutant in drill.mutants}
    assert measured.caught.keys() <= named
    assert measured.caught
    assert measured.missed() == []


def test_a_measurement_outlives_a_plain_write(tmp_path: Path) -> None:
    store, document = tmp_path / "measured.json", tmp_path / "simulation.md"
    document.write_text(f"a\n{coverage.BEGIN}\n{coverage.END}\nb\n")
    small = replace(drills.by_name("slow-bytes"), mutants=("publish_before_commit",))
    measured = Measured(3, {small.name: 3}, {(small.name, "publish_before_commit"): 2})
    measured.store(store)
    coverage.write(document, Measured.stored(store))
    row = "| F2 | `slow-bytes` | 3 of 3 | `publish_before_commit` | 2 of 3 |"
    assert row in document.read_text()
    assert "| `release_source_early` | not measured |" in document.read_text()
    assert Measured.stored(tmp_path / "nothing").caught == {}


def test_a_mutant_that_a_drill_never_notices_fails_the_measurement() -> None:
    assert Measured(4, {}, {("quiet", "no_single_flight"): 0}).missed()
    assert Measured(4, {}, {("quiet", "no_single_flight"): 1}).missed() == []


SMALL = tuple(search for search in TRANSFER if search.name == "timers last")


def test_check_reports_what_it_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_models(as_json=True, searches=SMALL) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"passed", "failed", "seeds", "runs", "fired_share", "survivors"}
    assert found["passed"] == 1 and found["runs"][0]["nodes"] > 10


def test_searches_over_several_cores_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for jobs in (1, 2):
        assert check_models("instance", jobs=jobs, as_json=True) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        told.append([{**run, "wall_s": 0} for run in runs])
    assert told[0] == told[1] and len(told[0]) > 1


def test_check_fails_with_the_way_to_the_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = PairModel._perform

    def twice(self: PairModel, pair: object, side: object, effect: object) -> object:
        again = perform(self, pair, side, effect)  # type: ignore[arg-type]
        return perform(self, again, side, effect)  # type: ignore[arg-type]

    monkeypatch.setattr(PairModel, "_perform", twice)
    planted = Search("transfer", "planted", lambda: PairModel(Scenario()), 1)
    assert check_models(searches=(planted,)) == 1
    told = capsys.readouterr().out
    assert "FAILED" in told and "after\n  1. " in told and S.PENDING.name in told
