"""The table of truth, of our gateway and encoders in front of vLLM: no input ends an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from epd_lab.bench.truth.client import Peer, TruthCell
from epd_lab.bench.truth.run import measure
from tests.with_vllm.server import model_for_vllm
from tests.with_vllm.truth.columns import FrontCluster
from tests.with_vllm.truth.rows import all_rows

pytestmark = pytest.mark.timeout(1200)

INPUTS = [row for row in all_rows() if "kill" not in row.name and "P + D" not in row.name]


async def cells_of(cluster: FrontCluster) -> dict[str, TruthCell]:
    url = await cluster.begin()
    try:
        before = pids(cluster)
        cells = await measure(Peer("epd + vLLM", url, 60.0, cluster), INPUTS)
        assert pids(cluster) == before, cluster.servers.by_name["pd0"].text[-3000:]
        assert all(server.serves() for server in cluster.servers.by_name.values())
    finally:
        await cluster.end()
    return {row.name: cell for row, cell in zip(INPUTS, cells, strict=True)}


def pids(cluster: FrontCluster) -> set[int]:
    """Of all processes of its vLLM servers."""
    found = (server.processes() for server in cluster.servers.by_name.values())
    return {process.pid for processes in found for process in processes}


def test_no_input_of_the_table_ends_an_engine_behind_our_front(tmp_path: Path) -> None:
    found = asyncio.run(cells_of(FrontCluster(tmp_path, model_for_vllm(tmp_path))))
    (skipped,) = (name for name, cell in found.items() if cell.skipped)
    assert skipped == "an answer asked of an encoder"
    for name, cell in found.items():
        assert cell.skipped or cell.then in {"", "right"}, (name, str(cell))
        assert set(cell.counts) <= {"right", "400", "left", "500"}, (name, str(cell))
        assert "500" not in cell.counts or "engine" in name, (name, str(cell))
