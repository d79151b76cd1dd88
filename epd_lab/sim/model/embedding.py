"""Several requests that want one `mm_hash` at a prefill instance: EMBEDDING and its rooms.

Each request brings a room of its own, from an encoder of its own.  The rooms that EMBEDDING opens
are real INCOMING machines; their encoders are played: what they say is true, and they
may say it at any moment or never, write late, fail, die, or be declared lost though they live.

A further room may come as a rival: then two load at a time, and one of them delivers.

Laws: one load at a time, or two of which one was late (F37, F62); nobody writes into slots that its
room does not own (F6, F7); rows go only when nobody reads them (F23, F24); every request hears of
its rows exactly once, or has left (F21, F22).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from epd.failure import Failure, FailureKind
from epd.fsm import embedding as m
from epd.fsm import incoming as t
from epd.fsm import room as r
from epd.fsm.incoming import Incoming
from epd.fsm.kernel import NULL_JOURNAL, Event
from epd.messages import Address
from epd_lab.sim.model.laws import Step, require
from epd_lab.sim.model.told import NBYTES
from epd_lab.sim.model.world import World


class Stands(NamedTuple):
    """Of a waiter, what its machine reads."""

    stands_for: str


IDLE, WAITS, READY, FAILED, LEFT = "idle", "waits", "has rows", "failed", "left"
WANT: Any = Stands("")  # who waits, as far as the machine is concerned
BUSY_CONSUMER = (WAITS, READY)
ENCODER = Address("e0", 1, "")


class EmbeddingWorld(World):
    """One hash, and for each room: its request, its transfer, its slots and its encoder."""

    def __init__(
        self, rooms: tuple[str, ...], mortal: tuple[str, ...] = (), further: tuple[str, ...] = ()
    ) -> None:
        """`mortal`: whose encoder may die; `further`: rooms that may stand in for the first."""
        self.embedding = m.Embedding("hash")
        self.requests = dict.fromkeys(rooms, IDLE)
        self.transfers: dict[str, Incoming] = {}
        self.further = further
        every = (*rooms, *further)
        self.slots = dict.fromkeys(every, "none")  # none, owned, published, free
        self.encoders = dict.fromkeys(every, "idle")  # idle, granted, writing, over, never
        self.concluded: set[str] = set()  # rooms whose load is over, whatever they still own
        self.cancelled: set[str] = set()  # rooms whose encoder was asked to stop
        self.dead: set[str] = set()
        self.given: set[str] = set()  # of the further rooms
        self.promised = False  # slots of a rival
        self.second: set[str] = set()  # of two loads, those that were not first
        self.mortal = mortal
        self.kept = ""  # the room whose slots hold the rows

    # --- EMBEDDING, as its role performs it -------------------------------------------------------

    def fire(self, event: Event) -> None:
        embedding = self.embedding
        self.perform(embedding, embedding.fire(event), event)
        if embedding.terminal and self.embedding is embedding:
            require(not self.kept, "it ends and its rows are still in the books")
            require(not self.promised, "it ends and slots are promised to a rival")
            self.embedding = m.Embedding("hash")

    def open_transfer(self, embedding: m.Embedding, event: Event) -> None:
        others = self.transfers.keys() - self.concluded - self.second
        require(not others, "one load at a time (F37)")
        self._open(embedding, embedding.room)

    def _open(self, embedding: m.Embedding, room: str) -> None:
        require(room not in self.transfers, f"room {room} is opened twice")
        require(room in embedding.waiters, "loads for somebody who left")
        self.transfers[room] = Incoming(room, 1, ENCODER, "hash", 4, 9.0, NULL_JOURNAL)

    def open_rival(self, embedding: m.Embedding, event: m.Wanted) -> None:
        self.promised = True
        self._open(embedding, event.room)

    def end_race(self, embedding: m.Embedding, event: Event) -> None:
        require(self.promised, "gives back what was not promised")
        self.promised = False

    def cancel_rival(self, embedding: m.Embedding, event: Event) -> None:
        self.end_race(embedding, event)
        self.second.add(embedding.rival)
        self._cancel(embedding.rival)

    def cancel_transfer(self, embedding: m.Embedding, event: Event) -> None:
        self._cancel(embedding.room)

    def _cancel(self, room: str) -> None:
        if room in self.transfers:
            self.fire_room(room, t.CancelRequested())

    def cancel_room(self, embedding: m.Embedding, event: m.Unwanted) -> None:
        if event.room in embedding.loads:
            self._cancel(event.room)

    def ask_room(self, embedding: m.Embedding, event: Event) -> None:
        """What comes of it is a step of its own."""

    def keep_rows(self, embedding: m.Embedding, event: m.Loaded) -> None:
        require(not self.kept, "kept twice")
        self.kept = embedding.room

    def release_rows(self, embedding: m.Embedding, event: Event) -> None:
        reading = [room for room, state in self.requests.items() if state in BUSY_CONSUMER]
        require(not set(reading) & embedding.waiters.keys(), f"{reading} read these rows (F23)")
        require(self.slots[self.kept] == "published", "gives back what it does not own")
        self.slots[self.kept], self.kept = "free", ""

    def notify_ready(self, embedding: m.Embedding, event: Event) -> None:
        for room in list(embedding.waiters):
            self._tell(room, READY)

    def notify_one(self, embedding: m.Embedding, event: m.Wanted) -> None:
        self._tell(event.room, READY)

    def notify_failed(self, embedding: m.Embedding, event: Event) -> None:
        for room in list(embedding.waiters):
            self._tell(room, FAILED)
            if room in self.embedding.waiters:  # its request fails and lets go at once
                _let_go(self, room)

    def _tell(self, room: str, what: str) -> None:
        if room in self.further:  # who it stands in for hears
            return
        require(self.requests[room] == WAITS, f"{room} is told twice: {what}")
        self.requests[room] = what

    # --- INCOMING, as its role performs it --------------------------------------------------------

    def fire_room(self, room: str, event: Event) -> None:
        transfer = self.transfers[room]
        effects = transfer.fire(event)
        self.perform(transfer, effects, event)

    def _current(self, room: str) -> bool:
        return room in self.embedding.loads

    def send_grant(self, transfer: Incoming, event: Event) -> None:
        if self.encoders[transfer.key] == "idle":
            self.encoders[transfer.key] = "granted"

    def send_cancel(self, transfer: Incoming, event: Event) -> None:
        self.cancelled.add(transfer.key)

    def release_slots(self, transfer: Incoming, event: Event) -> None:
        require(self.slots[transfer.key] == "owned", "gives back slots that it does not own")
        require(self.encoders[transfer.key] != "writing", "frees slots under a write (F6, F7)")
        self.slots[transfer.key] = "free"
        if self.embedding.state is not m.S.ABSENT:  # the role keeps no machine of what is absent
            self.fire(m.SlotsReturned())

    def publish(self, transfer: Incoming, event: Event) -> None:
        """Its outcome is a step of its own."""

    def conclude_delivered(self, transfer: Incoming, event: Event) -> None:
        self.concluded.add(transfer.key)
        if not self._current(transfer.key):
            self.slots[transfer.key] = "free"  # another one was first
            return
        self.slots[transfer.key] = "published"
        self.fire(m.Loaded("rows", (0,), transfer.key))

    def conclude_failed(self, transfer: Incoming, event: Event) -> None:
        self.concluded.add(transfer.key)
        if not self._current(transfer.key):
            return
        if transfer.why.kind is FailureKind.LOST:
            self.fire(m.EncoderLost(transfer.why, transfer.key))
        elif transfer.held:
            self.fire(m.LoadLost(transfer.why, transfer.key))
        elif transfer.why.kind is FailureKind.DEADLINE:
            self.fire(m.LoadTimedOut(transfer.why, transfer.key))
        else:
            self.fire(m.LoadFailed(transfer.why, transfer.key))

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self) -> Iterator[Step[EmbeddingWorld]]:
        for room, state in self.requests.items():
            if state == IDLE:
                yield self.act(f"{room} wants the rows", "work", partial(_want, room=room))
            elif state in BUSY_CONSUMER:
                yield self.act(f"{room} leaves", "fault", partial(_leave, room=room))
        first, *_ = self.requests
        for room in self.further:
            if room not in self.given and first in self.embedding.waiters:
                yield self.act(f"{room} may be used, too", "work", partial(_give, room=room))
                rival = partial(_give, room=room, is_rival=True)
                yield self.act(f"{room} may be first", "work", rival)
        if self.embedding.state is m.S.AWAITING_ROOM:
            yield self.act("no room comes", "time", lambda w: w.fire(m.NoRoomCame()))
        if self.embedding.state is m.S.RESIDENT:
            evict = m.EvictionRequested()
            yield self.act("the pool needs slots", "fault", lambda w: w.fire(evict))
        for room, transfer in self.transfers.items():
            yield from self._encoder(room)
            if not transfer.terminal:
                yield from self._consumer(room, transfer)

    def _consumer(self, room: str, transfer: Incoming) -> Iterator[Step[EmbeddingWorld]]:
        if transfer.state is t.S.PENDING:
            yield self.act(f"{room} gets slots", "work", partial(_lease, room=room))
        if transfer.state is t.S.PUBLISHING:
            yield from self._event(room, t.Published(), "work")
            yield from self._event(room, t.PublishFailed("checksum"), "fault")
        if room in self.cancelled:
            yield from self._event(room, r.RetryDue(), "retry")
        for event in (r.DeadlinePassed(), r.PeerLost()):
            yield from self._event(room, event, "time")
        if transfer.state is t.S.EXPIRE_PENDING:
            yield from self._event(room, r.GraceEnded(), "time")
        if room in self.dead and transfer.state is t.S.QUARANTINED:
            yield self.act(f"{room}'s encoder is fenced", "fault", partial(_fence, room=room))

    def _encoder(self, room: str) -> Iterator[Step[EmbeddingWorld]]:
        """What is true of it may reach us: also of one that has died since."""
        doing, transfer = self.encoders[room], self.transfers[room]
        if room in self.mortal and room not in self.dead and not transfer.terminal:
            yield self.act(f"{room}'s encoder dies", "fault", lambda w: w.dead.add(room))
        if room not in self.dead:
            if doing == "granted":
                yield self.act(f"{room}'s encoder writes", "work", partial(_write, room=room))
            if doing == "writing":
                yield self.act(f"{room} is written", "work", partial(_go, room=room, to="over"))
            if doing in ("idle", "granted", "writing"):
                gone = partial(_go, room=room, to="never")
                yield self.act(f"{room}'s encoder fails", "fault", gone)
        if transfer.terminal:
            return
        if doing == "writing":
            doubt = t.DoubtReceived(Failure(FailureKind.TRANSFER, "unknown"))
            yield from self._event(room, doubt, "fault")
        if doing == "over":
            yield from self._event(room, t.CommitReceived(NBYTES, ((NBYTES, 1),)), "message")
        if doing == "never":
            yield from self._event(
                room, t.AbortReceived(Failure(FailureKind.ENGINE, "failed")), "message"
            )
        if room in self.cancelled and doing in ("over", "never"):
            yield from self._event(room, t.CancelAcked(), "message")

    def _event(self, room: str, event: Event, kind: str) -> Iterator[Step[EmbeddingWorld]]:
        if self.changes(self.transfers[room], event):
            name = f"{type(event).__name__} in room {room}"
            yield self.act(name, kind, lambda w: w.fire_room(room, event))

    # --- laws and ends ----------------------------------------------------------------------------

    def check(self) -> None:
        for room, transfer in self.transfers.items():
            if transfer.terminal:
                require(self.slots[room] != "owned", f"room {room} ends owning its slots")
            kept = self.slots[room] != "published" or self.kept == room
            require(kept, f"the slots of room {room} are nobody's (F21)")
        for room, state in self.requests.items():
            known = state != WAITS or room in self.embedding.waiters
            require(known, f"{room} waits, and nobody knows of it")
        if self.embedding.state is m.S.RESIDENT:
            require(bool(self.kept), "resident without rows")
            untold = [r for r, state in self.requests.items() if state == WAITS]
            require(not untold, f"{untold} wait for rows that are here")

    def quiescent(self) -> bool:
        return (
            all(transfer.terminal for transfer in self.transfers.values())
            and WAITS not in self.requests.values()
            and self.embedding.state in (m.S.ABSENT, m.S.RESIDENT)
        )

    def succeeded(self) -> bool:
        return self.quiescent() and set(self.requests.values()) == {READY}


def _want(world: EmbeddingWorld, room: str) -> None:
    world.requests[room] = WAITS
    world.fire(m.Wanted(room, WANT))


def _leave(world: EmbeddingWorld, room: str) -> None:
    world.requests[room] = LEFT
    if room in world.embedding.waiters:
        _let_go(world, room)


def _let_go(world: EmbeddingWorld, room: str) -> None:
    embedding = world.embedding
    for each in embedding.rooms_for(room):
        if world.embedding is embedding:  # it has not ended
            world.fire(m.Unwanted(each))


def _give(world: EmbeddingWorld, room: str, *, is_rival: bool = False) -> None:
    world.given.add(room)
    first, *_ = world.requests
    stand_in: Any = Stands(first)
    world.fire((m.RivalWanted if is_rival else m.Wanted)(room, stand_in))


def _lease(world: EmbeddingWorld, room: str) -> None:
    world.slots[room] = "owned"
    if world._current(room):
        world.fire(m.LeaseGranted())
    world.fire_room(room, t.SlotsLeased((0,), NBYTES))


def _write(world: EmbeddingWorld, room: str) -> None:
    require(world.slots[room] == "owned", "a write into slots of somebody else (F7)")
    world.encoders[room] = "writing"


def _go(world: EmbeddingWorld, room: str, to: str) -> None:
    world.encoders[room] = to


def _fence(world: EmbeddingWorld, room: str) -> None:
    world.encoders[room] = "never"
    world.fire_room(room, t.PeerFenced())
