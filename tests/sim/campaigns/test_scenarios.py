"""The drills of the scenarios that tests/e2e plays between real processes come to the same ends."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from epd_lab.sim import drills
from epd_lab.sim.client import Record
from epd_lab.sim.run import run
from tests.scenarios import SCENARIOS

E2E = Path(__file__).parents[2] / "e2e"
PROBES = 9000


def class_of(record: Record) -> str:
    if record.refused:
        return "refused"
    if record.error is not None:
        return record.error.kind
    if record.hung_up:
        return "hung up"
    assert tuple(record.tokens) == record.ask.answer()
    return "answered"


@pytest.mark.parametrize("num_seeds", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_drill_ends_as_the_scenario_says(name: str, num_seeds: int) -> None:
    scenario = SCENARIOS[name]
    outcomes: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for seed in range(1 if name == "200 at once" else num_seeds):
        result = run(drills.by_name(scenario.drill).plan(seed), keep=True)
        assert result.violations == []
        asked = [record for record in result.records if record.ask.index < PROBES]
        outcomes.update(map(class_of, asked))
        assert result.cluster is not None and result.world is not None
        for node in result.cluster.living():
            held.update(node.live())
        result.world.close()
    scenario.check(outcomes, held)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_real_test_is_there_and_asks_for_the_same(name: str) -> None:
    path, _, function = SCENARIOS[name].real.partition("::")
    source = (E2E / path).read_text()
    found = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    ]
    assert found and f'"{name}"' in (ast.get_source_segment(source, found[0]) or "")
