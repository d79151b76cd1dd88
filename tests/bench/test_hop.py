"""`epd bench hop` measures what it says, over real processes, on items small enough for a test."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from epd_lab.bench import machine, plots
from epd_lab.bench.transports import hop
from epd_lab.bench.transports.hop import MIB, HopPlan, HopRow, measure_all, table, with_ratios
from epd_lab.bench.transports.hop_process import Receiving
from epd_lab.bench.transports.hop_senders import WAYS, HopRows

SMALL = HopPlan(max_nbytes=MIB, volume_nbytes=MIB, min_items=4, max_items=4, rounds=2)


async def test_every_backend_and_reference_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "SIZES", (64 << 10, MIB, 4 * MIB))
    monkeypatch.setattr(hop, "IN_FLIGHT", (1, 2))
    ways = hop.usable(WAYS)
    rows = await measure_all(dataclasses.replace(SMALL, ways=ways))
    cells = {(row.way, row.nbytes, row.in_flight) for row in rows}
    assert cells == {
        (way, nbytes, in_flight)
        for way in ways
        for nbytes in (64 << 10, MIB)
        for in_flight in ((1,) if way == "memcpy" else (1, 2))
    }
    for row in rows:
        assert 0 < row.latency_us["p50"] <= row.latency_us["p99"]
        assert row.gb_per_s > 0
    found = {"machine": machine.describe(), "rows": [dataclasses.asdict(row) for row in rows]}
    image = ET.fromstring(plots.lines(found))
    named = {element.text for element in image.iter() if element.tag.endswith("text")}
    assert {*ways, "64 KiB", "1 MiB"} <= named


def test_an_item_that_is_not_the_one_sent_is_noticed(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rows, path = HopRows(1, 64 << 10), str(tmp_path / "rows.safetensors")
    item, seen = rows.tagged(0)
    save_file({"rows": item}, path)
    assert Receiving().load(path, **seen) > 0
    with pytest.raises(ValueError, match="other bytes landed"):
        Receiving().load(path, seen["tag"] + 1, seen["expected"])
    item[2048] ^= 0xFF
    save_file({"rows": np.ascontiguousarray(item)}, path)
    with pytest.raises(ValueError, match="not as it was sent"):
        Receiving().load(path, **seen)


def test_ratios_are_to_the_memcpy_of_the_same_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def row(way: str, nbytes: int, p50: float) -> HopRow:
        return HopRow(way, nbytes, 1, {"p50": p50, "p99": p50}, 1.0, 1.0, 1.0)

    rows = with_ratios(
        [row("memcpy", 1, 10.0), row("shm", 1, 15.0), row("memcpy", 2, 20.0), row("shm", 2, 15.0)]
    )
    assert [found.ratio_to_memcpy for found in rows] == [1.0, 1.5, 1.0, 0.75]
    assert table(rows).splitlines()[2].split() == "shm 0 1 15.0 15.0 1.00 1.000 1.50".split()

    async def found(plan: HopPlan) -> list[HopRow]:
        return rows

    monkeypatch.setattr(hop, "measure_all", found)
    assert hop.run(SMALL, as_json=True, out=str(tmp_path)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "hop.json").read_text())
    assert "| shm | 0 | 1 | 15.0 | 15.0 | 1.0 | 1.0 | 0.75 |" in (tmp_path / "hop.md").read_text()
    assert printed["machine"]["cores"] > 0
    assert (tmp_path / "hop.svg").read_text().startswith("<svg")
