"""One moment of the pair that `epd_lab.sim.model.pair` searches, and what both ends were told."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from epd.fsm.kernel import State
from epd.messages import Grant
from epd_lab.sim.model.told import grant


@dataclass(frozen=True, slots=True)
class Scenario:
    """What both ends were told before the first event."""

    rows_granted: int = 4  # the producer makes 4
    offers: bool = False
    commit_is_short: bool = False
    engine_is_certain: bool = True  # False: a write may end as unknown and go on as a zombie
    engine_settles: bool = True  # False: it never knows of the end of a zombie
    may_die: bool = True
    may_be_declared_lost: bool = True
    forgetful: bool = False  # messages may be lost for good: only retries can bring them back
    max_lost: int = 0  # how many, at most; 0: any number
    in_parts: bool = False  # half of the bytes may be ready, and be sent, before the rest

    @property
    def grant(self) -> Grant:
        return grant("room", self.rows_granted)


class End(Struct, frozen=True):
    """One end: its machine's state and what its process still has to do."""

    state: State
    alive: bool = True
    retry: bool = False  # armed
    grace: bool = False
    deadline: bool = True
    fencing: bool = False
    settling: bool = False
    concluded: int = 0
    memory: str = "none"  # none, owned, released, published
    slots: str = "none"  # producer, to write from: none, awaited, owned
    started: bool = False  # producer: bytes were ready; consumer: slots were leased
    granted: bool = False  # producer: has read a grant
    blocks: bool = False  # consumer of KV: were leased
    cancelled: bool = False  # the owner has called it off
    publishing: bool = False
    ready_nbytes: int = 0  # producer: as its machine counts
    part_nbytes: int = 0
    written_nbytes: int = 0


class Pair(Struct, frozen=True):
    producer: End
    consumer: End
    write: str = "none"  # none, running, over, zombie
    landed_nbytes: int = 0
    network: frozenset[str] = frozenset()
    num_lost: int = 0  # messages; counted only where their number is bounded
