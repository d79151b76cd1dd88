"""How far an encoder runs ahead of the consumers of its rows.

Rows that nobody can take yet have to be kept, and nothing else bounds them: a prefill instance
whose receive pool is full still has its images encoded.  So work on an image, its read from storage
or its encoding, begins in order of arrival, while all begun and not yet taken rows fit the device
tier.

Only an image with a granted room overtakes. Its rows have a place to go, so they do not stay; and
its request may hold the slots that all the others wait for. Without this rule, two instances could
wait for each other until a deadline.  One that has to be computed apart (`roles/hands.py`) is
passed over while it may not.

Pixels of those that were begun and have no rows yet have a bound of their own, of the host's
memory.  It waits for no consumer, so nobody overtakes there: who has its turn and does not fit
keeps all behind it waiting until rows were made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class RunAhead(Generic[K]):
    """`is_granted`: whether a consumer waits for a key's rows with memory in hand.  `may_begin`:
    whether what else it needs is free; `claim` takes that.  `pixels_nbytes`: bound of decoded
    pixels."""

    def __init__(
        self,
        capacity_nbytes: int,
        is_granted: Callable[[K], bool],
        may_begin: Callable[[K], bool] = lambda key: True,
        claim: Callable[[K], None] = lambda key: None,
        pixels_nbytes: int = 0,
    ) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.pixels_capacity_nbytes = pixels_nbytes
        self.used = 0
        self._is_granted = is_granted
        self._may_begin = may_begin
        self._claim = claim
        self._begun: dict[K, int] = {}
        self._pixels: dict[K, int] = {}
        self._waiting: dict[K, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: K) -> bool:
        """Whether it waits for its turn."""
        return key in self._waiting

    @property
    def pixels_used(self) -> int:
        return sum(self._pixels.values())

    def join(self, key: K, nbytes: int, pixels_nbytes: int = 0) -> None:
        self._waiting[key] = nbytes, pixels_nbytes

    def count(self, key: K, nbytes: int) -> None:
        """It has begun, or is there already, and somebody waits for it."""
        if key not in self._begun:
            self._begun[key] = nbytes
            self.used += nbytes

    def leave(self, key: K) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(key, None)
        self.used -= self._begun.pop(key, 0)

    def free_pixels(self, key: K) -> None:
        """It has rows, or has none and is not at work any more."""
        self._pixels.pop(key, None)

    def turns(self) -> list[K]:
        """What may begin now, and counts from now on; look when one has left, was granted or has
        freed its pixels."""
        chosen, is_full = [], False
        for key, (nbytes, pixels_nbytes) in list(self._waiting.items()):
            if not self._may_begin(key):  # nor does it hold up who is behind it
                continue
            fits = not self.used or self.used + nbytes <= self.capacity_nbytes
            is_full |= not fits
            if is_full and not self._is_granted(key):
                continue
            used = self.pixels_used
            if used and used + pixels_nbytes > self.pixels_capacity_nbytes:
                break
            del self._waiting[key]
            self._claim(key)
            self.count(key, nbytes)
            self._pixels[key] = pixels_nbytes
            chosen.append(key)
        return chosen
