"""The likeliest token is that of the specification, and a row that is not finite is known."""

from __future__ import annotations

import pytest
import torch

from epd.engine.language.token_draw import first_largest
from tests.gpu.kernels.test_kernels import dtypes

ROWS = 6


@pytest.mark.parametrize("size", [7, 8192, 20_011])
def test_it_is_that_of_the_specification(size: int, kernel_device: str) -> None:
    """Rows of a larger matrix; many tie, also between parts, and the first one counts."""
    kernels = pytest.importorskip("epd.engine.kernels.triton_draw")
    generator = torch.Generator().manual_seed(11)
    for dtype, _ in dtypes(kernel_device):
        whole = (torch.randn(ROWS, size + 5, generator=generator) * 4).bfloat16().to(dtype)
        whole[0] = 0.0
        whole[1, [size - 1, size // 2]] = 100.0
        whole[2, size // 3] = torch.nan
        whole[3, size - 1] = torch.inf
        whole[4, 0] = -torch.inf
        logits = whole[:, :size]
        found, are_finite = kernels.first_largest(logits.to(kernel_device))
        expected, wanted = first_largest(logits)
        assert (
            are_finite.cpu().tolist() == wanted.tolist() == [True, True, False, False, False, True]
        )
        assert found.dtype == torch.int64 and are_finite.dtype == torch.bool
        good = [0, 1, 5]
        assert found.cpu()[good].tolist() == expected[good].tolist()
        assert expected[:2].tolist() == [0, size // 2]
        assert ((found >= 0) & (found < size)).all(), "what is not finite is read by the next step"
