"""The tables of docs/drills are those of the drills; `epd sim model` reports as promised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from epd.fsm import generation
from epd_lab.formal.explore import Mode
from epd_lab.formal.searches import world_of
from epd_lab.sim import drills
from epd_lab.sim.campaigns import coverage
from epd_lab.sim.campaigns.measure import (
    MISSED,
    MISSED_BY_FEW,
    UNMEASURED,
    DrillMeasures,
    measure,
    ranked,
    seeds_needed,
)
from epd_lab.sim.campaigns.models import check_models
from epd_lab.sim.cli.listing import DOCUMENT
from tests.sim.mutants.planting import row


def test_document_is_up_to_date() -> None:
    assert not coverage.is_stale(DOCUMENT, DrillMeasures.stored()), "python -m epd sim list --write"


def test_a_stale_document_is_noticed_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(DOCUMENT.read_text().replace("`kill-encode`", "`kill-nobody`"))
    assert coverage.is_stale(path, DrillMeasures.stored())
    coverage.write(path, DrillMeasures.stored())
    assert path.read_text() == DOCUMENT.read_text()


def test_what_was_measured_is_still_there_and_noticed() -> None:
    """A drill or mutant that is new says "not measured" until somebody measures again."""
    measured = DrillMeasures.stored()
    assert measured.num_seeds >= 20
    assert measured.fired.keys() == measured.ranked.keys() <= {d.name for d in drills.DRILLS}
    named = {(drill.name, mutant) for drill in drills.DRILLS for mutant in drill.mutants}
    assert measured.caught.keys() <= named
    assert measured.caught
    assert measured.missed() == []


def test_a_measurement_outlives_a_plain_write(tmp_path: Path) -> None:
    store, document = tmp_path / "measured.json", tmp_path / "README.md"
    document.write_text(f"a\n{coverage.BEGIN}\n{coverage.END}\nb\n")
    pair = ("slow-bytes", "publish_before_commit")
    measured = DrillMeasures(3, {"slow-bytes": 3}, {"slow-bytes": [2, 0, 1]}, {pair: [0, 2]})
    measured.store(store)
    assert DrillMeasures.stored(store) == measured
    coverage.write(document, DrillMeasures.stored(store))
    row = "| F2 | `slow-bytes` | 3 of 3 | `publish_before_commit` | 2 of 3 |"
    assert row in document.read_text()
    assert "| `release_source_early` | not measured |" in document.read_text()
    assert DrillMeasures.stored(tmp_path / "nothing").caught == {}


def test_a_mutant_that_a_drill_seldom_notices_fails_the_measurement() -> None:
    pair = ("quiet", "no_single_flight")

    def measured(*seeds: int) -> DrillMeasures:
        return DrillMeasures(20, {"quiet": 20}, {"quiet": list(range(20))}, {pair: list(seeds)})

    assert "in 0 of 20" in measured().missed()[0]
    assert "in 2 of 20" in measured(0, 1).missed()[0], "it would need 70 seeds"
    assert measured(0, 1, 2).missed() == []
    assert list(measured(0, 1, 2).seeds("quiet")) == list(range(45))
    for count in range(3, 21):
        seeds = measured(*range(20 - count, 20))
        for missed in (MISSED, MISSED_BY_FEW):
            run = seeds.seeds("quiet", missed)
            assert set(run) & set(seeds.caught[pair]), "the last that are run"


def test_as_many_seeds_are_run_as_the_weakest_mutant_needs() -> None:
    for caught in (7, 10, 15, 20):
        needed = seeds_needed(caught, 20)
        assert (1 - caught / 21) ** needed <= MISSED < (1 - caught / 21) ** (needed - 1)
    pairs = {("quiet", "easy"): list(range(20)), ("quiet", "hard"): list(range(10))}
    measured = DrillMeasures(20, {"quiet": 20}, {"quiet": list(range(19, -1, -1))}, pairs)
    assert list(measured.seeds("quiet")) == list(range(19, 19 - seeds_needed(10, 20), -1))
    assert list(measured.seeds("another")) == list(UNMEASURED)
    ranked_last = DrillMeasures(20, {"quiet": 20}, {"quiet": [1, 2, 3, 4, 16, *range(5, 16)]})
    assert list(ranked_last.seeds("quiet")) == [1, 2, 16], "one is waited out"


def test_who_adds_most_to_those_before_comes_first() -> None:
    edges = [("TABLE", "A", f"Event{n}", "B") for n in range(6)]
    few, many, same, other = edges[:1], edges[:4], edges[1:4], edges[4:]
    assert ranked([set(few), set(many), set(same), set(other)]) == [1, 3, 0, 2]


@pytest.mark.long
def test_a_measurement_of_one_drill_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tuple(drills.by_name(name) for name in ("kill-prefill", "bytes-before-grant"))
    monkeypatch.setattr("epd_lab.sim.drills.DRILLS", chosen)
    known = DrillMeasures(2, {"kill-prefill": 0, "gone": 1}, {"kill-prefill": [], "gone": []}, {})
    found = measure(2, 1, known, ["bytes-before-grant"])
    assert found.fired == {"kill-prefill": 0, "bytes-before-grant": 2}
    assert sorted(found.ranked["bytes-before-grant"]) == [0, 1]
    assert found.caught == {("bytes-before-grant", "drop_parked_bytes"): [0, 1]}
    found = measure(2, 1, found, ["kill-prefill"])
    assert found.fired == {"kill-prefill": 2, "bytes-before-grant": 2}


def test_check_reports_what_it_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_models("generation", as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"passed", "failed", "seeds", "runs", "fired_share", "survivors"}
    assert found["passed"] == 2 and found["runs"][0]["nodes"] > 10
    assert [run["mode"] for run in found["runs"]] == [mode.value for mode in Mode]


@pytest.mark.long
def test_searches_over_several_cores_tell_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for jobs in (1, 2):
        assert check_models("request", jobs=jobs, as_json=True) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        told.append([{**run, "wall_s": 0} for run in runs])
    assert told[0] == told[1] and len(told[0]) > 1


def test_check_fails_with_the_way_to_the_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world_of.cache_clear()  # it remembers what its machines did
    with row(generation.TABLE, generation.S.PLACED, generation.CancelRequested, None):
        assert check_models("generation") == 1
    world_of.cache_clear()
    told = capsys.readouterr().out
    assert "FAILED" in told and "after\n  1. " in told and "state PLACED" in told
    link = world_of("LINK")
    monkeypatch.setattr(link, "model", replace(link.model, nodes=(11,)))
    assert check_models("link") == 1
    assert "12 nodes; its model has 11" in capsys.readouterr().out
