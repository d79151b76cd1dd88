"""The send ring of an encode instance: registered memory from which rows are written to peers.

Rows in host memory can be written from where they lie.  Rows in a device's memory cannot, nor can
a network card read memory that is not registered: those are copied into slots of this ring, which
is allocated and registered once for the life of the process (fault F5), and written from there.

Slots are leased when a write may begin, never while rows wait for their grant: a lease then ends
with its write, so a full ring drains, and no two instances can wait for each other with half of
what they need in their hands.  A full ring defers: the write waits in a fair queue, within a share
per peer (a frozen receiver cannot take the ring from the others), while the loop goes on (F4).
Slots return when the transfer says that nothing reads them any more, and not before (F3).

An item larger than the ring is written without it, from a copy of its own in host memory, and
counted (`send_ring_oversized`): make the ring larger if it happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from epd.config import EncodeConfig
from epd.engine.base import Rows, VisionEngine
from epd.roles.base import Actor
from epd.scheduling.pool import Lease, LeaseQueue, Pool
from epd.scheduling.slots import rows_per_slot
from epd.transport.base import Buffer

Leased = tuple[int, ...] | None  # None: withdrawn while it waited


class SendRing:
    """`config.send_buffer_nbytes` of slots that each hold whole rows."""

    def __init__(self, actor: Actor, engine: VisionEngine, config: EncodeConfig) -> None:
        row_nbytes = engine.contract.row_nbytes
        self._actor = actor
        self._engine = engine
        self._slot_nbytes = rows_per_slot(config.send_slot_nbytes, row_nbytes) * row_nbytes
        num_slots = max(1, config.send_buffer_nbytes // self._slot_nbytes)
        self.region = actor.ports.transfers.allocate("send", num_slots, self._slot_nbytes)
        self.pool = Pool(num_slots)
        quota = max(1, int(num_slots * config.max_send_share_per_peer))
        self._queue = LeaseQueue(self.pool, quota)
        self._waiting: dict[str, asyncio.Future[Leased]] = {}
        self._leased: dict[str, tuple[int, ...]] = {}

    def live(self) -> dict[str, int]:
        return {"send_slots": self.pool.num_leased, "send_queue": len(self._waiting)}

    async def stage(self, room: str, peer: str, rows: Rows) -> Sequence[Buffer] | None:
        """The rows' bytes in leased slots; None if the room was withdrawn while it waited."""
        count = -(-rows.nbytes // self._slot_nbytes)
        if count > self.pool.size:
            self._actor.counters["send_ring_oversized"] += 1
            return [(await self._engine.to_host(rows)).buffer()]
        slots = await self._lease(Lease(room, count, peer))
        if slots is None:
            return None
        views = self.region.views(slots, rows.nbytes)
        await self._engine.copy_out(rows, views)
        return views

    async def _lease(self, lease: Lease) -> Leased:
        future: asyncio.Future[Leased] = asyncio.get_running_loop().create_future()
        self._waiting[lease.key] = future
        self._queue.join(lease)
        self._pump()
        if not future.done():
            self._actor.counters["send_ring_deferred"] += 1
        return await future

    def withdraw(self, room: str) -> None:
        """The room is not wanted any more: if it still waits for slots, it leaves the queue."""
        self._queue.leave(room)
        future = self._waiting.pop(room, None)
        if future is not None:
            future.set_result(None)

    def release(self, room: str) -> None:
        """Nothing reads the room's slots any more."""
        self.withdraw(room)
        slots = self._leased.pop(room, None)
        if slots is not None:
            self._queue.settled(room)
            self.pool.give_back(slots)
        self._pump()

    def _pump(self) -> None:
        for lease, slots in self._queue.grants():
            self._leased[lease.key] = slots
            self._waiting.pop(lease.key).set_result(slots)
