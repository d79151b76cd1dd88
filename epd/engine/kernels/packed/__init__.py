"""Weights in four and eight bits, in the one form that products read: numbers and their scales.

What publishers store is of this form already, or is turned into it as it is read
(`weights.stored_formats`).  It takes no more memory so, but for zeros, which become bytes, and for
the one scale of a whole, which each channel has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from epd.engine.kernels.packed import tiles

Kind = Literal["fp8", "int4", "fp4"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
MIDDLE = 8  # the integer of four bits that means zero, where none is stored
_OWN = 64  # columns with a scale in common, of which fewer are one thread's
_LARGEST = 135  # of the exponents that are scales of tiles


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight `[..., out, in]`; its numbers times its scales, times its gains."""

    kind: Kind
    numbers: torch.Tensor  # e4m3, or uint8 of two numbers each, the lower half of the earlier
    scales: torch.Tensor  # [..., blocks of rows, blocks of columns]
    block: tuple[int, int]  # rows and columns that have a scale in common; the last may have fewer
    zeros: torch.Tensor | None = None  # uint8, as the scales: the number that means zero
    gains: torch.Tensor | None = None  # float32 [..., out, 1]
    order: torch.Tensor | None = None  # int32 [in]: which input each column is for
    tiled: bool = False  # numbers of four bits lie as `laid_out` puts them

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, columns = self.numbers.shape
        return (*rows, columns if self.kind == "fp8" else 2 * columns)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; without those that it lacks."""
        names = ("numbers", "scales", "zeros", "gains", "order")
        found = ((name, getattr(self, name)) for name in names)
        return {name: tensor for name, tensor in found if tensor is not None}

    def widened(self) -> torch.Tensor:
        """What it means, in float32."""
        if self.kind == "fp8":
            values = self.numbers.float()
        else:
            codes = self._codes()
            if self.kind == "fp4":
                signed = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
                values = signed[codes.int()]
            else:
                zeros = MIDDLE if self.zeros is None else self._spread(self.zeros.float())
                values = codes.float() - zeros
        scales = self.scales.float() if self.gains is None else self.scales.float() * self.gains
        values = values * self._spread(scales)
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(-1, self.order.long(), values)

    def _codes(self) -> torch.Tensor:
        """uint8 `[..., out, in]`: of four bits, in the order of columns."""
        if self.tiled:
            return tiles.codes_of(self.numbers, self.kind, own=self.own)
        return torch.stack((self.numbers & 15, self.numbers >> 4), -1).flatten(-2)

    @property
    def own(self) -> bool:
        """Whether a thread that multiplies tiles has columns side by side."""
        return self.block[1] < _OWN and self.block[1] < self.shape[-1]

    def laid_out(self) -> Packed:
        """In tiles, if its sizes and scales allow for that."""
        (rows, columns), across = self.shape[-2:], self.block[1]
        fits = across in (16, 32) if self.own else across % _OWN == 0 or across >= columns
        if self.kind == "fp8" or self.tiled or rows % tiles.ROWS or columns % tiles.COLUMNS:
            return self
        if self.scales.dtype == torch.float8_e8m0fnu:
            fits = fits and int(self.scales.view(torch.uint8).max()) <= _LARGEST
        if not fits or (self.kind == "fp4" and not self.own):
            return self
        return replace(
            self, numbers=tiles.tiled(self._codes(), self.kind, own=self.own), tiled=True
        )

    def _spread(self, each: torch.Tensor) -> torch.Tensor:
        """What blocks have in common, for each number of them."""
        for dim, size in zip((-2, -1), self.block, strict=True):
            if each.shape[dim] > 1:
                each = each.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        return each

    def narrowed(self, dim: int, pieces: Sequence[range]) -> Packed:
        """Some rows (`dim` -2) or columns (-1) of it: a view, where they are one piece.  Raises
        ValueError where a piece cuts a block, or where columns have an order of their own."""
        size = self.shape[dim]
        unit = self.block[dim] if self.scales.shape[dim] > 1 else 1
        if dim == -1 and (self.order is not None or self.tiled):
            raise ValueError("its columns have an order of their own")
        per_item = 2 if dim == -1 and self.kind != "fp8" else 1
        least = max(unit, tiles.ROWS if self.tiled else per_item)
        if any(edge % least and edge < size for r in pieces for edge in (r.start, r.stop)):
            raise ValueError(f"{least} numbers share a scale or a byte")

        def of(tensor: torch.Tensor | None, unit: int) -> torch.Tensor | None:
            if tensor is None or tensor.shape[dim] == 1:
                return tensor
            parts = [tensor.narrow(dim, r.start // unit, -(-len(r) // unit)) for r in pieces]
            return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

        rows, columns = self.block
        if self.scales.shape[dim] == 1:
            kept = sum(map(len, pieces))
            rows, columns = (kept, columns) if dim == -2 else (rows, kept)
        numbers, scales = of(self.numbers, per_item), of(self.scales, unit)
        assert numbers is not None
        assert scales is not None
        zeros, gains = of(self.zeros, unit), of(self.gains, 1)
        return replace(
            self, numbers=numbers, scales=scales, block=(rows, columns), zeros=zeros, gains=gains
        )

    def of_expert(self, expert: int) -> Packed:
        """Of those side by side in the first dimension: a view."""
        return replace(self, **{name: t[expert] for name, t in self.tensors().items()})

    def room(self, count: int, num_halves: int) -> Packed:
        """Memory for so many as `num_halves` of these below each other, as experts have them.
        Raises ValueError where these do not lie so."""
        if self.order is not None:
            raise ValueError("its columns have an order of their own")
        if num_halves > 1 and self.shape[-2] % self.block[0]:
            raise ValueError(f"{self.block[0]} rows share a scale")
        made = {
            name: tensor.new_empty(count, num_halves * len(tensor), tensor.shape[1])
            for name, tensor in self.tensors().items()
        }
        return replace(self, **made)

    def put(self, expert: int, half: int, weight: Packed) -> None:
        """A half of one of these.  Raises ValueError where it is of another form."""
        mine, its = self.tensors(), weight.tensors()
        form = (self.kind, self.tiled, self.block, self.scales.dtype, *mine)
        if form != (weight.kind, weight.tiled, weight.block, weight.scales.dtype, *its):
            raise ValueError("experts are stored in several forms")
        for name, tensor in its.items():
            mine[name][expert].narrow(0, half * len(tensor), len(tensor)).copy_(tensor)

    def copied(self) -> Packed:
        """With memory of its own."""
        contiguous = torch.contiguous_format
        copies = {n: t.clone(memory_format=contiguous) for n, t in self.tensors().items()}
        return replace(self, **copies)

    @staticmethod
    def joined(parts: Sequence[Packed]) -> Packed | None:
        """Weights of one input, one below the other; None: they do not fit."""
        first, names = parts[0], set(parts[0].tensors())
        ways = {(p.kind, p.tiled, p.block, p.scales.dtype, *p.tensors()) for p in parts}
        if len(ways) > 1 or any(part.shape[-2] % first.block[0] for part in parts):
            return None
        if not all(p.order is None or torch.equal(p.order, first.order) for p in parts):
            return None
        each = {name: [part.tensors()[name] for part in parts] for name in names - {"order"}}
        return replace(first, **{name: torch.cat(tensors, -2) for name, tensors in each.items()})
