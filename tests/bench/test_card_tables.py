"""The tables of the pages on performance are those of the files under docs/bench."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from epd_lab.bench import card_page, split_table
from epd_lab.bench.card_tables import PLACE, with_tables
from epd_lab.bench.workload import NAMED

DOCS = Path(__file__).parents[2] / "docs"
CARDS = ("h100.json", "h200.json")
TABLES = {
    "peers.md": [
        "peer_h200_bf16.json",
        "peer_h200_fp8.json",
        "peer_two_h200_bf16.json",
        "topologies_two_h200.json",
    ],
    "topologies.md": ["formats_h200.json", "probes_h200.json", "splits_two_h200.json"],
    "transports.md": ["hop_h200.json"],
}


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_are_those_of_the_files(page: str) -> None:
    document = (DOCS / page).read_text(encoding="utf-8")
    assert sorted(found[1] for found in PLACE.findall(document)) == TABLES[page]
    assert with_tables(document, DOCS / "bench") == document, "run: python -m epd diagrams"


@pytest.mark.parametrize("card", CARDS)
def test_a_row_has_its_date_its_number_of_runs_and_figures_with_units(card: str) -> None:
    found = json.loads((DOCS / "bench" / card).read_text())
    for row in found["rows"]:
        assert row["date"].startswith("2026-") and row["repeats"] >= 1
        assert row["workload"] in NAMED
        assert all(name.endswith(("_per_s", "_ms_p50", "_ms_p99")) for name in row["figures"])
    for report in found["reports"]:
        cards = json.loads((DOCS / "bench" / report["file"]).read_text())["gpus"]
        assert all(one.startswith(found["card"]) for one in cards)


def test_a_changed_figure_makes_the_page_stale(tmp_path: Path) -> None:
    for path in (DOCS / "bench").glob("*.json"):
        shutil.copy(path, tmp_path)
    document = (DOCS / "cards/h200.md").read_text(encoding="utf-8")
    assert card_page.page("h200", tmp_path) == document
    card = tmp_path / CARDS[1]
    card.write_text(card.read_text().replace('"req_per_s": 27.3', '"req_per_s": 28.3'))
    assert "| 28.3 |" in card_page.page("h200", tmp_path)


def test_a_card_without_costs_has_the_command_that_measures_it() -> None:
    text = card_page.page("h100", DOCS / "bench")
    assert "epd bench calibrate" in text and "| ms |" not in text


def test_splits_are_beside_replicas_by_their_gain() -> None:
    """The best of each kind, all streams of a workload together."""
    lines = split_table.table(
        json.loads((DOCS / "bench/splits_two_h200.json").read_text()), DOCS / "bench"
    )
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines()[2:]]
    gains = [float(row[4]) for row in rows]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.1 > gains[-1]
    mixed = next(row for row in rows if row[0] == "mixed")
    assert mixed[2].startswith("`2epd`: 14.02") and mixed[3].startswith("`1ep1ed`: 13.00")
