"""The Triton kernels of adapters against their specification, and rows that have none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from epd.engine.kernels import kernels_for
from epd.engine.kernels.low_rank import AdapterStack
from tests.gpu.kernels.test_kernels import dtypes, relative

SPECIFIED = kernels_for("cpu")
SIZES = {  # columns of the parts, depth
    "one": ((72,), 48),
    "three": ((80, 24, 40), 200),
    "in parts": ((130,), 1040),
}
ROWS = {  # adapters of so many rows each; -1: none
    "none": [(-1, 9)],
    "one row": [(0, 1)],
    "decodes": [(2, 1), (-1, 2), (0, 1), (3, 1), (2, 1), (0, 2), (-1, 1), (1, 1)],
    "prompts": [(1, 1), (-1, 3), (0, 37), (-1, 20), (3, 30)],
}
MANY = [(0, 1), (1, 1), (-1, 4), (2, 200), (-1, 30), (3, 70)]


def made(
    columns: Sequence[int], depth: int, ranks: Sequence[int], room: int, dtype: torch.dtype
) -> AdapterStack:
    """Of these ranks, on a CPU; the second adapter leaves the first part as it is.  What is behind
    a rank, and of who went, is no number."""
    parts = []
    for part, size in enumerate(columns):
        low = AdapterStack.empty(len(ranks), room, (size, depth), torch.empty(0, dtype=dtype))
        low.a.fill_(torch.nan)
        low.b.fill_(torch.nan)
        for place, rank in enumerate(ranks):
            if (place, part) != (1, 0):
                numbers = torch.randn(rank, depth), torch.randn(size, rank)
                low.put(place, numbers[0] / depth**0.5, numbers[1] / rank**0.5)
        parts.append(low)
    whole, views = AdapterStack.side_by_side(parts)
    assert all(view.b.data_ptr() >= whole.b.data_ptr() for view in views)
    return whole


def there(low: AdapterStack, to: torch.device | str | torch.dtype) -> AdapterStack:
    a, b = low.a.to(to), low.b.to(to)
    if isinstance(to, torch.dtype):
        return low._replace(a=a, b=b)
    return low._replace(a=a, b=b, ranks=low.ranks.to(to), ends=low.ends.to(to))


def check(
    rows: Sequence[tuple[int, int]], columns: Sequence[int], depth: int, low: AdapterStack,
    device: str, limit: float,
) -> None:  # fmt: skip
    dtype, low = low.a.dtype, there(low, device)
    places = [place for place, count in rows for _ in range(count)]
    places_there = torch.tensor(places, dtype=torch.int32).to(device)
    x = torch.randn(len(places), depth, device=device).to(dtype)
    before = torch.randn(len(places), sum(columns), device=device).to(dtype)
    x = x.masked_fill((places_there < 0)[:, None], torch.nan)  # of who has none nothing is read
    found, again = before.clone(), before.clone()
    kernels_for("cuda").add_low_rank(found, x, low, places_there)
    kernels_for("cuda").add_low_rank(again, x, low, places_there)
    assert torch.equal(found, again)
    expected = before.double()
    SPECIFIED.add_low_rank(expected, x.double(), there(low, torch.float64), places_there)
    same = places_there < 0
    assert torch.equal(found[same], before[same])
    if max(places) >= 0:
        assert relative(found, expected) < limit
        added = found.double() - before.double()
        assert relative(added, expected - before.double()) < 8 * limit


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", SIZES)
def test_what_is_added(sizes: str, rows: str, kernel_device: str) -> None:
    for dtype, limit in dtypes(kernel_device):
        torch.manual_seed(len(rows))
        columns, depth = SIZES[sizes]
        low = made(columns, depth, (1, 8, 16, 3), 16, dtype)
        check(ROWS[rows], columns, depth, low, kernel_device, limit)


@pytest.mark.parametrize("rank", [1, 5, 16, 32, 64, 100])
def test_every_rank(rank: int, kernel_device: str) -> None:
    for dtype, limit in dtypes(kernel_device):
        torch.manual_seed(rank)
        low = made((48, 33), 64, (rank, 1, rank, min(2, rank)), rank, dtype)
        check(ROWS["decodes"], (48, 33), 64, low, kernel_device, limit)


def test_many_rows(kernel_device: str) -> None:
    """In higher tiles."""
    for dtype, limit in dtypes(kernel_device):
        torch.manual_seed(0)
        low = made((40, 24), 72, (8, 2, 16, 5), 16, dtype)
        check(MANY, (40, 24), 72, low, kernel_device, limit)


def test_shapes_of_models(kernel_device: str) -> None:
    if kernel_device == "cpu":
        pytest.skip("takes minutes")
    for dtype, limit in dtypes(kernel_device):
        for columns, depth in (((4096, 1024, 1024), 2560), ((9728, 9728), 2560), ((2560,), 9728)):
            for ranks in ((16, 8, 16, 16), (64, 1, 32, 64)):
                low = made(columns, depth, ranks, max(ranks), dtype)
                for rows in ([*ROWS["decodes"]] * 4, [(0, 1)], MANY, [(0, 3000), (-1, 7), (3, 90)]):
                    check(rows, columns, depth, low, kernel_device, limit)
