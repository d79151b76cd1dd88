"""How numbers of four bits lie where products of few rows read them.

Theory of operation
-------------------
A matrix unit of a GPU takes its left operand from registers: 128 threads hold 64 rows by 16
columns.  Each has two columns side by side of two rows, and two more behind them.  In a tile of 64
rows by 128 columns each thread's numbers of four such steps are 16 bytes side by side.  So a tile
is read as it lies and goes nowhere but into the unit.  Which column stands where in a sum is free
as long as inputs stand likewise.  Where few columns share a scale, a thread has 32 columns side by
side, so that each scale is for it alone (`own`).

A word of 32 bits is a step's: each half has a number of the four pairs.  Integers lie one behind
the other.  The bits of e2m1 lie where a shift puts them into a bfloat16, the sign on top.
"""

from __future__ import annotations

from math import prod

import torch

ROWS, COLUMNS = 64, 128  # of a tile
_PLACES = {  # of each bit of the four numbers of half a word
    "int4": ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)),
    "fp4": ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14)),
}
# Parts of rows (warp, half, eighth) and of columns, and their order in memory behind the tile's.
_OWN = (4, 2, 8), (4, 2, 4, 2, 2), (0, 4, 6, 1, 3, 5, 7, 9, 8, 2)
_IN_ORDER = (4, 2, 8), (2, 4, 2, 4, 2), (0, 4, 5, 1, 3, 8, 6, 9, 7, 2)


def tiled(codes: torch.Tensor, kind: str, *, own: bool) -> torch.Tensor:
    """uint8 `[..., out, in / 2]` of codes `[..., out, in]`; sizes are those of whole tiles."""
    rows, columns, order = _OWN if own else _IN_ORDER
    parts = codes.reshape(-1, *rows, codes.shape[-1] // COLUMNS, *columns).permute(order)
    words = torch.zeros(parts.shape[:-2], dtype=torch.int32, device=codes.device)
    for number, places in enumerate(_PLACES[kind]):
        code = parts[..., number // 2, number % 2].int()
        for bit, place in enumerate(places):
            words |= (code >> bit & 1) << place
    numbers = words.to(torch.int16).view(-1).view(torch.uint8)
    return numbers.view(*codes.shape[:-1], codes.shape[-1] // 2)


def codes_of(numbers: torch.Tensor, kind: str, *, own: bool) -> torch.Tensor:
    """The way back."""
    rows, columns, order = _OWN if own else _IN_ORDER
    shape = (*numbers.shape[:-1], 2 * numbers.shape[-1])
    words = numbers.reshape(-1).view(torch.int16).int()
    found = torch.zeros(len(words), 4, dtype=torch.uint8, device=numbers.device)
    for number, places in enumerate(_PLACES[kind]):
        for bit, place in enumerate(places):
            found[:, number] |= ((words >> place & 1) << bit).to(torch.uint8)
    sizes = (prod(shape[:-1]) // ROWS, *rows, shape[-1] // COLUMNS, *columns)
    parts = found.view(*(sizes[dim] for dim in order))
    return parts.permute(*(order.index(dim) for dim in range(len(order)))).reshape(shape)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """Inputs `[T, in]` in the order in which a unit takes columns of tiles, each thread's `own`."""
    parts = x.view(len(x), -1, *_OWN[1]).permute(0, 1, 3, 4, 5, 2, 6)
    return parts.reshape(x.shape)
