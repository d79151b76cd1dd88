"""Keyed randomness: a draw depends on the seed and on what it is for, not on when it is asked.

Removing one request or fault from a plan therefore leaves every other draw as it was, which is what
makes shrinking work.  Keys are strings and numbers, never objects whose `repr` holds an address.

A stream's own part of the key is hashed once; each draw goes on from a copy of that state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SEPARATOR = "\x1f"
_UNIT = 1.0 / (1 << 53)


def draw_integer(seed: int, *key: object) -> int:
    """In [0, 2**63), equal for equal seed and key in every process and Python version."""
    return KeyedRandom(seed).integer(*key)


def draw(seed: int, *key: object) -> float:
    """In [0, 1)."""
    return KeyedRandom(seed).uniform(*key)


class KeyedRandom:
    """The `Random` port of one simulated process; its draws differ from those of other streams."""

    def __init__(self, seed: int, *stream: object) -> None:
        self.seed = seed
        self._stream = stream
        prefix = "".join(f"{part}{SEPARATOR}" for part in stream)
        salt = seed.to_bytes(16, "little")
        self._hashed = hashlib.blake2b(prefix.encode(), digest_size=8, salt=salt)

    def uniform(self, *key: object) -> float:
        return self.share(SEPARATOR.join(map(str, key)))

    def integer(self, *key: object) -> int:
        return self.hashed(SEPARATOR.join(map(str, key)))

    def hashed(self, text: str) -> int:
        """`integer` of a key that is text already; its parts are joined by `SEPARATOR`."""
        hashed = self._hashed.copy()
        hashed.update(text.encode())
        return int.from_bytes(hashed.digest(), "little") >> 1

    def share(self, text: str) -> float:
        """`uniform` of a key that is text already."""
        return (self.hashed(text) >> 10) * _UNIT

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
