"""Several rooms that want one `mm_hash` at an encode instance: ENCODING and its rooms.

Every room is a real OUTGOING machine; its consumer is played: it may grant before the
request comes or never, cancel, acknowledge, be declared lost, or die.  Threads and device are
played too: they may end well or badly, late, or not before their time is up.

Laws: work begins in its turn, and its rows count as run ahead while somebody waits for them (F4);
single flight, of encoding and of reading storage (F37); rows are dropped or moved to another tier
only when no transfer can still read them (F6, F8, F31); rooms are filled from rows that are in the
books; an image that fails takes its rooms with it and nothing else (F13).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from epd.fsm import encoding as e
from epd.fsm import outgoing as t
from epd.fsm import room as r
from epd.fsm.kernel import NULL_JOURNAL, Event
from epd.fsm.outgoing import Manifest, Outgoing
from epd_lab.sim.model.laws import Step, require
from epd_lab.sim.model.told import NBYTES, PEER, grant
from epd_lab.sim.model.world import World

PATCHES: Any = "patches"
ROWS: Any = "rows"
MANIFEST = Manifest(None, 4)


class EncodingWorld(World):
    """One hash; for each room its transfer, who holds its source, and what its consumer said."""

    def __init__(
        self, rooms: tuple[str, ...], mortal: tuple[str, ...] = (), *, tiers: bool = False
    ) -> None:
        self.tiers = tiers  # a storage below, and host memory beside the device's
        self.encoding = self._absent()
        self.turn = "no"  # waits, counts
        self.work = "none"  # none, pool, prepared, batch
        self.reading = False  # from storage
        self.copying = ""  # between tiers: down, up
        self.kept = ""  # the tier that counts the rows: device, host
        self.transfers = {room: Outgoing(room, 1, PEER, NULL_JOURNAL) for room in rooms}
        self.asked: set[str] = set()
        self.sources = dict.fromkeys(rooms, "none")  # none, owned, released
        self.writes = dict.fromkeys(rooms, "none")  # none, running, over, zombie
        self.slots = dict.fromkeys(rooms, "none")  # to write from: none, awaited, owned
        self.granted: set[str] = set()
        self.committed: set[str] = set()
        self.mortal = mortal  # rooms whose consumer may die
        self.dead: set[str] = set()

    def _absent(self) -> e.Encoding:
        return e.Encoding("hash", b"image", (1, 2, 2), num_rows=4, stored=self.tiers)

    # --- ENCODING, as its role performs it --------------------------------------------------------

    def fire(self, event: Event) -> None:
        encoding = self.encoding
        self.perform(encoding, encoding.fire(event), event)
        if encoding.terminal and self.encoding is encoding:
            require(not self.kept, "it ends and its rows are still in the books")
            require(self.work != "prepared", "it ends and its patches wait for a batch")
            self.encoding = self._absent()
            require(self.turn == "no", "it ends and has a turn, or a place in the queue for one")
            self.work, self.reading, self.copying = "none", False, ""  # late outcomes find nobody

    def await_turn(self, encoding: e.Encoding, event: Event) -> None:
        require(self.turn == "no", "it waits for a turn that it has")
        self.turn = "waits"

    def count_ahead(self, encoding: e.Encoding, event: Event) -> None:
        self.turn = "counts"

    def leave_ahead(self, encoding: e.Encoding, event: Event) -> None:
        self.turn = "no"

    def start_preprocess(self, encoding: e.Encoding, event: Event) -> None:
        require(self.work == "none", "single flight (F37)")
        require(self.turn == "counts", "work begins before its turn (F4)")
        self.work = "pool"

    def enqueue(self, encoding: e.Encoding, event: Event) -> None:
        self.work = "prepared"

    def dequeue(self, encoding: e.Encoding, event: Event) -> None:
        require(self.work == "prepared", "takes back what a batch owns")
        self.work = "none"

    def start_load(self, encoding: e.Encoding, event: Event) -> None:
        require(not self.reading, "storage is asked once (F37)")
        require(self.turn == "counts", "storage is asked before its turn (F4)")
        self.reading = True

    def keep_rows(self, encoding: e.Encoding, event: Event) -> None:
        require(encoding.rows is not None, "keeps no rows")
        self.kept = "device"

    def keep_host_rows(self, encoding: e.Encoding, event: Event) -> None:
        require(encoding.rows is not None, "keeps no rows")
        self.kept = "host"

    def start_demotion(self, encoding: e.Encoding, event: Event) -> None:
        self._move("device", "host", "down")

    def start_promotion(self, encoding: e.Encoding, event: Event) -> None:
        self._move("host", "device", "up")

    def _move(self, source: str, target: str, way: str) -> None:
        require(self.kept == source, "moves what is elsewhere")
        self._require_unread("moved")
        self.kept, self.copying = target, way

    def release_rows(self, encoding: e.Encoding, event: Event) -> None:
        require(bool(self.kept), "drops what it does not keep")
        self._require_unread("dropped")
        self.kept = ""

    def _require_unread(self, done: str) -> None:
        reading = [room for room, source in self.sources.items() if source == "owned"]
        require(not reading, f"rows are {done} that {reading} still read (F31)")

    def fill_rooms(self, encoding: e.Encoding, event: Event) -> None:
        for room in list(encoding.rooms):
            self._fill(room)

    def fill_one(self, encoding: e.Encoding, event: e.Requested) -> None:
        self._fill(event.room)

    def _fill(self, room: str) -> None:
        require(bool(self.kept), "a room is filled from rows that are not in the books")
        self.sources[room] = "owned"
        self.fire_room(room, t.BytesReady(NBYTES))

    def fail_rooms(self, encoding: e.Encoding, event: Event) -> None:
        failure = encoding.failure
        require(failure is not None, "rooms are told no reason")
        assert failure is not None
        told = t.SourceFailed(failure)
        for room in list(encoding.rooms):
            self.fire_room(room, told)
            self._close(room)

    def _close(self, room: str) -> None:
        if room in self.encoding.rooms:
            self.fire(e.RoomClosed(room))

    # --- OUTGOING, as its role performs it --------------------------------------------------------

    def fire_room(self, room: str, event: Event) -> None:
        transfer = self.transfers[room]
        self.perform(transfer, transfer.fire(event), event)

    def lease_slots(self, transfer: Outgoing, event: Event) -> None:
        require(self.slots[transfer.key] == "none", "slots are leased once")
        self.slots[transfer.key] = "awaited"

    def release_slots(self, transfer: Outgoing, event: Event) -> None:
        running = self.writes[transfer.key] in ("running", "zombie")
        require(not running, "slots are returned under the write (F3)")
        self.slots[transfer.key] = "none"

    def start_write(self, transfer: Outgoing, event: Event) -> None:
        require(self.writes[transfer.key] == "none", "a room is written once")
        require(self.sources[transfer.key] == "owned", "writes what it does not hold")
        self.writes[transfer.key] = "running"

    def send_commit(self, transfer: Outgoing, event: Event) -> None:
        self.committed.add(transfer.key)

    def release_source(self, transfer: Outgoing, event: Event) -> None:
        running = self.writes[transfer.key] in ("running", "zombie")
        require(not running, "the source is given back under the write (F6, F8)")
        require(self.sources[transfer.key] == "owned", "gives back what it does not hold")
        self.sources[transfer.key] = "released"
        self._close(transfer.key)

    def conclude_failed(self, transfer: Outgoing, event: Event) -> None:
        if transfer.terminal:
            self._close(transfer.key)

    def conclude_delivered(self, transfer: Outgoing, event: Event) -> None:
        self._close(transfer.key)

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self) -> Iterator[Step[EncodingWorld]]:
        for room, transfer in self.transfers.items():
            if room not in self.asked:
                yield self.act(f"{room} is asked for", "message", partial(_ask, room=room))
            if not transfer.terminal:
                yield from self._room(room)
        yield from self._workers()
        if self.encoding.state is not e.S.ABSENT:
            yield self._encoding_step(e.EncodeTimedOut(), "time")
            yield self._encoding_step(e.EvictionRequested(), "fault")
        if self.tiers:
            yield from self._tiers()

    def _workers(self) -> Iterator[Step[EncodingWorld]]:
        if self.turn == "waits":
            yield self.act("TurnCame", "work", _come)
        if self.work == "pool":
            yield self._worked(e.PreprocessSucceeded(PATCHES), "work")
            yield self._worked(e.PreprocessFailed("truncated"), "fault")
            yield self._worked(e.PreprocessCrashed("a bug"), "fault")
        elif self.work == "prepared":
            yield self._worked(e.BatchStarted(), "work", "batch")
        elif self.work == "batch":
            yield self._worked(e.EncodeSucceeded(ROWS), "work")
            yield self._worked(e.EncodeFailed("because"), "fault")

    def _worked(self, event: Event, kind: str, work: str = "none") -> Step[EncodingWorld]:
        def do(world: EncodingWorld) -> None:
            world.work = work
            world.fire(event)

        return self.act(type(event).__name__, kind, do)

    def _tiers(self) -> Iterator[Step[EncodingWorld]]:
        if self.kept == "device" and not self.copying:
            yield self._encoding_step(e.DemotionRequested(), "fault")
        if self.reading:
            yield self._read(e.LoadSucceeded(ROWS), "work", over=True)
            yield self._read(e.LoadMissed(), "fault", over=True)
            yield self._read(e.LoadTimedOut(), "time", over=False)
        if self.copying:
            done = e.DemotionSucceeded if self.copying == "down" else e.PromotionSucceeded
            yield self._copied(done(ROWS), "work", over=True)
            yield self._copied(e.CopyFailed(), "fault", over=True)
            yield self._copied(e.CopyTimedOut(), "time", over=False)

    def _read(self, event: Event, kind: str, *, over: bool) -> Step[EncodingWorld]:
        def do(world: EncodingWorld) -> None:
            world.reading = not over
            world.fire(event)

        return self.act(type(event).__name__, kind, do)

    def _copied(self, event: Event, kind: str, *, over: bool) -> Step[EncodingWorld]:
        def do(world: EncodingWorld) -> None:
            world.copying = "" if over else world.copying
            world.fire(event)

        return self.act(type(event).__name__, kind, do)

    def _encoding_step(self, event: Event, kind: str) -> Step[EncodingWorld]:
        return self.act(type(event).__name__, kind, lambda w: w.fire(event))

    def _room(self, room: str) -> Iterator[Step[EncodingWorld]]:
        write = self.writes[room]
        if room not in self.dead:
            if room not in self.granted:
                yield self.act(f"{room} is granted", "message", partial(_grant, room=room))
            yield from self._event(room, t.CancelReceived(), "fault")
            if room in self.mortal:
                die = partial(_die, room=room)
                yield self.act(f"{room}'s consumer dies", "fault", die)
            if room in self.committed:
                yield from self._event(room, t.CommitAcked(), "message")
        if self.slots[room] == "awaited":
            leased = partial(_lease, room=room)
            yield self.act(f"slots for {room} are leased", "work", leased)
        if write == "running":
            yield self._written(room, t.WriteSucceeded(1), "work", "over")
            yield self._written(room, t.WriteRefused("no"), "fault", "over")
            yield self._written(room, t.WriteOutcomeUnknown("?"), "fault", "zombie")
        if room in self.dead and self.transfers[room].state is t.S.QUARANTINED:
            yield self._written(room, t.PeerFenced(), "fault", "over")
        for event in (r.DeadlinePassed(), r.PeerLost()):
            yield from self._event(room, event, "time")

    def _written(self, room: str, event: Event, kind: str, write: str) -> Step[EncodingWorld]:
        def do(world: EncodingWorld) -> None:
            world.writes[room] = write
            world.fire_room(room, event)

        return self.act(f"{type(event).__name__} in room {room}", kind, do)

    def _event(self, room: str, event: Event, kind: str) -> Iterator[Step[EncodingWorld]]:
        if self.changes(self.transfers[room], event):
            name = f"{type(event).__name__} in room {room}"
            yield self.act(name, kind, lambda w: w.fire_room(room, event))

    # --- laws and ends ----------------------------------------------------------------------------

    def check(self) -> None:
        encoding = self.encoding
        require(bool(self.kept) == (encoding.rows is not None), "books and rows differ")
        if self.kept:
            counts = self.turn == "counts"
            require(counts == bool(encoding.rooms), "rows count as run ahead while rooms wait (F4)")
        for room, transfer in self.transfers.items():
            if transfer.terminal:
                require(self.sources[room] != "owned", f"room {room} ends holding its source")
                require(self.slots[room] == "none", f"room {room} ends, and its slots do not")
                require(room not in encoding.rooms, f"room {room} has ended and still pins rows")
            elif room in self.asked:
                known = room in encoding.rooms or self.sources[room] != "none"
                withdrawn = transfer.state is t.S.CANCEL_PENDING
                require(known or withdrawn, f"room {room} waits, and nobody knows of it")

    def quiescent(self) -> bool:
        rests = self.encoding.state is e.S.ABSENT or self.encoding.at_rest
        over = all(tr.terminal or self._undecided(room) for room, tr in self.transfers.items())
        return rests and over

    def _undecided(self, room: str) -> bool:
        """An unknown outcome of a peer that lives: owned until it dies (F8)."""
        return self.writes[room] == "zombie" and room not in self.dead

    def succeeded(self) -> bool:
        delivered = all(tr.state is t.S.DELIVERED for tr in self.transfers.values())
        return delivered and self.encoding.at_rest


def _come(world: EncodingWorld) -> None:
    world.turn = "counts"
    world.fire(e.TurnCame())


def _ask(world: EncodingWorld, room: str) -> None:
    world.asked.add(room)
    transfer = world.transfers[room]
    if transfer.terminal:
        return  # its cancel came first (F42)
    world.fire_room(room, t.Requested("hash", MANIFEST))
    world.fire(e.Requested(room))


def _grant(world: EncodingWorld, room: str) -> None:
    world.granted.add(room)
    world.fire_room(room, t.GrantReceived(grant(room, 4)))


def _lease(world: EncodingWorld, room: str) -> None:
    world.slots[room] = "owned"
    world.fire_room(room, t.SlotsLeased((0,)))


def _die(world: EncodingWorld, room: str) -> None:
    world.dead.add(room)
