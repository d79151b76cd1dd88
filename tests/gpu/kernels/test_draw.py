"""What follows the ranking of logits is that of the specification; small, so that it runs
interpreted."""

from __future__ import annotations

import pytest
import torch

from epd.engine.language import token_draw
from epd.engine.language.token_draw import Filtered

ROWS, SIZE, LENGTH = 4, 1536, 64


def test_the_lowest_that_stays_and_the_draw(kernel_device: str) -> None:
    kernels = pytest.importorskip("epd.engine.kernels.triton_draw")
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(ROWS, SIZE, generator=generator) * 3).bfloat16().float()
    top = logits.amax(dim=-1, keepdim=True)
    temperature = torch.linspace(0.6, 1.4, ROWS)[:, None]
    ordered = logits.topk(50, dim=-1).values
    floor, kept = top - 6.0, torch.tensor([[3.0], [50.0], [20.0], [50.0]])
    nucleus = torch.tensor([[1.0], [0.5], [0.9], [1.0]])
    given = (ordered, floor, kept, nucleus, top, temperature)
    lowest = token_draw.lowest_kept(*given)
    there = [tensor.to(kernel_device) for tensor in given]
    assert torch.equal(kernels.lowest_kept(*there).cpu(), lowest)
    rows = Filtered(top, temperature, lowest)
    moved = Filtered(*(part.to(kernel_device) for part in (top, temperature, lowest)))
    for number in (0.0, 0.3, 0.77, 1 - 2**-53):
        numbers = torch.full((ROWS,), number, dtype=torch.float64)
        expected = token_draw.drawn(logits, rows, numbers, LENGTH)
        numbers = numbers.to(kernel_device)
        found = kernels.drawn(logits.to(kernel_device), moved, numbers, LENGTH)
        assert torch.equal(found.cpu(), expected), number
