"""How long rows take at one prefill instance, and what is asked when they are late or lost.

A load is measured from its grant to its rows (`scheduling/hedging.py`).  One that is late costs its
gateway a question; the gateway decides.  One whose encoder is lost costs questions until the answer
is here: any message may be lost.
"""

from __future__ import annotations

from epd.config import PrefillConfig, Timing
from epd.fsm.embedding import Do, Embedding, LoadLate, NoRoomCame, RetryDue
from epd.fsm.incoming import Incoming, SlotsLeased
from epd.fsm.kernel import Event
from epd.messages import Address
from epd.roles.base import Actor, Component, performs
from epd.roles.incoming import IncomingRooms
from epd.scheduling.hedging import LoadTimes

RACE = ("hedges_lost", "hedges_won")  # by the load that was late, by its rival


class Lateness(Component[Embedding]):
    """Performs the effects of EMBEDDING on time; `owner` fires the events of its timers."""

    def __init__(
        self,
        actor: Actor,
        owner: Component[Embedding],
        incoming: IncomingRooms,
        config: PrefillConfig,
        timing: Timing,
    ) -> None:
        super().__init__(actor)
        self._no_room_s = timing.accept_timeout_s
        self._owner = owner
        self._rooms = incoming
        self._times = LoadTimes(config.min_measured_loads, config.hedge_after_s)

    def note(self, incoming: Incoming, loads: tuple[str, ...]) -> None:
        """Its rows are here, the first ones of these rooms."""
        encoder, num_rows = incoming.peer.instance_id, incoming.num_rows
        self._times.note(encoder, num_rows, self._waited_s(incoming))
        if len(loads) > 1:
            self.actor.counters[RACE[loads.index(incoming.key)]] += 1

    def peer_lost(self, peer: Address) -> None:
        self._times.forget(peer.instance_id)

    @performs(Do.ARM_LATE)
    def arm_late(self, embedding: Embedding, event: Event) -> None:
        want = embedding.item
        late_s = self._times.late_after_s(want.item.num_rows) if want is not None else None
        if late_s is not None:
            self._owner.arm(embedding, late_s, LoadLate())

    @performs(Do.ASK_RIVAL)
    def ask_rival(self, embedding: Embedding, event: Event) -> None:
        want, incoming = embedding.item, self._rooms.find(embedding.room)
        if want is not None and incoming is not None:
            want.ask(want.item.encoder, None, self._waited_s(incoming))

    @performs(Do.ASK_ROOM)
    def ask_room(self, embedding: Embedding, event: Event) -> None:
        for want in embedding.waiters.values():
            if not want.stands_for:
                want.ask(embedding.latest(want).encoder, embedding.failure, 0.0)

    @performs(Do.ARM_RETRY)
    def arm_retry(self, embedding: Embedding, event: Event) -> None:
        self._owner.arm(embedding, self._no_room_s / 4, RetryDue())

    @performs(Do.ARM_NO_ROOM)
    def arm_no_room(self, embedding: Embedding, event: Event) -> None:
        self._owner.arm(embedding, self._no_room_s, NoRoomCame())

    def _waited_s(self, incoming: Incoming) -> float:
        """Since its slots were granted."""
        granted = (at_s for at_s, _, kind, _, _ in reversed(incoming.told) if kind is SlotsLeased)
        now_s = self.clock.now_s()
        return now_s - next(granted, now_s)
