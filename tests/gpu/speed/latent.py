"""What latent attention of Kimi-K2.5's sizes takes in a layer, beside its bytes and its arithmetic.

`python -m tests.gpu.speed.latent`, on a CUDA device, in bf16, captured: decodes with the heads of
one rank and of one of eight, by each tiling that fits, the one that is chosen first; prompts over
what was expanded, and the product that expands it.  Layers follow each other, so that no rows are
found in the cache.  Rates are those of a large copy and of a large product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from epd.engine.kernels import triton_latent
from epd.engine.kernels.torch_latent import Expanded
from epd.engine.language.decode_parts import NUM_LATENT_PROGRAMS
from epd.engine.language.flat_batch import FlatBatch
from epd.engine.language.kv_pool import KvPool
from epd.engine.language.state_kinds import PagedRows, layout_of
from tests.gpu.kernels.test_latent import BLOCK, make_batch
from tests.gpu.speed.experts import flops, took_ms
from tests.gpu.speed.step import copied_nbytes_per_s

LATENT, KEY, TURNED, VALUE, HEADS, LAYERS = 512, 128, 64, 128, 64, 4
DECODES = {
    "1@32000": [32_000],
    "8@8700": [8700] * 8,
    "64@1150": [1150] * 64,
    "64@1150 + 1@32000": [1150] * 64 + [32_000],
}
PROMPTS = {"8192": [(0, 8192)], "4 x 2048": [(0, 2048)] * 4, "2048 behind 30000": [(30_000, 2048)]}
TILINGS = ((64, 32, 8, 5), (32, 64, 8, 5), (32, 32, 8, 7), (16, 32, 4, 5), (16, 32, 4, 7))
OPTIONS = {"dtype": torch.bfloat16, "device": "cuda"}
SCALE = (KEY + TURNED) ** -0.5


def decodes(name: str, contexts: Sequence[int], heads: int, rate: float) -> None:
    extents = [(context - 1, 1) for context in contexts]
    batch, num_blocks = make_batch(extents, "cuda", NUM_LATENT_PROGRAMS)
    rows = PagedRows(LAYERS, 1, LATENT + TURNED, num_parts=1)
    pool = KvPool(layout_of(rows, (), torch.bfloat16, BLOCK, 1), num_blocks, torch.bfloat16, "cuda")
    pool.tensor.normal_()
    query = torch.randn(heads, len(contexts), LATENT, **OPTIONS).transpose(0, 1)
    turned = torch.randn(len(contexts), heads, TURNED, **OPTIONS)

    def layers() -> None:
        for layer in range(LAYERS):
            triton_latent.attend_latent(query, turned, pool.latent(layer), batch, SCALE)

    bytes_ms = 1e3 * sum(contexts) * (LATENT + TURNED) * 2 / rate
    chosen = triton_latent._decode_tiling
    try:
        for tiling in (chosen(query), *TILINGS):
            triton_latent._decode_tiling = lambda query, tiling=tiling: (  # type: ignore[misc]
                triton_latent._Tiling(*tiling)
            )
            layer_ms = took_ms(layers) / LAYERS
            print(
                f"{name:20} {heads:5} {tuple(tiling)!s:18} {layer_ms:9.4f} {bytes_ms:9.4f} "
                f"{bytes_ms / layer_ms:6.2f}"
            )
    finally:
        triton_latent._decode_tiling = chosen


def prompts(name: str, extents: list[tuple[int, int]], peak: float) -> None:
    batch, _ = make_batch(extents, "cuda", 1)
    rows = torch.randn(len(batch.indices) * BLOCK, LATENT + TURNED, **OPTIONS)
    factors = torch.randn(HEADS * (KEY + VALUE), LATENT, **OPTIONS) * LATENT**-0.5
    query = torch.randn(len(batch.ids), HEADS, KEY + TURNED, **OPTIONS)
    turned = torch.randn(len(query), HEADS, TURNED, **OPTIONS)
    out = torch.empty(len(query), HEADS, VALUE, **OPTIONS)
    expand_ms = took_ms(lambda: linear(rows[:, :LATENT], factors))
    numbers = linear(rows[:, :LATENT], factors).unflatten(1, (HEADS, -1))
    expanded = Expanded(numbers, rows, BLOCK, range(len(extents)), 0)
    attend_ms = took_ms(lambda: _attend(query, turned, expanded, batch, out))
    pairs = sum(count * (start + (count + 1) / 2) for start, count in extents)
    flops_ms = 1e3 * 2 * pairs * HEADS * (KEY + TURNED + VALUE) / peak
    print(
        f"{name:20} {expand_ms:10.3f} {attend_ms:10.3f} {flops_ms:10.3f} "
        f"{flops_ms / attend_ms:6.2f}"
    )


def _attend(
    query: torch.Tensor,
    turned: torch.Tensor,
    expanded: Expanded,
    batch: FlatBatch,
    out: torch.Tensor,
) -> None:
    triton_latent.attend_expanded(query, turned, expanded, batch, SCALE, out)


def main() -> None:
    rate, peak = copied_nbytes_per_s(), flops()
    torch.cuda.empty_cache()
    print(f"a copy moves {rate / 1e9:.0f} GB/s, a product does {peak / 1e12:.0f} TFLOP/s")
    print("decodes              heads tiling             layer, ms bytes, ms  share")
    for name, contexts in DECODES.items():
        for heads in (HEADS, HEADS // 8):
            decodes(name, contexts, heads, rate)
    print("prompts              expand, ms attend, ms  flops, ms  share")
    for name, extents in PROMPTS.items():
        prompts(name, extents, peak)


if __name__ == "__main__":
    main()
