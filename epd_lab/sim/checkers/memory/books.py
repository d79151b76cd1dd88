"""At silence no role keeps a book of what is over: not one entry, in any container that it has.

`conservation` asks the roles what they own.  A book that nobody counts is seen only here: what is
forgotten in one of two places stays for the life of the process, and grows.  `KEPT` names all that
may stay, and why that is bounded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from epd_lab.sim.checkers.base import Checker

KEPT: dict[str, tuple[str, ...]] = {
    "the members, and the last lives that were lost": (
        "Actor._connected", "Actor.listed", "Actor.lost", "Actor.peers", "Deaths._at_hand",
        "Links._trusted_until_s", "Registry._acked_s", "Registry._instances",
        "Registry._lost", "Registry._refused", "Registry._turned_away",
    ),
    "the gateways": ("Actor.memberships", "Actor.offsets", "Member._places"),
    "made once, when roles are put together": (
        "Actor._handlers", "Actor.components", "Hands.on_free", "Reports.related",
        "Component._perform", "Leader._perform",
    ),
    "numbers by kind": (
        "Actor.counters", "GatewayRole.outcomes", "LoadTimes._row_s", "LoadTimes._usual_s",
        "Requests.totals", "RunAhead._counters", "Speculation._totals", "StageTimes._counts",
        "StageTimes._sums", "StageTimes._totals",
    ),
    "a cache, and what is known of another's": (
        "Affinity._num_blocks", "BlockPool._by_key", "BlockPool._idle", "BlockPool._key_of",
        "CacheIndex._books", "CacheIndex._holders", "CacheLog._held", "CachePublisher._in_memory",
        "CachePublisher._in_storage", "Embeddings._embeddings", "EncodeRole.encodings",
        "LruCache._sizes", "Pool._leased", "PrefixRecord._books",
    ),
    "what instances died of: of so many inputs, for ten minutes": ("Deaths._deaths",),
    "times that were given to those who were refused: MAX_PROMISES": (
        "Comebacks._promised", "Comebacks._counts",
    ),
    "ends of places, as of the last look": ("Comebacks._ends_s",),
    "adapters that are loaded: max_loras": ("Adapters._adapters", "Adapters.offered"),
    "speeds with drafts and without, by powers of two of sequences": ("DraftWorth._loads",),
    "memory that is free": ("BlockPool._free", "Pool._free"),
    "tombstones, and claims that may come: the last few thousand": (
        "Holds._holds", "Requests._ended",
    ),
    "the clock of a group of ranks, which lives as long as its process": ("Leader._armed",),
    "timers: `conservation` looks at them": ("Timers._armed", "Timers._handle", "Timers._heap"),
}  # fmt: skip
FOR_A_WHILE = (
    *(
        f"{end}.{name}"
        for end in ("OutgoingRooms", "IncomingRooms")
        for name in ("_ended", "_owners", "_rooms")
    ),
    "IncomingRooms._transports",
)
"""Rooms that are over, for `tombstone_s`."""
PERIODIC = "list storage"  # a task that comes again and again, as its timer does
_NAMES = {name for names in KEPT.values() for name in names}
_OURS = ("epd.groups", "epd.roles", "epd.scheduling")


def books(owner: object, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Each book of a role and of its parts that is not empty: its name, and its length."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    kinds = type(owner).__mro__
    slots = [name for kind in kinds for name in getattr(kind, "__slots__", ())]
    for name in (*getattr(owner, "__dict__", ()), *slots):
        value = getattr(owner, name, None)
        if type(value).__module__.startswith(_OURS):
            yield from books(value, seen)
        elif isinstance(value, dict | set | list | deque):
            length = sum(map(bool, value.values())) if isinstance(value, Counter) else len(value)
            if name == "_tasks":
                length = sum(not task.startswith(PERIODIC) for task in value)
            if length and not any(f"{kind.__name__}.{name}" in _NAMES for kind in kinds):
                yield f"{type(owner).__name__}.{name}", length


class Books(Checker):
    name = "books"

    def at_end(self) -> None:
        remembered = () if self.context.cluster.waited_out else FOR_A_WHILE
        for node in self.context.cluster.living():
            seen: set[int] = set()
            for component in node.actor.components:
                for name, length in books(component, seen):
                    if name not in remembered:
                        self.violate(
                            f"{node.process.name} keeps {length} in {name}, and all is over"
                        )
