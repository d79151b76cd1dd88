"""The lowest logit of a nucleus is that of the sort; small rows, so that it runs interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epd.engine.language.token_draw import lowest_of_nucleus

ROWS, SIZE = 3, 5003  # the last chunk has a rest
SHARES = torch.tensor([[0.1], [0.9], [0.9999]])
_INF = torch.inf

LOGITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda logits: logits,
    "bfloat16, many tie": lambda logits: logits.bfloat16().float(),
    "all tie": torch.zeros_like,
    "signs of zero": lambda logits: (
        logits.clamp(max=0.0) * torch.tensor([1.0, 0.0]).repeat(SIZE)[:SIZE]
    ),
    "negative": lambda logits: -logits.abs() - 3,
    "flat": lambda logits: logits * 0.01,
    "steep": lambda logits: logits * 1000,
    "five are allowed": lambda logits: logits.masked_fill(torch.arange(SIZE) >= 5, -_INF),
}


@pytest.mark.parametrize("kind", LOGITS)
def test_it_is_that_of_the_sort(kind: str, kernel_device: str) -> None:
    kernels = pytest.importorskip("epd.engine.kernels.triton_nucleus")
    generator = torch.Generator().manual_seed(7)
    logits = LOGITS[kind](torch.randn(ROWS, SIZE, generator=generator) * 4)
    top = logits.amax(dim=-1, keepdim=True)
    temperature = torch.linspace(0.5, 1.5, ROWS)[:, None]
    for min_p in (0.0, 0.05):
        floor = top + temperature * torch.tensor(min_p).log()
        given = (logits, floor, SHARES, top, temperature)
        expected = lowest_of_nucleus(*given)
        found = kernels.lowest_of_nucleus(*(tensor.to(kernel_device) for tensor in given)).cpu()
        assert torch.equal(found, expected)
        again = kernels.lowest_of_nucleus(*(tensor[1:].to(kernel_device) for tensor in given))
        assert torch.equal(again.cpu(), expected[1:])  # whatever the neighbours
