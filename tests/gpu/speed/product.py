"""What products of few rows take, by torch and by our kernel, beside the bytes of their weights.

`python -m tests.gpu.speed.product`, on a CUDA device: the products of a layer of the 4B shape in
bf16, captured; layers follow each other, so that no weights are found in the cache.  The last
column is what a step of 36 layers would gain.  `few_rows.MOST_ROWS` says where ours is used.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from epd.engine.kernels.triton_few import FEW, product_of_few
from epd.engine.language.few_rows import MOST_ROWS
from tests.gpu.speed.experts import took_ms
from tests.gpu.speed.step import copied_nbytes_per_s

SHAPES = {"qkv": (6144, 2560), "o": (2560, 4096), "gate, up": (19_456, 2560), "down": (2560, 9728)}
LAYERS, OF_MODEL = 6, 36
ROWS = (1, 4, 8, 12, 16, 24, 32, 48, FEW)
OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}


def main() -> None:
    rate = copied_nbytes_per_s()
    torch.cuda.empty_cache()
    weights = {name: torch.randn(LAYERS, *shape, **OPTIONS) for name, shape in SHAPES.items()}
    print(f"a copy moves {rate / 1e9:.0f} GB/s; ours is used for up to {MOST_ROWS} rows")
    print("microseconds: torch / ours / bytes")
    print("rows " + "".join(f"{name:>24}" for name in SHAPES) + "   a step, ms")
    for rows in ROWS:
        cells, gain_ms = [], 0.0
        for name, (_, depth) in SHAPES.items():
            x = torch.randn(rows, depth, **OPTIONS)

            def of_torch(x: torch.Tensor = x, name: str = name) -> None:
                for weight in weights[name]:
                    functional.linear(x, weight)

            def of_ours(x: torch.Tensor = x, name: str = name) -> None:
                for weight in weights[name]:
                    product_of_few(x, weight, None)

            torch_ms, ours_ms = took_ms(of_torch) / LAYERS, took_ms(of_ours) / LAYERS
            bytes_us = 1e6 * weights[name][0].nbytes / rate
            cells.append(f"{1e3 * torch_ms:8.1f} {1e3 * ours_ms:7.1f} {bytes_us:7.1f}")
            gain_ms += OF_MODEL * (torch_ms - ours_ms)
        print(f"{rows:4} " + "".join(cells) + f"{gain_ms:12.2f}")


if __name__ == "__main__":
    main()
