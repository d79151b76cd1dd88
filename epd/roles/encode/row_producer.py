"""The producer of rows: the memory that they are written from, and the end of their rooms.

A peer that takes references, in this process or on another device, gets rows from where they lie.
Any other peer gets them from the send ring, if there is one, or from a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from epd.engine.base import Rows, SlotRows, VisionEngine
from epd.failure import Failure
from epd.fsm.outgoing import Outgoing, SlotsLeased
from epd.groups.asks import WritePart
from epd.messages import Grant
from epd.roles.base import Actor
from epd.roles.encode.send_ring import SendRing
from epd.roles.outgoing import OutgoingRooms, Spread, Staged
from epd.transport.base import Buffer, Reference


class RowProducer:
    """See `Producer`.  `on_granted`: somebody has memory for rows; `on_closed`: a room needs its
    rows no more."""

    def __init__(
        self,
        actor: Actor,
        rooms: OutgoingRooms,
        engine: VisionEngine,
        ring: SendRing | None,
        on_granted: Callable[[], None],
        on_closed: Callable[[Outgoing], None],
    ) -> None:
        self._actor = actor
        self._rooms = rooms
        self._engine = engine
        self.ring = ring
        self.sources: dict[str, Rows] = {}  # by room, until they are read no more
        self._on_granted = on_granted
        self._on_closed = on_closed

    def live(self) -> dict[str, int]:
        ring = self.ring.live() if self.ring is not None else {}
        return {"rows_to_send": len(self.sources), **ring}

    def granted(self, outgoing: Outgoing) -> None:
        self._on_granted()

    def hold_part(self, outgoing: Outgoing) -> None:
        """Rows are ready all at once."""

    # --- memory to write from ---------------------------------------------------------------------

    def lease(self, outgoing: Outgoing) -> bool:
        ring, rows = self.ring, self.sources[outgoing.key]
        if ring is None or self._takes_references(outgoing):
            return False
        if not ring.fits(rows.nbytes):
            self._actor.counters["send_ring_oversized"] += 1
            return False
        ring.join(outgoing.key, outgoing.peer.instance_id, rows.nbytes)
        self._hand_out(ring)
        if ring.waits(outgoing.key):
            self._actor.counters["send_ring_deferred"] += 1
        return True

    def release_slots(self, outgoing: Outgoing) -> None:
        if self.ring is not None:
            self.ring.release(outgoing.key, outgoing.slots)
            self._hand_out(self.ring)

    def _hand_out(self, ring: SendRing) -> None:
        for room, slots in ring.grants():
            outgoing = self._rooms.find(room)
            assert outgoing is not None  # with its end it left the queue
            self._rooms.post(outgoing, SlotsLeased(slots))

    def _takes_references(self, outgoing: Outgoing) -> bool:
        assert outgoing.grant is not None
        return self._actor.ports.transfers.takes_references(outgoing.grant.region)

    async def stage(self, outgoing: Outgoing, grant: Grant) -> Staged | Spread:
        rows = self.sources[outgoing.key]
        if self._takes_references(outgoing):
            views: Sequence[Buffer] = [Reference(rows, rows.nbytes)]
        elif self.ring is not None and outgoing.slots:
            views = await self.ring.copy(rows, outgoing.slots)
        else:
            host = rows if rows.on_host else await self._engine.to_host(rows)
            views = [host.buffer()]
        if grant.parts and not self._actor.is_self(outgoing.peer):
            return Spread(self._parts(rows, views, grant))
        return Staged(views, grant.slots)

    def _parts(self, rows: Rows, views: Sequence[Buffer], grant: Grant) -> list[WritePart]:
        """To each rank of a group what it is to have."""
        regions = (grant.region, *grant.parts)
        told = SlotRows(grant.slots, rows.num_rows, grant.is_sharded)
        row_nbytes = rows.nbytes // rows.num_rows
        parts: list[WritePart] = []
        for rank, region in enumerate(regions):
            held = told.held(rank, len(regions))
            source = _of_rows(views, held, row_nbytes)
            slots = grant.slots[: -(-len(held) * row_nbytes // region.slot_nbytes)]
            parts.append(partial(self._actor.ports.transfers.write, source, region, slots))
        return parts

    # --- ends -------------------------------------------------------------------------------------

    def release_source(self, outgoing: Outgoing) -> None:
        self.sources.pop(outgoing.key, None)
        self._on_closed(outgoing)

    def concluded(self, outgoing: Outgoing, failure: Failure | None) -> None:
        if not outgoing.nbytes:  # else it is released when the outcome is known
            self._on_closed(outgoing)


def _of_rows(views: Sequence[Buffer], held: range, row_nbytes: int) -> list[Buffer]:
    """These rows of what is written: views of host memory, or the one reference to all rows."""
    nbytes = len(held) * row_nbytes
    if isinstance(views[0], Reference):
        tensor = views[0].holder.tensor[held.start : held.stop]
        return [Reference(Rows(tensor, len(held), nbytes), nbytes)]
    return list(_cut(views, held.start * row_nbytes, held.stop * row_nbytes))


def _cut(views: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """Bytes `[start, stop)` of views, one behind the other."""
    at = 0
    for view in views:
        low, high = max(start - at, 0), min(stop - at, view.nbytes)
        if low < high:
            yield view[low:high]
        at += view.nbytes
