"""Which encoder takes an image if neither rows nor load count: in turn, or at random.

For comparison, and where every encoder finds every image's rows in a storage that all share.  The
default, `affinity` (`placement.py`), sends equal images to one encoder; under these two an equal
image may be encoded once by each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from epd.scheduling.placement import Candidate, PickEncoder


class RoundRobin:
    """Each its turn, over all images of a gateway."""

    def __init__(self) -> None:
        self._images = itertools.count()

    def __call__(self, encoders: Sequence[Candidate]) -> Candidate:
        return encoders[next(self._images) % len(encoders)]


class ByChance:
    """Uniformly; `integer` draws, by number of the image."""

    def __init__(self, integer: Callable[..., int]) -> None:
        self._integer = integer
        self._images = itertools.count()

    def __call__(self, encoders: Sequence[Candidate]) -> Candidate:
        return encoders[self._integer("encode policy", next(self._images)) % len(encoders)]


def pick_encoder(policy: str, integer: Callable[..., int]) -> PickEncoder | None:
    """By the setting `encode_policy`; None: as placement does without one."""
    if policy == "round_robin":
        return RoundRobin()
    return ByChance(integer) if policy == "random" else None
