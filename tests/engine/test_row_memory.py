"""Rows between memories: every byte, whole rows, whatever they lie in."""

from __future__ import annotations

import pytest
import torch

from epd.engine.base import Rows
from epd.engine.row_memory import copied_out, on_device, on_host

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_file_become_a_tensor_again(dtype: torch.dtype) -> None:
    """F12: all levels, in their places."""
    tensor = torch.randn(5, 12).to(dtype)
    made = Rows(tensor, 5, tensor.nbytes)
    stored = Rows(bytearray(made.buffer()), 5, tensor.nbytes)
    assert stored.on_host
    again = on_device(stored, CPU, dtype, 12)
    assert torch.equal(again.tensor, tensor)
    assert torch.equal(on_host(again).tensor, tensor)


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
