"""What a layer's mixture of experts in few bits takes beside bfloat16's.

`python -m tests.gpu.speed.packed_experts`, on a CUDA device: the shape of Qwen3-VL-30B-A3B, random
numbers, captured; layers follow each other, so that few weights are found in the cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.packed import Packed
from epd.engine.kernels.routing import Routed, Routing
from tests.gpu.speed.experts import HIDDEN, INNER, NUM_EXPERTS, TOP_K, took_ms
from tests.gpu.speed.packed_tilings import OPTIONS, drawn

LAYERS, TOKENS = 4, (1, 8, 64, 512, 4096)
FORMATS = ("int4 of 128", "int4 of 32", "nvfp4", "blocks")
Layer = Callable[[torch.Tensor, Routed, int], object]


def stacked(name: str, size: int, depth: int) -> Packed:
    one = drawn(name, size, depth)
    room = one.room(NUM_EXPERTS, 1)
    for expert in range(NUM_EXPERTS):
        room.put(expert, 0, one)
    return room


def times_us(layer_of: Layer) -> list[float]:
    ops, found = kernels_for("cuda"), []
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, **OPTIONS)
        drawn_logits = torch.randn(LAYERS, tokens, NUM_EXPERTS, **OPTIONS)
        routed = [ops.route(logits, Routing(TOP_K)) for logits in drawn_logits]

        def run(x: torch.Tensor = x, routed: list[Routed] = routed) -> None:
            for layer in range(LAYERS):
                layer_of(x, routed[layer], layer)

        found.append(1e3 * took_ms(run) / LAYERS)
    return found


def main() -> None:
    torch.set_grad_enabled(False)
    ops = kernels_for("cuda")
    gate_up = torch.randn(LAYERS, NUM_EXPERTS, 2 * INNER, HIDDEN, **OPTIONS) / HIDDEN**0.5
    down = torch.randn(LAYERS, NUM_EXPERTS, HIDDEN, INNER, **OPTIONS) / INNER**0.5
    plain = list(zip(gate_up, down, strict=True))
    wide = times_us(lambda x, routed, i: ops.multiply_experts(x, *plain[i], routed))
    print("us of a layer for " + ", ".join(map(str, TOKENS)) + " tokens, and parts of bf16's")
    print("bf16         " + "  ".join(f"{us:8.1f}       " for us in wide), flush=True)
    for name in FORMATS:
        weights = [
            (stacked(name, 2 * INNER, HIDDEN), stacked(name, HIDDEN, INNER)) for _ in range(LAYERS)
        ]
        found = times_us(
            lambda x, routed, i, weights=weights: ops.multiply_packed_experts(
                x, *weights[i], routed
            )
        )
        cells = (f"{us:8.1f} ({us / of:4.2f})" for us, of in zip(found, wide, strict=True))
        print(f"{name:13}" + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
