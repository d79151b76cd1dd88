"""Worlds of the machines that own memory: TRANSFER, ENCODING, EMBEDDING."""

from __future__ import annotations

from collections import Counter

from epd.fsm import embedding as m
from epd.fsm import encoding as e
from epd.fsm import transfer as t
from epd.fsm.kernel import Event
from tests.fsm.tables import make_embedding, make_encoding, make_event, make_transfer
from tests.fsm.world import Choices, World

MEMORY = {t.Do.RELEASE_SLOTS, t.Do.RELEASE_SOURCE}


class TransferWorld(World):
    def __init__(self, side: t.Side) -> None:
        super().__init__()
        self.machine: t.Transfer = make_transfer(side=side)
        self.machine.grant = None
        self.side = side
        self.writing = False
        self.owned = False
        self.num_leases = 0
        self.given = False
        self.withdrawn = False
        self.publishing = False
        self.called_off = False

    def choices(self) -> Choices:
        yield from (t.DeadlinePassed(), t.GraceEnded(), t.RetryDue())
        yield from (t.PeerLost(), t.PeerSilent())
        if self.machine.state is t.S.QUARANTINED:
            yield t.PeerFenced()
            if self.side is t.Side.PRODUCER:
                yield t.WriteSettled()
        yield from self._consumer() if self.side is t.Side.CONSUMER else self._producer()

    def _consumer(self) -> Choices:
        if not self.given:
            yield t.SlotsLeased((1, 2))
        yield t.CancelRequested()
        yield from (t.CancelAcked(), t.AbortReceived("engine", "because", True))
        yield t.DoubtReceived("transfer", "because", True)
        yield from (t.CommitReceived(64, 1), t.CommitReceived(63, 1))
        if self.publishing:
            yield from (t.Published(), t.PublishFailed("checksum"))

    def _producer(self) -> Choices:
        if not self.given and not self.withdrawn:
            yield t.BytesReady("source", 64)
            if self.machine.grant is not None:
                yield from (t.PartReady(16), t.PartReady(32))
        if not self.withdrawn:
            yield t.SourceFailed("engine", "because", True)
        yield from (make_event(t.GrantReceived), t.CancelReceived(), t.CommitAcked())
        if self.writing:
            yield from (t.WriteSucceeded(1), t.WriteRefused("no"), t.WriteOutcomeUnknown("?"))

    def before(self, event: Event) -> None:
        if isinstance(event, t.SlotsLeased | t.BytesReady):
            self.given = True
            self.own()
        elif isinstance(event, t.SourceFailed):
            self.withdrawn = True
        elif isinstance(event, t.CancelRequested):
            self.called_off = True
        elif isinstance(event, t.Published | t.PublishFailed):
            self.publishing = False
        elif isinstance(event, t.WriteSucceeded | t.WriteRefused | t.WriteOutcomeUnknown):
            self.writing = False

    def fire(self, event: Event) -> None:
        super().fire(event)
        if isinstance(event, t.BytesReady):
            self.need(self.machine.source == event.source, "it does not know what to release")
        elif isinstance(event, t.SlotsLeased):
            self.need(self.machine.slots == event.slots, "it does not know what to release")

    def perform(self, effect: t.Do, event: Event) -> None:
        if effect in MEMORY:
            self.need(not event.by_time or not self.in_flight(), "time frees memory in use (F7)")
            self.need(self.owned, f"{effect.name} of what is not owned")
            self.need(not self.writing, f"{effect.name} under the write (F6)")
            self.owned = False
        elif effect is t.Do.HOLD_PART:
            self.own()
        elif effect is t.Do.START_WRITE:
            self.need(not self.writing, "one write at a time")
            self.need(self.owned, "writes what is not owned")
            self.need(self.machine.part_nbytes > 0, "writes nothing")
            self.writing = True
        elif effect is t.Do.SEND_COMMIT:
            self.need(self.machine.written_nbytes == 64, "what is committed was written")
        elif effect is t.Do.CONCLUDE_FAILED:
            told = bool(self.machine.failure[0])
            self.need(told or self.called_off, "its owner is told no reason")
            if not self.called_off:
                self.need_reason(self.machine.failure[1], event)
                late = isinstance(event, t.DeadlinePassed)
                known = self.machine.failure[0] == "deadline"
                self.need(late == known, "another kind of failure")
        elif effect is t.Do.PUBLISH:
            self.need(self.done[effect] == 1, "a room is received once (F10)")
            self.publishing = True
        elif effect is t.Do.CONCLUDE_DELIVERED and self.side is t.Side.CONSUMER:
            self.need(self.owned, "publishes slots that it does not own")
            self.owned = False

    def own(self) -> None:
        """Memory is its from now on, if it was not."""
        self.num_leases += not self.owned
        self.owned = True

    def in_flight(self) -> bool:
        """Whether, as far as this end can know, a write may be under way."""
        return self.side is t.Side.CONSUMER or self.writing

    def at_end(self) -> None:
        told = self.done[t.Do.CONCLUDE_FAILED] + self.done[t.Do.CONCLUDE_DELIVERED]
        self.need(told == 1 or (told == 0 and self.withdrawn), f"the owner is told {told} times")
        self.need(not self.owned, "memory is left over")
        if self.side is t.Side.PRODUCER and not {"PeerLost", "PeerFenced"} & set(self.past):
            words = (t.Do.SEND_ABORT, t.Do.SEND_CANCEL_ACK, t.Do.SEND_COMMIT, t.Do.SEND_DOUBT)
            self.need(any(self.done[word] for word in words), "the consumer hears of no end")
        if self.side is t.Side.CONSUMER and not self.given:
            self.need(self.done[t.Do.WITHDRAW_LEASE] == 1, "it stays in line for slots")


class EncodingWorld(World):
    def __init__(self, *, stored: bool = False) -> None:
        super().__init__()
        self.machine: e.Encoding = make_encoding(stored=stored)
        self.work = "none"  # none, preprocess, prepared, batch
        self.reads = 0  # of storage, under way
        self.copies: list[e.Do] = []  # between tiers, under way
        self.kept = ""  # the tier that counts the rows
        self.filled: Counter[str] = Counter()
        self.serial = 0

    def choices(self) -> Choices:
        if not self.machine.terminal:
            yield e.Requested(f"room{self.serial}")
        yield from (e.RoomClosed(room) for room in list(self.machine.rooms))
        if self.machine.state is not e.S.ABSENT:
            yield from (e.EncodeTimedOut(), e.EvictionRequested(), e.IdleTimePassed())
            yield from (e.DemotionRequested(),)
        if self.reads:
            yield from (e.LoadSucceeded("rows"), e.LoadMissed(), e.LoadTimedOut())
        if self.copies:
            done = {
                e.Do.START_DEMOTION: e.DemotionSucceeded,
                e.Do.START_PROMOTION: e.PromotionSucceeded,
            }
            yield from (done[self.copies[0]]("copy"), e.CopyFailed(), e.CopyTimedOut())
        if self.work == "preprocess":
            yield from (e.PreprocessSucceeded("patches"), e.PreprocessFailed("truncated"))
            yield e.EncodeFailed("a bug")
            if self.machine.state is e.S.ABANDONED:
                yield e.Withdrawn()
        elif self.work == "prepared":
            yield e.BatchStarted()
        elif self.work == "batch":
            yield from (e.EncodeSucceeded("rows"), e.EncodeFailed("because"))

    def before(self, event: Event) -> None:
        self.serial += isinstance(event, e.Requested)
        if isinstance(event, e.PreprocessSucceeded | e.PreprocessFailed):
            self.work = "none"
        elif isinstance(event, e.LoadSucceeded | e.LoadMissed):
            self.reads -= 1
        elif isinstance(event, e.DemotionSucceeded | e.PromotionSucceeded | e.CopyFailed):
            self.copies.pop(0)
        elif isinstance(event, e.BatchStarted):
            self.work = "batch"
        elif isinstance(event, e.EncodeSucceeded | e.EncodeFailed):
            self.work = "none"

    def fire(self, event: Event) -> None:
        super().fire(event)
        if isinstance(event, e.Requested | e.RoomClosed) and not self.machine.terminal:
            is_open = event.room in self.machine.rooms
            self.need(is_open == isinstance(event, e.Requested), f"{event.room} {is_open=}")

    def perform(self, effect: e.Do, event: Event) -> None:
        rooms = list(self.machine.rooms)
        if effect is e.Do.START_LOAD:
            self.need(self.done[effect] == 1, "storage is asked once (F37)")
            self.reads += 1
        elif effect in (e.Do.START_DEMOTION, e.Do.START_PROMOTION):
            down = effect is e.Do.START_DEMOTION
            self.need(self.kept == ("device" if down else "host"), "moves what is elsewhere")
            self.need(not rooms, "moves what is read (F31)")
            self.kept = "host" if down else "device"
            self.copies.append(effect)
        elif effect is e.Do.START_PREPROCESS:
            self.need(self.work == "none", "single flight (F37)")
            self.work = "preprocess"
        elif effect is e.Do.ENQUEUE:
            self.work = "prepared"
        elif effect is e.Do.DEQUEUE:
            self.need(self.work == "prepared", "takes back what a batch owns")
            self.work = "none"
        elif effect in (e.Do.KEEP_ROWS, e.Do.KEEP_HOST_ROWS):
            self.need(self.machine.rows is not None, "keeps no rows")
            self.kept = "device" if effect is e.Do.KEEP_ROWS else "host"
        elif effect is e.Do.RELEASE_ROWS:
            self.need(self.kept and not rooms, "rows are dropped that are not kept or still read")
            self.kept = ""
        elif effect is e.Do.FAIL_ROOMS:
            failure = self.machine.failure
            self.need(failure is not None, "rooms are told no reason")
            self.need_reason(failure.reason if failure is not None else "", event)
            for room in rooms:  # as the role does
                self.fire(e.RoomClosed(room))
        elif effect in (e.Do.FILL_ROOMS, e.Do.FILL_ONE):
            self.need(self.kept, "rooms are filled from rows that are not in the books")
            self.filled.update(rooms if effect is e.Do.FILL_ROOMS else [event.room])

    def at_end(self) -> None:
        self.need(not self.kept, f"rows are left over in the {self.kept} tier")
        self.need(self.work != "prepared", "a place in the queue for batches is left over")


class EmbeddingWorld(World):
    def __init__(self) -> None:
        super().__init__()
        self.machine: m.Embedding = make_embedding()
        self.load = "none"  # none, asked, withdrawn, leased: the current room's transfer
        self.kept = False
        self.told: Counter[str] = Counter()
        self.serial = 0

    def choices(self) -> Choices:
        if not self.machine.terminal:
            yield m.Wanted(f"room{self.serial}", "item")
        yield from (m.Unwanted(room) for room in list(self.machine.waiters))
        if self.machine.state is not m.S.ABSENT:
            yield from (m.EvictionRequested(), m.IdleTimePassed(), m.SlotsReturned())
        if self.load == "asked":
            yield m.LeaseGranted()
        if self.load == "leased":
            yield m.Loaded("rows", (1, 2))
        if self.load == "withdrawn":
            yield make_event(m.LoadFailed)
        elif self.load != "none":
            for outcome in (m.LoadFailed, m.LoadLost, m.LoadTimedOut):
                yield make_event(outcome)

    def before(self, event: Event) -> None:
        self.serial += isinstance(event, m.Wanted)
        if isinstance(event, m.LeaseGranted):
            self.load = "leased"
        elif isinstance(event, m.Loaded | m.LoadFailed | m.LoadLost | m.LoadTimedOut):
            self.load = "none"

    def fire(self, event: Event) -> None:
        super().fire(event)
        if isinstance(event, m.Wanted | m.Unwanted) and not self.machine.terminal:
            waits = event.room in self.machine.waiters
            self.need(waits == isinstance(event, m.Wanted), f"{event.room} {waits=}")

    def perform(self, effect: m.Do, event: Event) -> None:
        waiters = list(self.machine.waiters)
        if effect is m.Do.OPEN_TRANSFER:
            self.need(self.load == "none", "one load at a time (F37)")
            self.need(self.machine.room in waiters, "loads for somebody who left")
            self.load = "asked"
        elif effect is m.Do.CANCEL_TRANSFER and self.load == "asked":
            self.load = "withdrawn"
        elif effect is m.Do.KEEP_ROWS:
            self.kept = True
        elif effect is m.Do.RELEASE_ROWS:
            self.need(self.kept and not waiters, "rows are dropped that somebody reads (F23)")
            self.kept = False
        elif effect is m.Do.NOTIFY_READY:
            self.told.update(waiters)
        elif effect is m.Do.NOTIFY_FAILED:
            failure = self.machine.failure
            self.need_reason(failure.reason if failure is not None else "", event)
            for room in waiters:  # their requests fail and let go at once
                self.told[room] += 1
                self.fire(m.Unwanted(room))
        elif effect is m.Do.NOTIFY_ONE:
            self.told[event.room] += 1

    def at_end(self) -> None:
        self.need(not self.kept, "slots are left over")
        unheard = [room for room in self.machine.waiters if not self.told[room]]
        self.need(not unheard, f"{unheard} never hear of their rows")
