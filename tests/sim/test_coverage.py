"""The tables of docs/simulation.md are those of the drills; `epd sim check` reports as promised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd.fsm.transfer import S
from epd.sim import coverage
from epd.sim.cli_list import DOCUMENT
from epd.sim.model.check import check_model
from epd.sim.model.pair import PairModel, Scenario
from epd.sim.model.scenarios import SEARCHES, Search


def test_document_is_up_to_date() -> None:
    assert not coverage.is_stale(DOCUMENT), "python -m epd sim list --write"


def test_a_stale_document_is_noticed_and_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "simulation.md"
    path.write_text(DOCUMENT.read_text().replace("`kill-encode`", "`kill-nobody`"))
    assert coverage.is_stale(path)
    coverage.write(path)
    assert path.read_text() == DOCUMENT.read_text()


SMALL = tuple(search for search in SEARCHES if search.name == "timers last")


def test_check_reports_what_it_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_model(as_json=True, searches=SMALL) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"passed", "failed", "seeds", "runs", "fired_share", "survivors"}
    assert found["passed"] == 1 and found["runs"][0]["pairs"] > 10


def test_check_fails_with_the_way_to_the_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    perform = PairModel._perform

    def twice(self: PairModel, pair: object, side: object, effect: object) -> object:
        again = perform(self, pair, side, effect)  # type: ignore[arg-type]
        return perform(self, again, side, effect)  # type: ignore[arg-type]

    monkeypatch.setattr(PairModel, "_perform", twice)
    assert check_model(searches=(Search("planted", Scenario(), 1),)) == 1
    told = capsys.readouterr().out
    assert "FAILED" in told and "after\n  1. " in told and S.PENDING.name in told
