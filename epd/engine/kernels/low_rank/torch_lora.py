"""What adapters add to a product, in plain torch: what `triton_lora` must compute."""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import linear

from epd.engine.kernels.low_rank import AdapterStack


def add_low_rank(
    out: torch.Tensor, x: torch.Tensor, low: AdapterStack, places: torch.Tensor
) -> None:
    """`out[t] += B (A x[t])` in place, of the adapter whose place `places[t]` is; below 0: none.

    out `[T, out]`, x `[T, in]`, places int32 `[T]`.  Rows without an adapter are not read and not
    written.  `A x` is rounded to the precision of x.
    """
    ranks, ends = low.ranks.tolist(), low.ends.tolist()
    for place in places.unique().tolist():
        if place < 0 or not any(ranks[place]):
            continue
        rows = (places == place).nonzero()[:, 0]
        own = x[rows]
        for part, (begin, end) in enumerate(itertools.pairwise(ends)):
            if rank := ranks[place][part]:
                inner = linear(own, low.a[place, part, :rank])
                out[rows, begin:end] += linear(inner, low.b[place, begin:end, :rank])
