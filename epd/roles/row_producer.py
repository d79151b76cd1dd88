"""The producer of rows: from where they are written, and whom their room's end concerns.

Who takes references, in this process or on another device, gets rows from where they lie; others
get them from the send ring, if there is one, or from a copy in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epd.engine.base import Rows, VisionEngine
from epd.failure import Failure
from epd.fsm.outgoing import Outgoing, SlotsLeased
from epd.messages import Grant
from epd.roles.base import Actor
from epd.roles.outgoing import OutgoingRooms, Staged
from epd.roles.send_ring import SendRing
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
        self._on_granted = on_granted
        self._on_closed = on_closed

    def live(self) -> dict[str, int]:
        return self.ring.live() if self.ring is not None else {}

    def granted(self, outgoing: Outgoing) -> None:
        self._on_granted()

    def hold_part(self, outgoing: Outgoing) -> None:
        """Rows are ready all at once."""

    def commit_state(self, outgoing: Outgoing) -> None:
        """Rows are all that there is."""

    # --- memory to write from ---------------------------------------------------------------------

    def lease(self, outgoing: Outgoing) -> bool:
        ring, rows = self.ring, outgoing.source
        assert isinstance(rows, Rows)
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
            slots, outgoing.slots = outgoing.slots, ()
            self.ring.release(outgoing.key, slots)
            self._hand_out(self.ring)

    def _hand_out(self, ring: SendRing) -> None:
        for room, slots in ring.grants():
            outgoing = self._rooms.find(room)
            assert outgoing is not None  # with its end it left the queue
            self._rooms.fire(outgoing, SlotsLeased(slots))

    def _takes_references(self, outgoing: Outgoing) -> bool:
        assert outgoing.grant is not None
        return self._actor.ports.transfers.takes_references(outgoing.grant.region)

    async def stage(self, outgoing: Outgoing, grant: Grant) -> Staged:
        rows = outgoing.source
        assert isinstance(rows, Rows)
        if self._takes_references(outgoing):
            views: Sequence[Buffer] = [Reference(rows, rows.nbytes)]
        elif self.ring is not None and outgoing.slots:
            views = await self.ring.copy(rows, outgoing.slots)
        else:
            host = rows if rows.on_host else await self._engine.to_host(rows)
            views = [host.buffer()]
        return Staged(views, grant.slots)

    # --- ends -------------------------------------------------------------------------------------

    def release_source(self, outgoing: Outgoing) -> None:
        self._on_closed(outgoing)

    def concluded(self, outgoing: Outgoing, failure: Failure | None) -> None:
        if outgoing.source is None:  # else it is released when the outcome is known
            self._on_closed(outgoing)
