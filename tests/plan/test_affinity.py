"""Affinity under saturation never loses to turns, and wins where much is repeated (fault F83)."""

from __future__ import annotations

import json

import pytest

from tests.plan.affinity import LOADS, REPORT, SLO, Case, compared

LEAST, WIN = 0.97, 1.3


def test_at_saturation_affinity_wins_by_what_repeats() -> None:
    row = compared(Case("prefix", 0.5, 20.0, 2.0, instances=4))
    assert row["affinity"]["failed"] == row["turns"]["failed"] == 0
    assert row["affinity"]["req_per_s"] >= WIN * row["turns"]["req_per_s"]


@pytest.mark.long
def test_pictures_that_repeat_meet_where_their_rows_are() -> None:
    row = compared(Case("picture", 0.5, 24.0, 1.5, instances=4))
    assert row["affinity"]["req_per_s"] >= LEAST * row["turns"]["req_per_s"]
    assert row["affinity"]["ttft_ms_p50"] < 0.7 * row["turns"]["ttft_ms_p50"]


def test_where_nothing_repeats_nothing_is_lost() -> None:
    row = compared(Case("prefix", 0.0, 14.0, 1.0, instances=4))
    assert row["affinity"]["req_per_s"] >= LEAST * row["turns"]["req_per_s"]


@pytest.mark.parametrize("kind", LOADS)
def test_the_report_holds_at_every_load(kind: str) -> None:
    report = json.loads(REPORT.read_bytes())
    assert report["slo"] == {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    rows = [row for row in report["rows"] if row["kind"] == kind]
    assert {(row["share"], row["per_s"]) for row in rows} == {
        (share, load) for share in (0.0, 0.5) for load in LOADS[kind]
    }
    for row in rows:
        for name in ("req_per_s", "goodput_req_per_s"):
            assert row["affinity"][name] >= LEAST * row["turns"][name], (row["share"], row["per_s"])
    most = {
        who: max(row[who]["goodput_req_per_s"] for row in rows if row["share"])
        for who in ("affinity", "turns")
    }
    assert most["affinity"] >= WIN * most["turns"]
