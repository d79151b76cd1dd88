"""Where an encoder keeps rows: where its engine leaves them, host memory, and a shared storage.

This component performs the effects of ENCODING that move rows between tiers. Copies and files are
awaited here and run elsewhere, so nothing blocks the loop. The storage may be slow, full, torn or
gone. A value that does not come back whole, of exactly this image and model, counts as a miss and
is encoded again. A value that cannot be written is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from epd.config import EncodeConfig
from epd.engine.base import Rows, VisionEngine
from epd.fsm.encoding import (
    CopyFailed,
    CopyTimedOut,
    DemotionRequested,
    DemotionSucceeded,
    Do,
    Encoding,
    EvictionRequested,
    LoadMissed,
    LoadSucceeded,
    LoadTimedOut,
    PromotionSucceeded,
)
from epd.fsm.kernel import Event
from epd.messages import CacheTier, RowContract
from epd.roles.base import Actor, Component, Work, performs
from epd.roles.cache_events import CachePublisher
from epd.scheduling.slots import CACHE_ROWS, sized
from epd.scheduling.tiers import Tier, TierBooks, TierCounts


class Owner(Protocol):
    """The role that owns the machines."""

    encodings: dict[str, Encoding]

    def fire(self, machine: Encoding, event: Event) -> None: ...

    def arm(self, machine: Encoding, delay_s: float, event: Event) -> None: ...


def rows_of(encoding: Encoding) -> Rows:
    """The engine's own; they are there in every state that orders something with them."""
    return cast(Rows, encoding.rows)


class RowTiers(Component[Encoding]):
    """A part of the encode role."""

    def __init__(
        self,
        actor: Actor,
        engine: VisionEngine,
        config: EncodeConfig,
        events: CachePublisher,
        owner: Owner,
    ) -> None:
        super().__init__(actor)
        row_nbytes = engine.contract.row_nbytes
        device_nbytes = sized(config.cache_device_nbytes, CACHE_ROWS, row_nbytes)
        self.books = TierBooks(device_nbytes, config.cache_host_nbytes)
        self._stored = TierCounts()
        self._events = events
        self._engine = engine
        self._config = config
        self._owner = owner
        self._storage = actor.ports.storage
        self._storage_works = True

    @property
    def has_storage(self) -> bool:
        return self._storage is not None

    def report(self) -> tuple[CacheTier, ...]:
        tiers = (self.books.device.report(), self.books.host.report())
        if self._storage is None:
            return tiers
        usage = self._storage.usage()
        self._stored.evictions = usage.evictions
        stored = self._stored.report(self._storage.tier, usage.nbytes, usage.capacity_nbytes)
        return (*tiers, stored)

    def make_room(self, copies: bool) -> None:
        """Move down, or drop, what nobody reads and what was not used for the longest; without
        `copies` (one has just failed) it is dropped."""
        books = self.books
        demotes = copies and books.host.order.capacity > 0
        for key in books.device.excess(self._is_idle):
            down = DemotionRequested() if demotes else EvictionRequested()
            self._owner.fire(self._owner.encodings[key], down)
        for key in books.host.excess(self._is_idle):
            self._owner.fire(self._owner.encodings[key], EvictionRequested())

    def _is_idle(self, key: str) -> bool:
        encoding = self._owner.encodings[key]
        return encoding.at_rest and not encoding.rooms

    # --- memory -----------------------------------------------------------------------------------

    @performs(Do.KEEP_ROWS)
    def keep_rows(self, encoding: Encoding, event: Event) -> None:
        self._keep(encoding, self.books.device)

    @performs(Do.KEEP_HOST_ROWS)
    def keep_host_rows(self, encoding: Encoding, event: Event) -> None:
        self._keep(encoding, self.books.host)

    def _keep(self, encoding: Encoding, tier: Tier) -> None:
        self.books.place(encoding.key, rows_of(encoding).nbytes, tier)
        self._events.stored(encoding.key)

    @performs(Do.RELEASE_ROWS)
    def release_rows(self, encoding: Encoding, event: Event) -> None:
        self.books.remove(encoding.key)
        self._events.evicted(encoding.key)

    @performs(Do.START_DEMOTION)
    def start_demotion(self, encoding: Encoding, event: Event) -> Work[Event]:
        self.books.place(encoding.key, rows_of(encoding).nbytes, self.books.host)
        self._bound(encoding, CopyTimedOut())
        return self._copy(encoding, self._engine.to_host, DemotionSucceeded)

    @performs(Do.START_PROMOTION)
    def start_promotion(self, encoding: Encoding, event: Event) -> Work[Event]:
        self.books.place(encoding.key, rows_of(encoding).nbytes, self.books.device)
        self._bound(encoding, CopyTimedOut())
        return self._copy(encoding, self._engine.to_device, PromotionSucceeded)

    async def _copy(
        self,
        encoding: Encoding,
        copy: Callable[[Rows], Work[Rows]],
        succeeded: Callable[[Rows], Event],
    ) -> Event:
        try:
            return succeeded(await copy(rows_of(encoding)))
        except Exception as error:
            self.actor.fault(f"copy of rows {encoding.key}", error)
            return CopyFailed()

    def _bound(self, encoding: Encoding, event: Event) -> None:
        self._owner.arm(encoding, self._config.cache_load_timeout_s, event)

    # --- storage ----------------------------------------------------------------------------------

    @performs(Do.START_LOAD)
    async def start_load(self, encoding: Encoding, event: Event) -> Event:
        assert self._storage is not None  # or the machine would not have asked
        self._bound(encoding, LoadTimedOut())
        nbytes = encoding.num_rows * self._engine.contract.row_nbytes
        try:
            found = await self._storage.get(encoding.key, self._note(encoding), nbytes)
        except Exception as error:  # a hash that is none (fault F45)
            self.actor.fault(f"load {encoding.key}", error)
            found = None
        if found is None:
            self._stored.misses += 1
            self._events.not_in_storage(encoding.key)
            return LoadMissed()
        self._stored.hits += 1
        return LoadSucceeded(Rows(found, encoding.num_rows, nbytes))

    @performs(Do.STORE_ROWS)
    def store_rows(self, encoding: Encoding, event: Event) -> Work[None] | None:
        return None if self._storage is None else self._store(encoding, rows_of(encoding))

    async def _store(self, encoding: Encoding, rows: Rows) -> None:
        assert self._storage is not None
        host = await self._engine.to_host(rows)
        kept = await self._storage.put(encoding.key, self._note(encoding), [host.buffer()])
        self._stored.failures += not kept
        if self._storage_works and not kept:
            self.actor.log.warning(
                "rows cannot be stored: they are encoded again when they are wanted; "
                "make room in the cache directory or store, or check that it can be written"
            )
        self._storage_works = kept

    def _note(self, encoding: Encoding) -> bytes:
        return note_of(self._engine.contract, encoding.key, encoding.num_rows)


def note_of(contract: RowContract, mm_hash: str, num_rows: int) -> bytes:
    """The note that a stored value must have, so that no other is taken for it (F38)."""
    return f"{mm_hash} {contract.dtype} {contract.row_width} {num_rows}".encode()
