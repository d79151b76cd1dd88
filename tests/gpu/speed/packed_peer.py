"""What products with weights in few bits take beside those of vLLM's library, in one process.

`python -m tests.gpu.speed.packed_peer FOLDER`, on a CUDA device; FOLDER is that of vLLM's wheel
(0.26), of which a library and the module of scalar types are loaded.  Its products of integers in
groups of 128: machete, its first choice on Hopper, and marlin.  Of fp8 in blocks: cutlass with
inputs in eight bits, whose making counts, and marlin with inputs in 16 bits, as ours.  Each is
compared with the product of widened weights first.  Layers follow each other.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from epd.engine.kernels.packed.triton_packed import packed_product
from tests.gpu.kernels.test_packed import made
from tests.gpu.speed.packed import LAYERS, OPTIONS, SHAPES, layer_us

ROWS = (1, 8, 64, 2048)
GROUP = 128
Product = Callable[[torch.Tensor], torch.Tensor]
Made = tuple[torch.Tensor, Product]  # with the widened weights
FORMATS = {
    "int4 in groups of 128": ("int4", ("machete", "marlin")),
    "blocks": ("fp8", ("cutlass", "marlin")),
}


def permuted(scales: torch.Tensor) -> torch.Tensor:
    """As marlin's threads need them."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    return scales.reshape(-1, 64)[:, order].reshape(scales.shape).contiguous()


class Theirs:
    """`types`: the numbers by which their products know formats."""

    def __init__(self, folder: Path) -> None:
        torch.ops.load_library(str(folder / "_C_stable_libtorch.abi3.so"))
        found = runpy.run_path(str(folder / "scalar_type.py"))["scalar_types"]
        self.types = {"int4": found.uint4b8.id, "fp8": found.float8_e4m3fn.id}
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self._workspace = torch.zeros(count, dtype=torch.int32, device="cuda")
        self._none = torch.empty(0, dtype=torch.int32, device="cuda")

    def _marlin(self, kind: str, words: torch.Tensor, scales: torch.Tensor) -> Product:
        ops, bits = torch.ops._C, {"int4": 4, "fp8": 8}[kind]
        depth, size = words.shape[0] * 32 // bits, words.shape[1]
        laid = ops.gptq_marlin_repack(words, self._none, depth, size, bits, False)
        ordered = permuted(scales)
        return lambda x: ops.marlin_gemm(
            x, None, laid, None, ordered, None, None, None, None, None, self._workspace,
            self.types[kind], len(x), size, depth, True, False, True, False,
        )  # fmt: skip

    def int4(self, name: str, size: int, depth: int) -> Made:
        numbers = torch.randint(16, (depth, size), device="cuda", dtype=torch.int32)
        scales = (torch.rand(depth // GROUP, size, device="cuda") * 0.05 + 0.01).bfloat16()
        shifts = 4 * torch.arange(8, device="cuda", dtype=torch.int32).view(1, 8, 1)
        words = (numbers.view(-1, 8, size) << shifts).sum(1, dtype=torch.int32)
        wide = (numbers - 8) * scales.float().repeat_interleave(GROUP, 0)
        if name == "marlin":
            return wide, self._marlin("int4", words, scales)
        ops, kind, columns = torch.ops._C, self.types["int4"], words.t().contiguous().t()
        laid = ops.machete_prepack_B(columns, torch.bfloat16, kind, torch.bfloat16)
        return wide, lambda x: ops.machete_mm(
            x, laid, kind, None, scales, None, GROUP, None, None, None
        )

    def fp8(self, name: str, size: int, depth: int) -> Made:
        values = torch.randn(size, depth, device="cuda").to(torch.float8_e4m3fn)
        scales = torch.rand(size // GROUP, depth // GROUP, device="cuda") * 0.05 + 0.01
        each = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        wide = (values.float() * each).t()
        if name == "marlin":
            words = values.view(torch.int32).t().contiguous()  # four of a row in each
            across = scales.t().repeat_interleave(GROUP, 1).bfloat16()
            return wide, self._marlin("fp8", words, across * 2.0**120)
        ops = torch.ops._C

        def product(x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 4))  # it takes fours
            few = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
            gains = torch.empty(depth // GROUP, len(x), device="cuda").t()
            ops.per_token_group_fp8_quant(
                x, few, gains, GROUP, 1e-10, -448.0, 448.0, False, True, False
            )
            out = torch.empty(len(x), size, **OPTIONS)
            ops.cutlass_scaled_mm(out, few, values.t(), gains, scales.t(), None)
            return out

        return wide, product

    def checked(self, kind: str, name: str, size: int, depth: int) -> Product:
        wide, product = getattr(self, kind)(name, size, depth)
        x = torch.randn(8, depth, **OPTIONS)
        expected = x.float() @ wide
        off = (product(x).float() - expected).norm() / expected.norm()
        assert off < 0.05, f"off by {off:.3f}"
        return product  # type: ignore[no-any-return]


def times_us(products: list[Product], depth: int) -> list[float]:
    return [layer_us(lambda layer, x: products[layer](x), rows, depth) for rows in ROWS]


def main() -> None:
    torch.set_grad_enabled(False)
    theirs = Theirs(Path(sys.argv[1]))
    print("microseconds for 1, 8, 64 and 2,048 rows, and ours as a part of theirs")
    for shape_name, (size, depth) in SHAPES.items():
        for format_name, (kind, names) in FORMATS.items():
            weights = [made(format_name, size, depth, "cuda") for _ in range(LAYERS)]
            ours = times_us([partial(packed_product, weight=weight) for weight in weights], depth)
            print(
                f"{shape_name:10} {format_name:22} ours    ", *(f"{us:8.1f}      " for us in ours)
            )
            for name in names:
                try:
                    products = [theirs.checked(kind, name, size, depth) for _ in range(LAYERS)]
                    took = times_us(products, depth)
                except (RuntimeError, AssertionError) as error:
                    print(f"{'':33} {name:8} {str(error)[:120]}")
                    continue
                cells = (f"{us:8.1f} {our / us:5.2f}" for our, us in zip(ours, took, strict=True))
                print(f"{'':33} {name:8}", *cells, flush=True)


if __name__ == "__main__":
    main()
