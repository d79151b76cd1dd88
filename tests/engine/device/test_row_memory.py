"""Rows into slots: every byte, in order, whatever they lie in."""

from __future__ import annotations

import gc

import pytest
import torch

from epd.engine.base import Rows
from epd.engine.device.row_memory import copied_out, read_bytes


@pytest.mark.parametrize("kind", [None, bytearray, bytes])
def test_rows_fill_slots_in_order(kind: type | None) -> None:
    """Also from bytes that may not be written, without a word (warnings are errors here)."""
    tensor = torch.arange(40, dtype=torch.float32).view(5, 8)
    rows = Rows(tensor, 5, tensor.nbytes)
    content = bytes(rows.buffer())
    if kind is not None:
        rows = Rows(memoryview(kind(content)), 5, len(content))
    memory = bytearray(200)
    views = [memoryview(memory)[100:164], memoryview(memory)[0:96]]
    copied_out(rows, views)
    assert memory[100:164] + memory[0:96] == content
    assert memory[96:100] + memory[164:] == bytes(40)


def test_bytes_that_are_read_stay_for_as_long_as_they_are() -> None:
    tensor = read_bytes(memoryview(b"x" * 4096)[1000:2000])
    gc.collect()
    others = [bytes([n]) * 4096 for n in range(64)]
    assert tensor.tolist() == [ord("x")] * 1000 and len(others) == 64
