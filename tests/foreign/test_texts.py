"""What is written for the foreign checkers is legible and the same every time.

None is needed here; tests/fsm/test_models.py searches the models with the machines that run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.cli.main import main
from epd_lab.formal import models
from epd_lab.formal.form import Model, steps
from epd_lab.formal.pair import PAIRS
from epd_lab.formal.promela import promela
from epd_lab.formal.tla import tla
from tests.foreign.__main__ import main as ask_all
from tests.foreign.mutants import UNSEEN, shown_by, table_mutants


@pytest.mark.long
def test_models_are_legible_and_the_same_every_time() -> None:
    for model, again in zip(models(), models(), strict=True):
        if model.name not in PAIRS or model.name == "PAIR":
            _is_legible(model, again)


def _is_legible(model: Model, again: Model) -> None:
    for write in (promela, tla):
        text = write(model)
        assert text == write(again)
        for part in model.parts:
            assert all(state.name in text for state in part.table.states)
        for law in (*model.laws, *model.promises):
            assert law.words in text and law.name in text
            assert 1 <= law.number <= 7
    names = [step.name for step in steps(model)]
    assert len(names) == len(set(names))


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagrams", "--promela", "--out", str(tmp_path / "p")]) == 0
    assert main(["diagrams", "--tla", "--out", str(tmp_path / "t")]) == 0
    names = {model.name for model in models()}
    assert {path.stem for path in (tmp_path / "p").glob("*.pml")} == names
    assert {path.stem for path in (tmp_path / "t").glob("*.tla")} == names
    assert {path.stem for path in (tmp_path / "t").glob("*.cfg")} == names
    assert f"{len(names)} files written" in capsys.readouterr().out


def test_every_mutant_of_a_table_can_be_asked_about() -> None:
    """Whoever adds one runs the long tests of test_foreign.py, which say whether it is seen."""
    mutants = table_mutants()
    for name, table in mutants.items():
        assert promela(shown_by(name, table)), name
    assert UNSEEN.keys() <= mutants.keys()
    assert all(UNSEEN.values())


def test_a_model_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_all(["LINK", "LINKS"]) == 2
    assert "no model LINKS" in capsys.readouterr().err
