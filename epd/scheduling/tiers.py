"""The accounting of an exclusive two-tier cache: the tier of each key, fill levels, statistics.

A key is in one tier at a time.  Its bytes count at their destination: those being copied down count
for the lower tier, so one lack of room moves them once. The machine that owns a value decides
whether and how it moves; this module only keeps the order of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.records import CacheTier
from epd.scheduling.pool import LruCache


@dataclass(slots=True)
class TierCounts:
    """What one tier did since this life began."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0  # for lack of room: out of the cache, or a tier down
    failures: int = 0

    def report(self, tier: str, nbytes: int, capacity_nbytes: int) -> CacheTier:
        return CacheTier(
            tier=tier,
            nbytes=nbytes,
            capacity_nbytes=capacity_nbytes,
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            failures=self.failures,
        )


class Tier:
    """One tier: an order of use, a bound in bytes, counts."""

    def __init__(self, name: str, capacity_nbytes: int) -> None:
        self.name = name
        self.order = LruCache(capacity_nbytes)
        self.counts = TierCounts()

    def excess(self, evictable: Callable[[str], bool]) -> list[str]:
        """What has to go, oldest first; each counts as evicted."""
        order = self.order
        victims = order.victims(order.used - order.capacity, evictable)
        self.counts.evictions += len(victims)
        return victims

    def report(self) -> CacheTier:
        return self.counts.report(self.name, self.order.used, self.order.capacity)


class TierBooks:
    """`device` above `host`."""

    def __init__(self, device_nbytes: int, host_nbytes: int) -> None:
        self.device = Tier("device", device_nbytes)
        self.host = Tier("host", host_nbytes)

    def place(self, key: str, nbytes: int, tier: Tier) -> None:
        """Count `key` in `tier`, as its youngest, and in no other."""
        self.remove(key)
        tier.order.add(key, nbytes)

    def remove(self, key: str) -> None:
        self.device.order.remove(key)
        self.host.order.remove(key)

    def hit(self, key: str) -> None:
        """It was found: it is the youngest of its tier."""
        if key in self.device.order:
            tier = self.device
        else:
            self.device.counts.misses += 1
            tier = self.host
        tier.order.touch(key)
        tier.counts.hits += 1

    def miss(self) -> None:
        """It is in neither."""
        self.device.counts.misses += 1
        self.host.counts.misses += 1
