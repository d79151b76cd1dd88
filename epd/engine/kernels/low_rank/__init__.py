"""What adapters add to one product, or to several of one input side by side: its parts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class AdapterStack(NamedTuple):
    """`B (A x)` of each adapter, which has a place of its own; `[..., R]` is room for ranks."""

    a: torch.Tensor  # [places, parts, R, in]
    b: torch.Tensor  # [places, out, R]: of the parts, one behind the other
    ranks: torch.Tensor  # int32 [places, parts]; 0: nothing is added there
    ends: torch.Tensor  # int32 [parts + 1]: where each part's columns begin, and where the last end
    widest: int  # columns of a part
    unit: int  # divides the columns of each part

    @classmethod
    def empty(
        cls, places: int, rank: int, shape: tuple[int, int], like: torch.Tensor
    ) -> AdapterStack:
        """Room beside a weight `[out, in]`, with no adapter in it; `like`: of its dtype and
        device."""
        (columns, depth), dtype, device = shape, like.dtype, like.device
        return cls(
            torch.zeros(places, 1, rank, depth, dtype=dtype, device=device),
            torch.zeros(places, columns, rank, dtype=dtype, device=device),
            torch.zeros(places, 1, dtype=torch.int32, device=device),
            torch.tensor([0, columns], dtype=torch.int32, device=device),
            columns,
            columns,
        )

    @classmethod
    def side_by_side(cls, parts: list[AdapterStack]) -> tuple[AdapterStack, list[AdapterStack]]:
        """Of one part each; these again, as views of the whole."""
        columns = [part.widest for part in parts]
        ends = torch.tensor([0, *columns]).cumsum(0).to(parts[0].ends)
        a, b, ranks = (torch.cat(pieces, 1) for pieces in list(zip(*parts, strict=True))[:3])
        views = zip(a.split(1, 1), b.split(columns, 1), ranks.split(1, 1), parts, strict=True)
        return cls(a, b, ranks, ends, max(columns), math.gcd(*columns)), [
            part._replace(a=a, b=b, ranks=ranks) for a, b, ranks, part in views
        ]

    def put(self, place: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """An adapter's A `[rank, in]` and B `[out, rank]`, where there is one part."""
        rank = len(a)
        self.a[place, 0, :rank] = a
        self.b[place, :, :rank] = b
        self.ranks[place] = rank
