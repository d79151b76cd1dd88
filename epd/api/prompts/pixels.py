"""Pixels that wait for an encoder, or are in one: 2.5 KB can ask for seconds of its time (F52).

An image's cost follows from its header, not from its bytes.  So the pixels of requests without a
first token have a budget per encoder, of which those who name themselves by a key get a share.  One
request of any permitted size fits, when there is no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from epd.api.http.errors import ApiError
from epd.config import Limits


class PixelBudget:
    """Of one gateway."""

    def __init__(self, limits: Limits, num_encoders: Callable[[], int]) -> None:
        self._limits = limits
        self._num_encoders = num_encoders
        self._used: Counter[str] = Counter()  # by key; the empty one is nobody in particular
        self.num_pixels = 0

    def take(self, key: str, num_pixels: int) -> Callable[[], None]:
        """What gives them back, once.  Raises ApiError 429."""
        total = self._limits.max_encoder_pixels * max(1, self._num_encoders())
        share = round(total * self._limits.max_pixels_share_per_key)
        if key and self._used[key] and self._used[key] + num_pixels > share:
            raise self._refused(f"this key has images of {self._used[key]} pixels", share)
        if self.num_pixels and self.num_pixels + num_pixels > total:
            raise self._refused(f"images of {self.num_pixels} pixels are", total)
        self._add(key, num_pixels)
        left = [num_pixels]
        return lambda: self._add(key, -left.pop()) if left else None

    def _add(self, key: str, num_pixels: int) -> None:
        self._used[key] += num_pixels
        self.num_pixels += num_pixels
        if not self._used[key]:
            del self._used[key]

    def _refused(self, what: str, limit: int) -> ApiError:
        return ApiError(
            429,
            f"{what} before the encoders, where {limit} may be; try again, or send smaller ones",
            code="overloaded",
        )
