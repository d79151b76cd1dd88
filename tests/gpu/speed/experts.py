"""What a layer's mixture of experts takes, beside what its bytes and its arithmetic would take.

`python -m tests.gpu.speed.experts`, on a CUDA device: layers of the shape of Qwen3-VL-30B-A3B with
random weights in bf16, captured as steps are.  Layers follow each other, so that no weights are
found in the cache.  Rates are those of a large copy and of a large product; the bytes are the
weights of the experts that were hit, and rows as they come and go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd.engine.kernels import kernels_for, triton_experts
from epd.engine.kernels.routing import Routing
from tests.gpu.speed.step import copied_nbytes_per_s

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
LAYERS, TOKENS, TIMES = 4, (1, 8, 64, 512, 4096), 20


def took_ms(call: Callable[[], object]) -> float:
    """Of one call in a captured graph of it."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(TIMES):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / TIMES


def flops() -> float:
    """Of a large product."""
    one = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 1e3 * 2 * 8192**3 / took_ms(lambda: one @ one)


def main() -> None:
    ops, routing = kernels_for("cuda"), Routing(TOP_K)
    rate, peak = copied_nbytes_per_s(), flops()
    torch.cuda.empty_cache()
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    router = torch.randn(LAYERS, NUM_EXPERTS, HIDDEN, **options) / HIDDEN**0.5
    gate_up = torch.randn(LAYERS, NUM_EXPERTS, 2 * INNER, HIDDEN, **options) / HIDDEN**0.5
    down = torch.randn(LAYERS, NUM_EXPERTS, HIDDEN, INNER, **options) / INNER**0.5
    print(f"a copy moves {rate / 1e9:.0f} GB/s, a product does {peak / 1e12:.0f} TFLOP/s")
    print(
        "tokens  rows of a tile  experts hit  layer, ms  routing, ms  bytes, ms  flops, ms  share"
    )
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, **options)

        def routes(x: torch.Tensor = x) -> None:
            for layer in range(LAYERS):
                ops.route(x @ router[layer].t(), routing)

        def layers(x: torch.Tensor = x) -> None:
            for layer in range(LAYERS):
                routed = ops.route(x @ router[layer].t(), routing)
                ops.multiply_experts(x, gate_up[layer], down[layer], routed)

        hit = sum(
            int((ops.route(x @ router[layer].t(), routing).counts > 0).sum())
            for layer in range(LAYERS)
        ) / LAYERS  # fmt: skip
        whole_ms, routing_ms = took_ms(layers) / LAYERS, took_ms(routes) / LAYERS
        nbytes = 2 * (hit * 3 * INNER * HIDDEN + NUM_EXPERTS * HIDDEN + 2 * tokens * HIDDEN)
        bytes_ms = 1e3 * nbytes / rate
        flops_ms = 1e3 * 2 * tokens * TOP_K * 3 * INNER * HIDDEN / peak
        rows = triton_experts.rows_of_tile(tokens * TOP_K, NUM_EXPERTS, 2)
        print(
            f"{tokens:6} {rows:15} {hit:12.1f} {whole_ms:10.4f} {routing_ms:12.4f} "
            f"{bytes_ms:10.4f} {flops_ms:10.4f} {max(bytes_ms, flops_ms) / whole_ms:6.2f}"
        )


if __name__ == "__main__":
    main()
