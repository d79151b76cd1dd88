"""Rows into slots: every byte, in order, whatever they lie in."""

from __future__ import annotations

import pytest
import torch

from epd.engine.base import Rows
from epd.engine.row_memory import copied_out


@pytest.mark.parametrize("as_bytes", [False, True])
def test_rows_fill_slots_in_order(as_bytes: bool) -> None:
    tensor = torch.arange(40, dtype=torch.float32).view(5, 8)
    rows = Rows(tensor, 5, tensor.nbytes)
    content = bytes(rows.buffer())
    if as_bytes:
        rows = Rows(memoryview(bytearray(content)), 5, len(content))
    memory = bytearray(200)
    views = [memoryview(memory)[100:164], memoryview(memory)[0:96]]
    copied_out(rows, views)
    assert memory[100:164] + memory[0:96] == content
    assert memory[96:100] + memory[164:] == bytes(40)
