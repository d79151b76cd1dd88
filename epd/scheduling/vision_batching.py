"""Vision batches: images in order of arrival, which is that of (request, item), under a budget of
patches.

Which thread was faster does not matter: of the images that are prepared when a batch begins, the
oldest go.  One that is still being prepared is passed over and keeps its place, so a slow image
holds up nobody.  An image larger than the budget goes alone; it never blocks the queue.

While a batch is under way, the next may be queued behind it, so that the device goes from one to
the other at once.  It must be half full then: a batch of few images costs nearly as much as one
of many, and those that come meanwhile could have gone along.
"""

from __future__ import annotations

from collections.abc import Iterable


def next_batch(
    prepared: Iterable[tuple[int, str, int]], max_patches: int, *, is_behind: bool = False
) -> list[str]:
    """The keys of the next batch from `(arrival, key, num_patches)`, in any order; none, when it
    would be behind another one and is not worth it yet."""
    batch: list[str] = []
    total = 0
    for _, key, num_patches in sorted(prepared):
        if batch and total + num_patches > max_patches:
            break
        batch.append(key)
        total += num_patches
    return [] if is_behind and 2 * total < max_patches else batch
