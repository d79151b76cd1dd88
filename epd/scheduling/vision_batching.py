"""Vision batches: images in order of arrival, which is that of (request, item), under a budget of
patches.

Which thread was faster does not matter: of the images that are prepared when a batch begins, the
oldest go.  One that is still being prepared is passed over and keeps its place, so a slow image
holds up nobody.  An image larger than the budget goes alone; it never blocks the queue.  The ranks
of a group share out a batch, and each has memory for the whole budget.

While a batch is under way, the next may be queued behind it, so that the device goes from one to
the other at once.  It must be half full then: a batch of few images costs nearly as much as one
of many, and those that come meanwhile could have gone along.
"""

from __future__ import annotations

from collections.abc import Iterable

from epd.shares import most


def next_batch(
    prepared: Iterable[tuple[int, str, int]],
    max_patches: int,
    num_ranks: int = 1,
    *,
    is_behind: bool = False,
) -> list[str]:
    """The keys of the next batch from `(arrival, key, num_patches)`, in any order; none, when it
    would be behind another one and is not worth it yet."""
    batch: list[str] = []
    sizes: list[int] = []
    total = 0
    for _, key, num_patches in sorted(prepared):
        if batch and total + num_patches > max_patches * num_ranks:
            break
        batch.append(key)
        sizes.append(num_patches)
        total += num_patches
    while len(sizes) > 1 and most(sizes, num_ranks) > max_patches:
        total -= sizes.pop()
    is_worth_it = not is_behind or 2 * total >= max_patches * num_ranks
    return batch[: len(sizes)] if is_worth_it else []
