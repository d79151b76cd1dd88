"""Plans beside a measurement under docs/bench: eight workloads at two topologies of two H200."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from epd_lab.bench.servers.figures import Slo
from epd_lab.bench.workload import named
from epd_lab.plan import compared
from epd_lab.plan.costs import BUNDLED, read
from epd_lab.plan.run import ForecastPlan, gpu_settings, run

BENCH = Path(__file__).parents[2] / "docs" / "bench"
REPORT = compared.read_report(BENCH / "plan_two_h200.json")
SLO = Slo(REPORT.slo["ttft_s"], math.inf, REPORT.slo["itl_s"])
KNOWN = read(BUNDLED)
PAIRS = list(dict.fromkeys(row["key"][1::-1] for row in REPORT.rows))
FAR = {("1x1080p", "2epd"), ("1x1080p", "1ep1ed"), ("mixed", "1ep1ed")}
QUICK = {("4x1080p@4", "2epd"), ("1x1080p@22", "1ep1ed")}


def test_the_cost_file_has_what_plans_are_off_by() -> None:
    """Goodput within 15 % but for three pairs, and the better of two topologies named for seven of
    eight workloads."""
    told = KNOWN.compared
    assert told is not None
    assert (told.report, told.date) == (REPORT.name, REPORT.date)
    assert [pair[:2] for pair in told.errors] == PAIRS
    assert len(PAIRS) == 16
    far = {pair[:2] for pair in told.errors if abs(pair[2]) > 0.15}
    assert far == FAR
    assert told.ordered[0] >= 7 and told.ordered[1] == 8


@pytest.mark.parametrize(
    ("workload", "topology"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.long) for one in PAIRS],
)
def test_it_is_what_plans_say_today(workload: str, topology: str) -> None:
    rows = run(ForecastPlan(KNOWN, topology, named(workload), gpu_settings(), slo=SLO))
    print(compared.table(rows, REPORT.rows))
    measured = [row for row in REPORT.rows if row["key"][:2] == (topology, workload)]
    report = compared.MeasuredReport(REPORT.name, REPORT.date, REPORT.slo, measured)
    ((_, _, error),) = compared.comparison(rows, report).errors
    assert KNOWN.compared is not None
    (kept,) = [e for *pair, e in KNOWN.compared.errors if pair == [workload, topology]]
    assert error == pytest.approx(kept, abs=0.03)
    for key, off in compared.errors(rows, measured):
        assert abs(off["req_per_s"]) < 0.15, key
        assert abs(off["tpot_ms_p50"]) < 0.15, key


def test_what_was_not_measured_is_not_compared() -> None:
    assert "names must be equal" in compared.table([], REPORT.rows)
