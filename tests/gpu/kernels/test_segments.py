"""The kernel of a tower's attention against fp64, for lengths and heads of all kinds."""

from __future__ import annotations

import pytest
import torch

from epd.engine.vision.segments import SegmentAttention, attend_plainly

BOUNDS = [0, 130, 131, 200, 1000, 1064, 1128]


@pytest.mark.parametrize("dim", [8, 64, 72, 80, 128])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_it_is_exact_and_apart(dim: int, dtype: torch.dtype, limit: float, cuda: str) -> None:
    """Each segment is as if it were alone, also beside one that is not finite (fault F13)."""
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(BOUNDS[-1], 3, 4, dim, generator=generator).to(dtype)
    qkv[131:200] = torch.nan
    attend = SegmentAttention()
    bounds = torch.tensor(BOUNDS)
    scaling = dim**-0.5
    found = attend(qkv.to(cuda), bounds, scaling)
    again = attend(qkv.to(cuda), bounds, scaling)  # with tiles that were kept
    torch.testing.assert_close(again, found, atol=0, rtol=0, equal_nan=True)
    expected = attend_plainly(qkv.double(), BOUNDS, scaling)
    bad = torch.zeros(BOUNDS[-1], dtype=torch.bool)
    bad[131:200] = True
    assert found.cpu()[bad].isnan().all() and found.cpu()[~bad].isfinite().all()
    error = (found.cpu().double() - expected)[~bad].norm() / expected[~bad].norm()
    assert float(error) < limit


def test_alone_and_together_are_the_same(cuda: str) -> None:
    """An image's rows must not depend on its neighbours: they are cached under its hash."""
    qkv = torch.randn(500, 3, 16, 64, dtype=torch.bfloat16, device=cuda)
    together = SegmentAttention()(qkv, torch.tensor([0, 100, 400, 500]), 0.125)
    alone = SegmentAttention()(qkv[100:400].contiguous(), torch.tensor([0, 300]), 0.125)
    assert torch.equal(together[100:400], alone)
