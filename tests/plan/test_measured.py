"""Predictions beside measurements, most of them under docs/bench, with their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_lab.bench.workload import chosen, named, users_of
from epd_lab.plan import compared
from epd_lab.plan.costs import BUNDLED, read
from epd_lab.plan.run import ForecastPlan, gpu_settings, run

MEASURED = compared.read_measured(Path(__file__).parent / "measured_1epd.json")
TWO, FOUR = (
    Path(__file__).parents[2] / "docs" / "bench" / f"{number}_h200.json"
    for number in ("two", "four")
)

ALLOWED = {  # measured over predicted, for every workload of one GPU
    "req_per_s": 0.10,
    "tpot_ms_p50": 0.05,
    "itl_ms_p50": 0.20,
    "itl_ms_p99": 0.45,  # 4x1080p: its three runs had 39 to 86 ms
    "ttft_ms_p50": 0.28,  # bursts; all others 0.13
    "ttft_ms_p99": 0.40,  # chat beside bursts: its two runs had 341 and 600 ms
}


OTHERS = ("3x560", "mixed", "text", "1x1080p", "4x1080p")


@pytest.mark.parametrize(
    "workload", ["3x560-c1", *(pytest.param(n, marks=pytest.mark.long) for n in OTHERS)]
)
def test_one_gpu_is_predicted(workload: str) -> None:
    rows = run(ForecastPlan(read(BUNDLED), "1epd", named(workload), gpu_settings()))
    print(compared.table(rows, MEASURED))
    found = compared.errors(rows, MEASURED)
    assert len(found) == len(rows)
    off = [
        (key, name, error)
        for key, errors in found
        for name, error in errors.items()
        if abs(error) > ALLOWED[name]
    ]
    assert not off, off


@pytest.mark.parametrize(
    ("topology", "workload"),
    [
        ("1ep1ed", "1x1080p"),
        *(
            pytest.param(*names, marks=pytest.mark.long)
            for names in (
                ("2epd", "text"), ("2epd", "1x1080p"), ("2epd", "1x1080p-256"),
                ("1ep1ed", "text"), ("1ep1ed", "1x1080p-256"), ("1ep1ed", "mixed"),
            )
        ),
    ],
)  # fmt: skip
def test_two_gpus_are_predicted(topology: str, workload: str) -> None:
    """Requests and times between tokens; what is farther off is in docs/topologies.md."""
    rows = run(ForecastPlan(read(BUNDLED), topology, named(workload), gpu_settings()))
    found = compared.errors(rows, compared.read_measured(TWO))
    assert len(found) == len(rows)
    for key, errors in found:
        assert abs(errors["req_per_s"]) < 0.08, key
        assert abs(errors["tpot_ms_p50"]) < 0.13, key
        assert abs(errors["itl_ms_p50"]) < 0.13, key


@pytest.mark.parametrize(
    "workload",
    ["1x1080p", *(pytest.param(n, marks=pytest.mark.long) for n in ("text", "4x1080p", "mixed"))],
)
def test_four_replicas_are_predicted(workload: str) -> None:
    """What splits of four are off by, and why that is not known, is in docs/topologies.md."""
    (crowded,) = chosen([workload], users=users_of(4))
    rows = run(ForecastPlan(read(BUNDLED), "4epd", crowded, gpu_settings()))
    found = compared.errors(rows, compared.read_measured(FOUR))
    assert len(found) == len(rows)
    for key, errors in found:
        assert abs(errors["req_per_s"]) < 0.08, key
        assert abs(errors["tpot_ms_p50"]) < 0.15, key


def test_what_was_not_measured_is_not_compared() -> None:
    assert "names must be equal" in compared.table([], MEASURED)
