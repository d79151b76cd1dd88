"""What products with weights in few bits take beside bf16's, for few rows and for many.

`python -m tests.gpu.speed.packed`, on a CUDA device: the products of a layer of the 32B shape,
captured; layers follow each other, so that no weights are found in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epd.engine.kernels.packed.triton_packed import packed_product
from epd.engine.language.few_rows import FewRowsLinear
from tests.gpu.kernels.test_packed import made
from tests.gpu.speed.experts import took_ms
from tests.gpu.speed.step import copied_nbytes_per_s

SHAPES = {
    "qkv": (10_240, 5120),
    "o": (5120, 8192),
    "gate, up": (51_200, 5120),
    "down": (5120, 25_600),
}
FORMATS = ("int4 in groups", "int4 of channels", "nvfp4", "mxfp4", "channels", "blocks")
LAYERS = 2
ROWS = (1, 8, 32, 64, 2048)
OPTIONS: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def layer_us(product: Callable[[int, torch.Tensor], object], rows: int, depth: int) -> float:
    x = torch.randn(rows, depth, **OPTIONS)

    def run() -> None:
        for layer in range(LAYERS):
            product(layer, x)

    return 1e3 * took_ms(run) / LAYERS


def main() -> None:
    rate = copied_nbytes_per_s()
    torch.set_grad_enabled(False)
    print(f"a copy moves {rate / 1e9:.0f} GB/s; microseconds, and the share of a copy's rate")
    for shape_name, (size, depth) in SHAPES.items():
        plain = [FewRowsLinear(depth, size, bias=False, **OPTIONS) for _ in range(LAYERS)]
        print(f"{shape_name:24}" + "".join(f"{rows:>18}" for rows in ROWS))

        def told(name: str, nbytes: int, product: Callable[[int, torch.Tensor], object]) -> None:
            found = [layer_us(product, rows, depth) for rows in ROWS]  # noqa: B023
            cells = (f"{us:10.1f} {1e6 * nbytes / rate / us:7.2f}" for us in found)
            print(f"  {name:22}" + "".join(cells), flush=True)

        told("bf16", 2 * size * depth, lambda layer, x, plain=plain: plain[layer](x))
        del plain
        for name in FORMATS:
            weights = [made(name, size, depth, "cuda") for _ in range(LAYERS)]
            told(
                name,
                weights[0].nbytes,
                lambda layer, x, weights=weights: packed_product(x, weights[layer]),
            )


if __name__ == "__main__":
    main()
