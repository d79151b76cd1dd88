"""Parts of the kernels of gated delta-net layers: where states lie, and how tokens change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from epd.engine.language.flat_batch import FlatBatch
    from epd.engine.language.kv_pool import SequenceTensor

EPS = tl.constexpr(1e-6)  # of the length of keys and queries
LINEAR = tl.constexpr(20.0)  # from here on softplus is its argument, as in torch


@triton.jit
def where_piece(  # noqa: ANN201 - parts of kernels have no types
    table, piece, stride, FIRST_BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Offset of a piece in its tensor's memory; `table`: the sequence's blocks."""
    block = tl.load(table + FIRST_BLOCK + piece // PER_BLOCK).to(tl.int64)
    return block * stride + (piece % PER_BLOCK) * SIZE


@triton.jit
def strengths_of(  # noqa: ANN201
    place, rate, bias, known, NUM_VALUES: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """How strongly tokens write, and the logarithms of their decay; zero outside the mask
    `known`."""
    beta = tl.sigmoid(tl.load(place, mask=known, other=0.0).to(tl.float32))
    step = tl.load(place + NUM_VALUES, mask=known, other=0.0).to(tl.float32) + tl.load(bias)
    step = tl.where(step > LINEAR, step, tl.log(1.0 + tl.exp(step)))
    beta = beta.to(kind).to(tl.float32)
    return tl.where(known, beta, 0.0), tl.where(known, tl.load(rate) * step, 0.0)


def places(kept: SequenceTensor, batch: FlatBatch) -> dict[str, int]:
    return {
        "NUM_BLOCKS": batch.states.shape[1],
        "FIRST_BLOCK": kept.first_block,
        "PER_BLOCK": kept.pieces.shape[1],
    }
