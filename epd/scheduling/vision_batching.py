"""Vision batches: pictures in order of (arrival, request, item) under a budget of patches.

Deterministic: the same pictures in the same order give the same batches.  A picture larger than the
budget goes alone; it never blocks the line.
"""

from __future__ import annotations

from collections.abc import Iterable


def next_batch(waiting: Iterable[tuple[str, int]], max_patches: int) -> list[str]:
    """The keys of the next batch from `(key, num_patches)` in line order."""
    batch: list[str] = []
    total = 0
    for key, num_patches in waiting:
        if batch and total + num_patches > max_patches:
            break
        batch.append(key)
        total += num_patches
    return batch
