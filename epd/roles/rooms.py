"""What the roles of both ends of a room share: a registry of machines, their timers, their doubts.

Ended rooms stay as tombstones for `tombstone_s`, so that late messages find an answer and a grant
cannot revive what was cancelled (fault F42).  Messages of a peer count only if they come from the
epoch that the room was opened with (fault F44).

Memory whose transfer's outcome is unknown waits until somebody can tell.  While both ends are
trusted only the writer can: its engine settles what it has begun, which bars nobody.  A peer that
was lost is fenced, which bars it for good, should it live.  A consumer therefore never fences a
peer that the registry lists: that one is alive and hears `CancelTransfer` again and again, so its
own message comes, or its loss does.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import ClassVar, Generic, TypeVar

from epd.config import Timing
from epd.fsm import incoming, outgoing
from epd.fsm.kernel import Event
from epd.fsm.room import (
    DeadlinePassed,
    GraceEnded,
    PeerLost,
    PeerSilent,
    RetryDue,
    Room,
)
from epd.messages import Address
from epd.roles.base import Actor, Component, performs
from epd.transport.base import Received

R = TypeVar("R", bound=Room)
Owner = TypeVar("Owner")


class Rooms(Component[R], Generic[R, Owner]):
    """One end, `R`, of every room at this instance; `Owner` owns what a room moves."""

    end: ClassVar[str]

    def __init__(self, actor: Actor, timing: Timing) -> None:
        super().__init__(actor)
        self._timing = timing
        self._rooms: dict[str, R] = {}
        self._owners: dict[str, Owner] = {}
        self._retries: dict[R, float] = {}  # when a message is said again, the first one first
        self._ended: dict[str, float] = {}  # tombstones: until when, oldest first

    def find(self, room: str) -> R | None:
        return self._rooms.get(room)

    def live(self) -> dict[str, int]:
        return {self.end: len(self._rooms) - len(self._ended)}

    def _add(self, room: R, deadline_s: float) -> R:
        self._rooms[room.key] = room
        self._arm(room, "deadline", self.actor.until(deadline_s), DeadlinePassed())
        return room

    def _arm(self, room: R, what: str, delay_s: float, event: Event) -> None:
        name = f"{self.end}/{room.key}/{what}"
        self.actor.arm(name, delay_s, partial(self.fire, room, event))

    def ended(self, machine: R) -> None:
        room = machine.key
        if room in self._ended:  # a late message: its timers are gone
            return
        for what in ("deadline", "wait", "doubt", "grace"):
            self.actor.disarm(f"{self.end}/{room}/{what}")
        self._retries.pop(machine, None)
        if not self._retries:
            self.actor.disarm(f"{self.end}/retries")
        if self._rooms.get(room) is machine:
            self._ended[room] = self.clock.now_s() + self._timing.tombstone_s
            if not self.actor.armed(f"{self.end}/tombstones"):
                self.actor.arm(f"{self.end}/tombstones", self._timing.tombstone_s, self._forget)

    def _forget(self) -> None:
        """Drop tombstones that are old enough; looks a few times per `tombstone_s`."""
        now_s = self.clock.now_s()
        for room, until_s in list(self._ended.items()):
            if until_s > now_s:
                pause_s = self._timing.tombstone_s / 8
                self.actor.arm(f"{self.end}/tombstones", pause_s, self._forget)
                return
            del self._ended[room], self._rooms[room]
            self._owners.pop(room, None)

    # --- peers ------------------------------------------------------------------------------------

    def _hear(self, received: Received, event: Event) -> None:
        room = self.find(received.message.room)
        if room is not None and self._is_from_peer(room, received):
            self.fire(room, event)

    def _is_from_peer(self, room: R, received: Received) -> bool:
        if (room.peer.instance_id, room.peer.epoch) == (received.source, received.epoch):
            return True
        self.actor.counters["message_of_other_epoch"] += 1
        return False

    def peer_lost(self, peer: Address) -> None:
        self._fire_all(peer, PeerLost())

    def peer_silent(self, peer: Address) -> None:
        self._fire_all(peer, PeerSilent())

    def _fire_all(self, peer: Address, event: Event) -> None:
        for room in list(self._rooms.values()):
            if (room.peer.instance_id, room.peer.epoch) == (peer.instance_id, peer.epoch):
                self.fire(room, event)

    # --- effects: time ----------------------------------------------------------------------------

    @performs(outgoing.Do.ARM_RETRY, incoming.Do.ARM_RETRY)
    def arm_retry(self, room: R, event: Event | None) -> None:
        """All wait equally long, so who is put off goes to the end of one queue."""
        self._retries.pop(room, None)
        self._retries[room] = self.clock.now_s() + self._timing.retry_interval_s
        if not self.actor.armed(f"{self.end}/retries"):
            self.actor.arm(f"{self.end}/retries", self._timing.retry_interval_s, self._retry)

    def _retry(self) -> None:
        """No answer is no sign, but the link may be why."""
        now_s = self.clock.now_s()
        for room, due_s in list(self._retries.items()):
            if due_s > now_s:
                self.actor.arm(f"{self.end}/retries", due_s - now_s, self._retry)
                return
            if self._retries.get(room) == due_s:  # no earlier one has changed that
                del self._retries[room]
                self.actor.doubt(room.peer)
                self.fire(room, RetryDue())

    @performs(outgoing.Do.ARM_GRACE, incoming.Do.ARM_GRACE)
    def arm_grace(self, room: R, event: Event) -> None:
        self._arm(room, "grace", self._timing.abort_timeout_s, GraceEnded())

    @performs(outgoing.Do.REPORT_HANG, incoming.Do.REPORT_HANG)
    def report_hang(self, room: R, event: Event) -> None:
        self.actor.counters["transfer_hangs"] += 1
        self.actor.log.warning("a transfer does not end", room=room.key, state=room.state.name)

    # --- doubts -----------------------------------------------------------------------------------

    async def _fence(self, room: R, fenced: Event) -> Event | None:
        """`fenced`, if the peer was lost and can touch the memory no more."""
        peer = room.peer
        if not self.actor.is_listed(peer):
            info = self.actor.peer_info(peer)
            host_id, pid = (info.host_id, info.pid) if info is not None else ("", 0)
            if await self._holds(room, self.actor.ports.transfers.fence(peer, host_id, pid)):
                return None if room.terminal else fenced
        self._ask_again(room)
        return None

    async def _holds(self, room: R, answer: Awaitable[bool]) -> bool:
        """An engine that fails to answer cannot tell; it is asked again."""
        try:
            return await answer
        except Exception as error:
            self.actor.fault(f"doubt about {room.key}", error)
            return False

    def _ask_again(self, room: R) -> None:
        """A doubt has a pace of its own."""
        if not room.terminal:
            self._retries.pop(room, None)
            self._arm(room, "doubt", self._timing.retry_interval_s, RetryDue())
