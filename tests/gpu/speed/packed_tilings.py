"""What tilings of products with weights in few bits take, beside bf16's product.

`python -m tests.gpu.speed.packed_tilings [FORMAT ...]`, on a CUDA device: shapes of a 32B layer,
captured, a few layers behind each other, so that no weights are found in the cache.  Kernels are
compiled by several processes first.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch

from epd.engine.kernels.packed import Packed, triton_packed
from epd.engine.kernels.packed.triton_packed import ProductTiling, packed_product
from epd.engine.language.few_rows import FewRowsLinear
from tests.gpu.speed.packed import OPTIONS, SHAPES, layer_us

ROWS = (8, 64)
TILINGS = (
    ProductTiling(64, 4, 3, 8),
    ProductTiling(64, 4, 4, 8),
    ProductTiling(64, 4, 3, 4),
    ProductTiling(128, 4, 3, 4),
    ProductTiling(128, 4, 4, 2),
    ProductTiling(128, 8, 3, 4),
    ProductTiling(128, 8, 4, 2),
)
FORMATS = ("int4 of 128", "int4 of 32", "nvfp4", "blocks")
MEASURED = ("qkv", "gate, up")


def drawn(name: str, size: int, depth: int) -> Packed:
    """Any numbers, as they are laid out."""
    if name == "blocks":
        numbers = torch.randn(size, depth, **OPTIONS).to(torch.float8_e4m3fn)
        scales = torch.rand(size // 128, depth // 128, device="cuda")
        return Packed("fp8", numbers, scales, (128, 128))
    numbers = torch.randint(256, (size, depth // 2), dtype=torch.uint8, device="cuda")
    across = 16 if name == "nvfp4" else int(name.rpartition(" ")[2])
    scales = torch.rand(size, depth // across, device="cuda")
    if name == "nvfp4":
        scales, gains = scales.to(torch.float8_e4m3fn), torch.rand(size, 1, device="cuda")
        return Packed("fp4", numbers, scales, (1, across), gains=gains, tiled=True)
    return Packed("int4", numbers, scales.bfloat16(), (1, across), tiled=True)


def us_of(name: str, shape: str, rows: int, way: ProductTiling, layers: int = 2) -> float:
    size, depth = SHAPES[shape]
    triton_packed.tiling = lambda weight, num_rows: way
    weights = [drawn(name, size, depth) for _ in range(layers)]
    return layer_us(lambda layer, x: packed_product(x, weights[layer % layers]), rows, depth)


def compiled(job: tuple[str, str, int, ProductTiling]) -> None:
    us_of(*job, layers=1)


def main(formats: tuple[str, ...]) -> None:
    jobs = list(product(formats, MEASURED, ROWS, TILINGS))
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compiled, jobs))
    torch.set_grad_enabled(False)
    for shape, rows in product(MEASURED, ROWS):
        size, depth = SHAPES[shape]
        plain = [FewRowsLinear(depth, size, bias=False, **OPTIONS) for _ in range(2)]
        wide_us = layer_us(lambda layer, x, plain=plain: plain[layer](x), rows, depth)
        del plain
        print(f"{shape}, {rows} rows: bf16 {wide_us:.1f} us")
        for name in formats:
            found = [us_of(name, shape, rows, way) for way in TILINGS]
            cells = (
                f"{way.block_n}/{way.warps}/{way.stages}/{way.share} {us:.1f} ({us / wide_us:.2f})"
                for way, us in zip(TILINGS, found, strict=True)
            )
            print(f"  {name:14}" + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or FORMATS)
