"""The models of `epd_lab.formal`, walked with the machines that run; no foreign checker is needed.

Guards and actions as data are those of Python in every moment that can be reached, no model is
vacuous, and what is written for the checkers is legible and the same every time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.cli.main import main
from epd.fsm.kernel import Table
from epd_lab.formal import PAIRS, TABLES, models
from epd_lab.formal.form import Model, steps
from epd_lab.formal.promela import promela
from epd_lab.formal.tla import tla
from epd_lab.sim.model.explore import explore
from tests.foreign.__main__ import main as ask_all
from tests.foreign.agreement import has_as_many, walked
from tests.foreign.mutants import UNSEEN, shown_by, table_mutants
from tests.foreign.walk import differences

ALONE = [model for model in models() if model.name not in PAIRS]
each_alone = pytest.mark.parametrize("model", ALONE, ids=lambda model: model.name)


@each_alone
def test_every_law_holds_and_data_say_what_python_does(model: Model) -> None:
    walk = walked(model)
    space = explore(walk)
    wrong = [line for node in space.parents for line in differences(walk, node)]
    assert not wrong, wrong[:3]
    assert has_as_many(model, len(space.parents)), "tests/foreign/states.json has another number"


@pytest.mark.parametrize(
    "table",
    [t for t in TABLES if t.name not in ("OUTGOING", "INCOMING")],  # fsm/test_transfer_pair.py
    ids=lambda table: table.name,
)
def test_every_state_is_reached_and_every_event_fired(table: Table) -> None:
    states, events = set(), set()
    for model in ALONE:
        if model.parts[0].table is table:
            walk = walked(model)
            states |= {walk.values(node)["state"] for node in explore(walk).parents}
            events |= walk.fired
    assert states == {state.name for state in table.states}
    assert events == {event.__name__ for event in table.events}


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
