"""Keyed randomness: a draw depends on the seed and on what it is for, not on when it is asked.

Removing one request or fault from a plan therefore leaves every other draw as it was, which is what
makes shrinking work.  Keys are strings and numbers, never objects whose `repr` holds an address.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_UNIT = 1.0 / (1 << 53)


def draw_integer(seed: int, *key: object) -> int:
    """In [0, 2**63), equal for equal seed and key in every process and Python version."""
    text = "\x1f".join(map(str, key))
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(16, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1


def draw(seed: int, *key: object) -> float:
    """In [0, 1)."""
    return (draw_integer(seed, *key) >> 10) * _UNIT


class KeyedRandom:
    """The `Random` port of one simulated process; its draws differ from those of other streams."""

    def __init__(self, seed: int, *stream: object) -> None:
        self.seed = seed
        self._stream = stream

    def uniform(self, *key: object) -> float:
        return draw(self.seed, *self._stream, *key)

    def integer(self, *key: object) -> int:
        return draw_integer(self.seed, *self._stream, *key)

    def between(self, low: float, high: float, *key: object) -> float:
        """Uniform in [low, high)."""
        return low + (high - low) * self.uniform(*key)

    def chance(self, probability: float, *key: object) -> bool:
        return probability > 0 and self.uniform(*key) < probability

    def below(self, bound: int, *key: object) -> int:
        """An integer in [0, bound)."""
        return self.integer(*key) % bound

    def pick(self, options: Sequence[T], *key: object) -> T:
        return options[self.below(len(options), *key)]

    def stream(self, *key: object) -> KeyedRandom:
        return KeyedRandom(self.seed, *self._stream, *key)
