"""Predictions beside measurements under docs/bench, with their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_lab.bench.workload import named
from epd_lab.plan import compared
from epd_lab.plan.costs import BUNDLED, read
from epd_lab.plan.run import ForecastPlan, gpu_settings, run

TWO = compared.read_report(
    Path(__file__).parents[2] / "docs" / "bench" / "topologies_two_h200.json"
)


@pytest.mark.parametrize(
    ("topology", "workload"),
    [
        ("1ep1ed", "1x1080p"),
        *(
            pytest.param(*names, marks=pytest.mark.long)
            for names in (
                ("2epd", "text"), ("2epd", "1x1080p"), ("2epd", "3x560"),
                ("1ep1ed", "text"), ("1ep1ed", "3x560"),
            )
        ),
    ],
)  # fmt: skip
def test_two_gpus_are_predicted(topology: str, workload: str) -> None:
    """Requests, and times of tokens; what is farther off is in docs/topologies.md."""
    rows = run(ForecastPlan(read(BUNDLED), topology, named(workload), gpu_settings()))
    found = compared.errors(rows, TWO.rows)
    print(compared.table(rows, TWO.rows))
    assert len(found) == len(rows)
    for key, errors in found:
        assert abs(errors["req_per_s"]) < 0.12, key
        assert abs(errors["tpot_ms_p50"]) < 0.15, key


def test_what_was_not_measured_is_not_compared() -> None:
    assert "names must be equal" in compared.table([], TWO.rows)
