"""The kernel of a tower's attention against fp64, for lengths and heads of all kinds."""

from __future__ import annotations

import pytest
import torch

from epd.engine.kernels import Kernels, kernels_for
from epd.engine.vision.segments import SegmentAttention

BOUNDS = [0, 130, 131, 200, 1000, 1064, 1128]


@pytest.fixture
def attend(attention: Kernels, monkeypatch: pytest.MonkeyPatch) -> SegmentAttention:
    monkeypatch.setattr(SegmentAttention, "kernels", lambda self, qkv: attention)
    return SegmentAttention()


@pytest.mark.parametrize("dim", [8, 64, 72, 80, 128])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_it_is_exact_and_apart(
    dim: int, dtype: torch.dtype, limit: float, cuda: str, attend: SegmentAttention
) -> None:
    """Each segment is as if it were alone, also beside one that is not finite (fault F13)."""
    generator = torch.Generator().manual_seed(dim)
    qkv = torch.randn(BOUNDS[-1], 3, 4, dim, generator=generator).to(dtype)
    qkv[131:200] = torch.nan
    bounds = torch.tensor(BOUNDS)
    scaling = dim**-0.5
    found = attend(qkv.to(cuda), bounds, scaling)
    again = attend(qkv.to(cuda), bounds, scaling)  # with tiles that were kept
    torch.testing.assert_close(again, found, atol=0, rtol=0, equal_nan=True)
    expected = kernels_for("cpu").attend_segments(qkv.double(), bounds, scaling)
    bad = torch.zeros(BOUNDS[-1], dtype=torch.bool)
    bad[131:200] = True
    assert found.cpu()[bad].isnan().all() and found.cpu()[~bad].isfinite().all()
    error = (found.cpu().double() - expected)[~bad].norm() / expected[~bad].norm()
    assert float(error) < limit


def test_alone_and_together_are_the_same(cuda: str, attend: SegmentAttention) -> None:
    """An image's rows must not depend on its neighbours: they are cached under its hash."""
    qkv = torch.randn(500, 3, 16, 64, dtype=torch.bfloat16, device=cuda)
    together = attend(qkv, torch.tensor([0, 100, 400, 500]), 0.125)
    alone = attend(qkv[100:400].contiguous(), torch.tensor([0, 300]), 0.125)
    assert torch.equal(together[100:400], alone)


@pytest.mark.parametrize("dim", [64, 72])
def test_a_captured_run_takes_other_segments(dim: int, cuda: str, attention: Kernels) -> None:
    """What it reads is on the device, and what pads it is in no row."""
    size, room = 640, (640, 16)
    qkv = torch.empty(size, 3, 4, dim, dtype=torch.bfloat16, device=cuda)
    given = [0, 130, 131, 500], [0, 640], [*range(0, 629, 40)]
    empty, *others = [attention.list_segments(bounds, dim, room) for bounds in ([0], *given)]
    assert attention.list_segments([*range(0, 640, 10)], dim, room) is None
    segments, again = empty.to(cuda), qkv.new_zeros(qkv.shape)
    attention.attend_segments(again, segments, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention.attend_segments(again, segments, 0.1)
    for bounds, listed in zip(given, others, strict=True):
        qkv.normal_()
        qkv[bounds[-1] :] = torch.nan
        again.copy_(qkv)
        segments.copy_(listed)
        graph.replay()
        expected = kernels_for("cpu").attend_segments(qkv.double().cpu(), torch.tensor(bounds), 0.1)
        error = (found.cpu().double() - expected)[: bounds[-1]].norm() / expected.norm()
        assert float(error) < 8e-3, bounds
