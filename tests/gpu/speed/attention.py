"""Which attention is fastest for a vision tower, and which product with its activation.

`python -m tests.gpu.speed.attention`, on a CUDA device, in bf16: our kernel and torch's backends
for a tower's packed images (16 heads of 64), what the first call of a new shape costs (a plan
may be built), the same for prompts (32 and 8 heads of 128, causal), and the tower's first product
with its activation behind or in it.
A table comes last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from epd.engine.vision.segments import SegmentAttention

BACKENDS = {
    "torch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
PACKED = ((1, 8160), (4, 8160), (1, 1296), (6, 1296), (1, 4000), (1, 4001))  # images, patches
PROMPTS = ((1, 2104), (8, 1024), (1, 8192))  # sequences, tokens
RUNS = 8


@dataclass(frozen=True)
class Figure:
    what: str
    how: str
    first_ms: float
    median_ms: float
    tflop: float

    def __str__(self) -> str:
        rate = self.tflop / self.median_ms * 1e3
        return (
            f"{self.what:28} {self.how:16} {self.first_ms:9.2f} {self.median_ms:9.3f} {rate:9.0f}"
        )


def timed(what: str, how: str, tflop: float, run: Callable[[], object]) -> Figure:
    def once() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    first_ms = once()
    times_ms = sorted(once() for _ in range(RUNS))
    return Figure(what, how, first_ms, times_ms[RUNS // 2], tflop)


def packed(count: int, length: int) -> list[Figure]:
    """Attention of a layer over `count` images, read from the packed product as a tower does."""
    qkv = torch.randn(count * length, 3, 16, 64, device="cuda", dtype=torch.bfloat16)
    query, key, value = (part.view(count, length, 16, 64).transpose(1, 2) for part in qkv.unbind(1))
    tflop = 4 * count * length**2 * 1024 / 1e12
    what = f"tower {count} x {length}"
    attend, bounds = SegmentAttention(), torch.arange(0, (count + 1) * length, length)
    ours = timed(what, "segments (ours)", tflop, lambda: attend(qkv, bounds, 0.125))
    return [ours, *attended(what, tflop, query, key, value, causal=False)]


def prompts(count: int, length: int) -> list[Figure]:
    shape = (count, length, 32, 128)
    query = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    key = torch.randn(count, length, 8, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    tflop = 2 * count * length**2 * 4096 / 1e12
    return attended(f"prompt {count} x {length}", tflop, query, key, key.clone(), causal=True)


def attended(
    what: str,
    tflop: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
) -> list[Figure]:
    figures = []
    for how, backend in BACKENDS.items():

        def run(backend: SDPBackend | None = backend) -> torch.Tensor:
            def attend() -> torch.Tensor:
                return scaled_dot_product_attention(
                    query, key, value, is_causal=causal, enable_gqa=causal
                )

            if backend is None:
                return attend()
            with sdpa_kernel(backend):
                return attend()

        try:
            figures.append(timed(what, how, tflop, run))
        except RuntimeError as error:
            print(f"{what} {how}: {str(error).splitlines()[0]}")
    return figures


def products(num_patches: int) -> list[Figure]:
    """`[N, 1024]` by `[4096, 1024]`, then GELU."""
    x = torch.randn(num_patches, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16) * 0.03
    bias = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    tflop = 2 * num_patches * 1024 * 4096 / 1e12
    name = f"product {num_patches} x 1024 x 4096"
    return [
        timed(name, "alone", tflop, lambda: linear(x, weight, bias)),
        timed(
            name, "gelu behind", tflop, lambda: gelu(linear(x, weight, bias), approximate="tanh")
        ),
        timed(
            name,
            "gelu within",
            tflop,
            lambda: torch._addmm_activation(bias, x, weight.t(), use_gelu=True),
        ),
    ]


def main() -> None:
    with torch.inference_mode():
        figures = [f for count, length in PACKED for f in packed(count, length)]
        figures += [f for count, length in PROMPTS for f in prompts(count, length)]
        figures += [f for num_patches in (1296, 8160) for f in products(num_patches)]
    version = torch.backends.cudnn.version()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {version}")
    print(f"{'what':28} {'how':16} {'first ms':>9} {'median ms':>9} {'TFLOP/s':>9}")
    print("\n".join(map(str, figures)))


if __name__ == "__main__":
    main()
