"""Two foreign checkers, SPIN and tla-checker, over every machine and both ends of a room.

They must count the states that `epd sim model`'s search counts, find every law kept and every
promise, and find the project's table mutants.  `python -m tests.foreign` asks the same without the
mutants, for people, in one command.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_lab.formal import models
from epd_lab.formal.form import Model
from tests.foreign.agreement import judge, suits_tla
from tests.foreign.checkers import Spin, check_tla, spin_missing, tla_missing
from tests.foreign.mutants import BREAKS_A_PROMISE, UNSEEN, shown_by, table_mutants

needs_spin = pytest.mark.skipif(bool(spin_missing()), reason=spin_missing() or "spin is here")
needs_tla = pytest.mark.skipif(bool(tla_missing()), reason=tla_missing() or "tla-checker is here")
pytestmark = pytest.mark.timeout(900)  # a compiler runs, perhaps on a loaded machine
MUTANTS = table_mutants()
QUICK = ("LINK", "INSTANCE")


def each(chosen: list[Model]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "model",
        [
            pytest.param(m, id=m.name, marks=[] if m.name in QUICK else [pytest.mark.long])
            for m in chosen
        ],
    )


@needs_spin
@each([*models()])
def test_spin_agrees(model: Model, tmp_path: Path) -> None:
    assert judge(model, tmp_path, tla=False).problems == []


@needs_tla
@each([model for model in models() if suits_tla(model)])
def test_tla_checker_agrees(model: Model, tmp_path: Path) -> None:
    assert judge(model, tmp_path, spin=False).problems == []


@pytest.mark.long
@needs_spin
@pytest.mark.parametrize("name", MUTANTS)
def test_spin_finds_a_bug_put_back(name: str, tmp_path: Path) -> None:
    model = shown_by(name, MUTANTS[name])
    checker = Spin(model, tmp_path)
    laws = checker.laws().error
    broken = [promise.name for promise in model.promises if checker.promise(promise).error]
    if name in UNSEEN:
        assert not laws and not broken, "it is seen: take it from the list"
    elif name in BREAKS_A_PROMISE:
        assert not laws and broken
    else:
        assert laws


@pytest.mark.long
@needs_tla
@pytest.mark.parametrize("name", [n for n in MUTANTS if n not in (*UNSEEN, *BREAKS_A_PROMISE)])
def test_tla_checker_finds_a_bug_put_back(name: str, tmp_path: Path) -> None:
    assert check_tla(shown_by(name, MUTANTS[name]), tmp_path).error
