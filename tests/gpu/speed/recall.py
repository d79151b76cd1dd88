"""Kernels of delta-net layers over plain decodes and runs: microseconds of a layer, captured.

`python -m tests.gpu.speed.recall`, on a CUDA device: Qwen3.5-9B's heads, 24 layers one behind the
other, so that no state is found in the cache: plain decodes; runs of 4 tokens, whose states are
read alone; and what is replayed of these, all layers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch

from epd.engine.kernels import kernels_for, triton_delta
from epd.engine.kernels.torch_delta import Later
from epd.engine.language.drafts.replay import of_held
from epd.engine.language.flat_batch import FlatSequence, pack, view
from tests.gpu.kernels import test_delta

LAYERS, COUNT = 24, 4


def captured_us(call: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    began.record()
    for _ in range(20):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    return 1e3 * began.elapsed_time(ended) / 20 / LAYERS


def main() -> None:
    test_delta.LAYERS = LAYERS
    ops = kernels_for("cuda")
    heads = test_delta.make_heads((16, 32, 128, 128), torch.bfloat16, "cuda")
    channels = 2 * heads.num_keys * heads.key_dim + heads.values
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    taps = make(LAYERS, 4, channels)
    stacked = heads._replace(rate=heads.rate.repeat(LAYERS, 1), bias=heads.bias.repeat(LAYERS, 1))
    print("sequences, columns of a warp: convolve 1 token, 4; recall 1 token, 4; replay")
    for count, part in product((1, 4, 16, 64), (8, 16, 32)):
        triton_delta.PART = part
        pool = test_delta.make_pool(heads, torch.bfloat16, "cuda", count)
        size = pool.layout.num_state_blocks
        found: list[float] = []
        rows = make(count * COUNT, channels + heads.values + 2 * heads.num_values)
        later = Later(
            make(LAYERS, count * COUNT, channels),
            make(LAYERS, count * COUNT, 2 * heads.num_values),
        )
        table = np.arange(20, dtype=np.int32)
        for run in (1, COUNT):
            parts = [
                FlatSequence(
                    [0], 40 + n, table, 0,
                    state=np.arange(i * size, i * size + size, dtype=np.int32),
                    run=(1 if run == 1 else -run) if not n else 0,
                )
                for i in range(count)
                for n in range(run)
            ]  # fmt: skip
            _, shape = pack(parts, 16, 1)
            data, _ = pack(parts, 16, 1, shape)
            batch = view(torch.from_numpy(data).cuda(), shape, 1)
            here = rows[: count * run].tensor_split([channels, channels + heads.values], -1)
            kept = pool.sequence_tensors()
            left = [Later(*one) for one in zip(*later, strict=True)]
            mixed = ops.convolve(here[0], taps[0], kept[0], 0, batch)

            def convolve(batch=batch, here=here, kept=kept, left=left):  # type: ignore[no-untyped-def]
                for i in range(LAYERS):
                    ops.convolve(here[0], taps[i], kept[0], i, batch, left[i])

            def recall(  # type: ignore[no-untyped-def]
                batch=batch, here=here, kept=kept, left=left, mixed=mixed
            ):
                for i in range(LAYERS):
                    ops.recall(mixed, *here[1:], heads, kept[1], i, batch, left[i])

            found += [captured_us(convolve), captured_us(recall)]
        firsts = [COUNT * i for i in range(count)]
        held = torch.full((count,), 3, dtype=torch.int32, device="cuda")
        flat = of_held(batch, firsts, held)
        found.append(captured_us(lambda: ops.replay(later, taps, stacked, *kept, flat)))  # noqa: B023
        told = [*found[0:4:2], *found[1:4:2], found[4]]
        print(f"{count:9} {part:3}", *(f"{us:8.2f}" for us in told))


if __name__ == "__main__":
    main()
