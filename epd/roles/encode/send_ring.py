"""The send ring of an encode instance: registered memory from which rows are written to peers.

Rows in host memory can be written from where they lie.  Rows in a device's memory cannot, nor can a
network card read memory that is not registered.  Those are copied into slots of this ring, and
written from there.  It is allocated and registered once for the life of the process (fault F5).

Slots are leased when a write may begin, never while rows wait for their grant.  A lease then ends
with its write, so a full ring drains, and no two instances wait for each other, each with half of
its slots.  A full ring defers: the write waits in a fair queue while the loop goes on (F4).  A
share per peer bounds what a frozen receiver can take.  Slots return when the transfer has ended its
reads of them, and not before (F3).

An item larger than the ring is written without it, from a copy of its own in host memory: make the
ring larger if it happens (`send_ring_oversized`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from epd.config import EncodeConfig
from epd.engine.base import Rows, VisionEngine
from epd.scheduling.pool import Lease, LeaseQueue, Pool
from epd.scheduling.slots import rows_per_slot
from epd.transport.base import Buffer, DataPlane

Slots = tuple[int, ...]


class SendRing:
    """`config.send_buffer_nbytes` of slots that each hold whole rows."""

    def __init__(self, transfers: DataPlane, engine: VisionEngine, config: EncodeConfig) -> None:
        row_nbytes = engine.contract.row_nbytes
        self._engine = engine
        self._slot_nbytes = rows_per_slot(config.send_slot_nbytes, row_nbytes) * row_nbytes
        num_slots = max(1, config.send_buffer_nbytes // self._slot_nbytes)
        self.region = transfers.allocate("send", num_slots, self._slot_nbytes)
        self.pool = Pool(num_slots)
        quota = max(1, int(num_slots * config.max_send_share_per_peer))
        self._queue = LeaseQueue(self.pool, quota)

    def live(self) -> dict[str, int]:
        return {"send_slots": self.pool.num_leased, "send_queue": len(self._queue)}

    def fits(self, nbytes: int) -> bool:
        return self._count(nbytes) <= self.pool.size

    def _count(self, nbytes: int) -> int:
        return -(-nbytes // self._slot_nbytes)

    def join(self, room: str, peer: str, nbytes: int) -> None:
        """Wait for slots, which `grants` then yields."""
        self._queue.join(Lease(room, self._count(nbytes), peer))

    def waits(self, room: str) -> bool:
        return room in self._queue

    def grants(self) -> Iterator[tuple[str, Slots]]:
        """Whose turn it is, and what to write from; look when one has joined or released."""
        for lease, slots in self._queue.grants():
            yield lease.key, slots

    async def copy(self, rows: Rows, slots: Slots) -> Sequence[Buffer]:
        """The rows' bytes, in leased slots."""
        views = self.region.views(slots, rows.nbytes)
        await self._engine.copy_out(rows, views)
        return views

    def release(self, room: str, slots: Slots) -> None:
        """It does not wait any more, and nothing reads the slots, if it has some."""
        self._queue.leave(room)
        self._queue.settled(room)
        self.pool.give_back(slots)
