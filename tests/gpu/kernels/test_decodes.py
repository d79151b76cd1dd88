"""Attention of decodes in parts against its specification, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.eight_bits import FP8
from tests.gpu.kernels.test_kernels import (
    LOG2E,
    dtypes,
    fill,
    fill_eight_bits,
    make_batch,
    make_pool,
    relative,
)

SPECIFIED = kernels_for("cpu")

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
triton_decode = pytest.importorskip("epd.engine.kernels.triton_decode")
triton_decode_fp8 = pytest.importorskip("epd.engine.kernels.triton_decode_fp8")
triton_parts = pytest.importorskip("epd.engine.kernels.triton_parts")

DECODES = {
    "one": [1],
    "edges of a tile": [1, 63, 64, 65, 127, 128, 129],
    "one long": [70] * 5 + [1000],
    "one of more parts than are joined at once": [64 * 140],
    "many": [1 + 17 * i % 90 for i in range(255)] + [700],
}
MANY = {
    "one long of real sizes": [1150] * 16 + [8700],
    "256": [900 + 7 * i for i in range(255)] + [30000],
}


@pytest.mark.parametrize("at_once", [2, 7, 66, 528])
@pytest.mark.parametrize("name", [*DECODES, *MANY])
def test_decodes_of_unequal_lengths(
    name: str, at_once: int, kernel_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of every number and length, in rooms with more of all, and NaN where nobody is.

    What decodes leave where they are not (rows that pad) is what was there."""
    small = kernel_device == "cpu"
    if small and (name in MANY or at_once > 66):
        pytest.skip("the interpreter is slow")
    ops = kernels_for("cuda")
    if small:
        monkeypatch.setattr(triton_parts, "JOINED", 8 * 16)
    extents = [(length - 1, 1) for length in {**DECODES, **MANY}[name]]
    for heads, kv_heads, dim in ((4, 1, 16),) if small else ((32, 8, 128), (16, 2, 64)):
        for dtype, limit in dtypes(kernel_device)[int(small) :]:
            batch, num_blocks = make_batch(extents, kernel_device, 64, 5, at_once)
            pool = make_pool(dtype, kv_heads, dim, kernel_device, num_blocks)
            pool.tensor.fill_(torch.nan)
            wide = make_pool(torch.float64, kv_heads, dim, kernel_device, num_blocks)
            fill(pool, wide, batch)
            query = torch.randn(len(batch.ids), heads, dim, dtype=dtype, device=kernel_device)
            expected = SPECIFIED.attend(query.double(), wide.layer(1), batch, dim**-0.5)
            out = torch.full_like(query, 7.0)
            scale = dim**-0.5 * LOG2E
            triton_decode.attend_decodes(query, pool.layer(1), batch, scale, out)
            for i in range(len(extents)):
                assert relative(out[i], expected[i]) < 2 * limit, (name, dtype, i)
            assert bool((out[len(extents) :] == 7.0).all())
            again = ops.attend(query, pool.layer(1), batch, dim**-0.5)
            assert torch.equal(again[: len(extents)], out[: len(extents)])


def test_decodes_over_eight_bits(kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in parts of even and uneven lengths; NaN elsewhere, in scales too."""
    if kernel_device == "cpu":  # the interpreter has no assembly
        monkeypatch.setattr(triton_decode_fp8, "_pairs", plain_pairs)
    extents = [(length - 1, 1) for length in (1, 64, 65, 200, 500)]
    sizes = (4, 2, 64), (6, 2, 80), (8, 1, 128), (8, 2, 256), (8, 2, 512), (12, 1, 512)
    for (heads, kv_heads, dim), at_once in zip(sizes, (1, 4, 66, 4, 1, 4), strict=True):
        batch, num_blocks = make_batch(extents, kernel_device, 64, 3, at_once)
        pool = make_pool(FP8, kv_heads, dim, kernel_device, num_blocks)
        fill_eight_bits(pool, batch)
        query = torch.randn(len(batch.ids), heads, dim, device=kernel_device).half()
        expected = SPECIFIED.attend(query.double(), pool.layer(1), batch, dim**-0.5)
        out = torch.full_like(query, 7.0)
        triton_decode.attend_decodes(query, pool.layer(1), batch, dim**-0.5 * LOG2E, out)
        assert relative(out[: len(extents)], expected[: len(extents)]) < 2e-3, at_once
        assert bool((out[len(extents) :] == 7.0).all())


@triton.jit  # type: ignore[untyped-decorator]
def plain_pairs(x):  # type: ignore[no-untyped-def]
    """As the assembly of `triton_decode_fp8`, for the interpreter."""
    even = (x & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    odd = ((x >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)
