"""The common part of both ends of a room: a registry of machines, their timers, their doubts.

Ended rooms stay as tombstones for `tombstone_s`, so that late messages find an answer and a grant
cannot revive what was cancelled (fault F42).  Messages of a peer count only if they come from the
epoch that the room was opened with (fault F44).

Memory whose transfer has an unknown outcome waits until it has one. While both ends are trusted
only the writer has it: its engine settles what it has begun, which bars no peer. A peer that was
lost is fenced, which bars it for good, even if it is alive. So a consumer never fences a peer that
the registry lists. That peer receives `CancelTransfer` again and again, until its own message
comes, or its loss is declared.

A process may go on as a later epoch, so a fence cannot wait for its end. It has the word of the
process instead: the later epoch joins when nothing moves any more that the earlier one began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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

AskOfRank = Callable[[Address, str, int], Awaitable[bool]]  # of its life, its host and its pid
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
        self._ended: dict[str, float] = {}  # tombstones: until when, oldest first

    def find(self, room: str) -> R | None:
        return self._rooms.get(room)

    def live(self) -> dict[str, int]:
        return {self.end: max(len(self._rooms), len(self._owners)) - len(self._ended)}

    def _add(self, room: R, deadline_s: float, gateway: str) -> R:
        """`deadline_s` is in the time of this gateway."""
        self._rooms[room.key] = room
        self.arm(room, self.actor.until(deadline_s, gateway), DeadlinePassed())
        return room

    def ended(self, machine: R) -> None:
        room = machine.key
        if room not in self._ended and self._rooms.get(room) is machine:
            self.actor.times.note_room(self.end, machine)
            self._ended[room] = self.clock.now_s() + self._timing.tombstone_s
            if not self.actor.timers.will_call(self._forget):
                self.actor.timers.call_later(self._timing.tombstone_s, self._forget)

    def _forget(self) -> None:
        """Drop tombstones that are old enough; looks a few times per `tombstone_s`."""
        now_s = self.clock.now_s()
        for room, until_s in list(self._ended.items()):
            if until_s > now_s:
                self.actor.timers.call_later(self._timing.tombstone_s / 8, self._forget)
                return
            del self._ended[room], self._rooms[room]
            self.forgotten(room)

    def forgotten(self, room: str) -> None:
        """Its tombstone is old enough."""
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
                self.post(room, event)

    # --- effects: time ----------------------------------------------------------------------------

    @performs(outgoing.Do.ARM_RETRY, incoming.Do.ARM_RETRY)
    def arm_retry(self, room: R, event: Event | None) -> None:
        """No answer is no sign, but the link may be why."""

        def retry() -> None:
            self.actor.doubt(room.peer)
            self.fire(room, RetryDue())

        self.actor.timers.arm(room, RetryDue, self._timing.retry_interval_s, retry)

    @performs(outgoing.Do.ARM_GRACE, incoming.Do.ARM_GRACE)
    def arm_grace(self, room: R, event: Event) -> None:
        self.arm(room, self._timing.abort_timeout_s, GraceEnded())

    @performs(outgoing.Do.REPORT_HANG, incoming.Do.REPORT_HANG)
    def report_hang(self, room: R, event: Event) -> None:
        self.actor.counters["transfer_hangs"] += 1
        self.actor.log.warning("a transfer does not end", room=room.key, state=room.state.name)

    # --- doubts -----------------------------------------------------------------------------------

    async def _fence(self, room: R, fenced: Event) -> Event | None:
        """`fenced`, if the peer was lost and can touch the memory no more."""
        fence = self.actor.ports.transfers.fence
        if self._attests_end(room.peer):
            fence = partial(fence, has_ended=True)
        if not self.actor.is_listed(room.peer) and await self._all_hold(room, fence):
            return None if room.terminal else fenced
        self._ask_again(room)
        return None

    def _attests_end(self, peer: Address) -> bool:
        """Whether a later life of the peer has joined with its pid: one of the same process, or of
        another, and then the former has ended."""
        info = self.actor.peer_info(peer)
        return info is not None and any(
            (name, later.host_id, later.pid) == (peer.instance_id, info.host_id, info.pid)
            for (name, epoch), later in self.actor.peers.items()
            if epoch > peer.epoch
        )

    async def _all_hold(self, room: R, asked: AskOfRank) -> bool:
        """Of each process that the peer consists of."""
        info = self.actor.peer_info(room.peer)
        if info is None:
            return True  # nothing was granted to it, nor written
        for rank, place in enumerate([(info.host_id, info.pid), *info.other_ranks]):
            if not await self._holds(room, asked(room.peer.of_rank(rank), *place)):
                return False
        return True

    def _is_known(self, room: R) -> bool:
        """Whether a registry has listed that life of the peer.  Another one has no place to be
        fenced at: it is granted no memory, and nothing is written to it (F65)."""
        if self.actor.peer_info(room.peer) is not None:
            return True
        self.actor.counters["peers_not_told_of"] += 1
        return False

    async def _holds(self, room: R, answer: Awaitable[bool]) -> bool:
        """False also if the engine fails to answer: it is asked again."""
        try:
            return await answer
        except Exception as error:
            self.actor.fault(f"doubt about {room.key}", error)
            return False

    def _ask_again(self, room: R) -> None:
        if not room.terminal:  # the peer's own message may end it sooner, if it can arrive
            self.arm_retry(room, None)
