"""Rows of the table of truth, of this project alone; `make test-vllm` has the rest, beside vLLM."""

from __future__ import annotations

import pytest

from epd_lab.bench.truth.client import Peer
from epd_lab.bench.truth.run import measure
from epd_lab.bench.truth.table import REFUSED, ROWS
from tests.e2e.server import Server

pytestmark = pytest.mark.timeout(120)

LONG = ("at once", "kill -9", "P + D")


async def test_rows_of_the_table_are_right(apart: Server) -> None:
    rows = [row for row in ROWS if not any(words in row.name for words in LONG)]
    cells = await measure(Peer("epd", apart.base_url, 60.0), rows)
    assert len(cells) == 9
    for row, cell in zip(rows, cells, strict=True):
        wanted = {"400"} if row.right == REFUSED else {"left"} if "leave" in row.name else {"right"}
        assert (set(cell.counts), cell.then) in ((wanted, ""), (wanted, "right")), str(cell)
        assert not cell.memory or cell.memory.startswith("memory back"), cell.memory
