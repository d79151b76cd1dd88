"""Fixed pools of numbered units: slots of the receive pool, blocks of the KV cache.

A unit is free or leased; taking and giving back are the only operations. Giving back a unit that is
not leased raises, because it means that two owners believed to have it, which is the fault that
corrupts memory silently (faults F3, F7).

`LeaseQueue` is the fair queue in front of a pool. A request that does not fit waits in order of
arrival. A peer over its quota is passed over, so that rooms of a dead encoder cannot starve the
others (fault F41).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


class PoolError(Exception):
    """The books of a pool do not balance: a bug, never a user's mistake."""


class Pool:
    """`size` units, lowest free numbers first (deterministic)."""

    __slots__ = ("_free", "_leased", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: deque[int] = deque(range(size))
        self._leased: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` units, or None if there are not enough; never some of them."""
        if count > len(self._free):
            return None
        units = tuple(self._free.popleft() for _ in range(count))
        self._leased.update(units)
        return units

    def give_back(self, units: Iterable[int]) -> None:
        for unit in units:
            if unit not in self._leased:
                raise PoolError(f"unit {unit} was given back but is not leased")
            self._leased.remove(unit)
            self._free.append(unit)


@dataclass(frozen=True, slots=True)
class Lease:
    """A wish for `count` units; `peer` is who will write into them."""

    key: str
    count: int
    peer: str


class LeaseQueue:
    """First come, first served before a `Pool`, within a quota per peer."""

    def __init__(self, pool: Pool, max_per_peer: int) -> None:
        self._pool = pool
        self._max_per_peer = max_per_peer
        self._waiting: dict[str, Lease] = {}
        self._held: dict[str, Lease] = {}
        self._per_peer: dict[str, int] = {}
        self._stranded: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: str) -> bool:
        """Whether it waits."""
        return key in self._waiting

    def join(self, lease: Lease) -> None:
        self._waiting[lease.key] = lease

    def leave(self, key: str) -> None:
        self._waiting.pop(key, None)

    def wanted(self) -> int:
        """Units that the first of the queue lacks: what eviction should aim for."""
        for lease in self._waiting.values():
            if self._within_quota(lease):
                return max(0, lease.count - self._pool.num_free)
        return 0

    def grants(self) -> Iterator[tuple[Lease, tuple[int, ...]]]:
        """Grant in order; stops at the first that lacks units, passes over peers at their quota."""
        for lease in list(self._waiting.values()):
            if not self._within_quota(lease):
                continue
            units = self._pool.take(lease.count)
            if units is None:
                return
            del self._waiting[lease.key]
            self._held[lease.key] = lease
            self._per_peer[lease.peer] = self._per_peer.get(lease.peer, 0) + lease.count
            yield lease, units

    @property
    def num_stranded(self) -> int:
        """Units that nobody waits for and that a peer may still write into."""
        return sum(self._stranded.values())

    def strand(self, key: str) -> None:
        """Nobody waits for this lease any more; it stays in its peer's quota until settled."""
        if key in self._held:
            self._stranded[key] = self._held[key].count

    def rejoin(self, key: str) -> bool:
        """Somebody waits for it again; False if somebody did all the time."""
        return self._stranded.pop(key, None) is not None

    def settled(self, key: str) -> None:
        """The peer will not write for this lease any more: it leaves the peer's quota."""
        self._stranded.pop(key, None)
        lease = self._held.pop(key, None)
        if lease is None:
            return
        left = self._per_peer[lease.peer] - lease.count
        if left:
            self._per_peer[lease.peer] = left
        else:
            del self._per_peer[lease.peer]

    def _within_quota(self, lease: Lease) -> bool:
        held = self._per_peer.get(lease.peer, 0)
        return held == 0 or held + lease.count <= self._max_per_peer


class Budget:
    """Promises of memory to requests, all or nothing, first come first served (fault F24).

    A request with several images must not hold some and wait for those that a second one holds: it
    waits in a queue until all its slots are promised.  Resident rows that nobody references are
    outside the budget; they are evicted when a promise is called in.  Slots of a peer that is lost,
    or does not answer, cannot be promised until it is fenced: who needs more than what is left is
    passed over meanwhile.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._waiting: dict[str, int] = {}
        self._promised: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._promised)

    def join(self, key: str, count: int) -> None:
        self._waiting[key] = count

    def spare(self, key: str, count: int, withheld: int = 0) -> bool:
        """Promise so many at once, if nobody waits for a promise; False: they are not promised."""
        if self._waiting or self.used + count > self.size - withheld:
            return False
        self._promised[key] = count
        self.used += count
        return True

    def leave(self, key: str) -> None:
        """Wait no more, or give the promise back."""
        self._waiting.pop(key, None)
        self.used -= self._promised.pop(key, 0)

    def grants(self, withheld: int = 0) -> Iterator[str]:
        """The keys that can be promised now, in order; `withheld` slots are nobody's to promise."""
        size = self.size - withheld
        for key, count in list(self._waiting.items()):
            if key not in self._waiting or count > size:
                continue
            if self.used + count > size:
                return
            del self._waiting[key]
            self._promised[key] = count
            self.used += count
            yield key


class LruCache:
    """Order of use among unreferenced entries, bounded by bytes (or slots); policy only.

    `touch` and `add` make an entry the youngest; `victims` names the oldest unreferenced ones until
    `needed` is covered, examining each entry at most once (bounded work, fault F31).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def add(self, key: str, size: int) -> None:
        self._sizes[key] = size
        self.used += size

    def touch(self, key: str) -> None:
        self._sizes[key] = self._sizes.pop(key)

    def remove(self, key: str) -> None:
        self.used -= self._sizes.pop(key, 0)

    def victims(self, needed: int, evictable: Callable[[str], bool]) -> list[str]:
        chosen: list[str] = []
        for key, size in self._sizes.items():
            if needed <= 0:
                break
            if evictable(key):
                chosen.append(key)
                needed -= size
        return chosen
