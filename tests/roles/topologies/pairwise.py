"""Cases that hold every pair of values of any two dimensions, far fewer than the whole product."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

CANDIDATES = 60  # of which each case is the one that covers most


def pairs_of(case: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(case, 2)}


def everything(dimensions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(dimensions, values, strict=True)) for values in product(*dimensions.values())]


def pairwise(dimensions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The same cases in every run; greedy."""
    draw = random.Random(1)
    left = {
        (a, x, b, y)
        for a, b in combinations(dimensions, 2)
        for x, y in product(dimensions[a], dimensions[b])
    }
    cases = []
    while left:
        a, x, b, y = min(left, key=str)
        found = [
            {name: draw.choice(values) for name, values in dimensions.items()} | {a: x, b: y}
            for _ in range(CANDIDATES)
        ]
        best = max(found, key=lambda case: len(pairs_of(case) & left))
        left -= pairs_of(best)
        cases.append(best)
    return cases
