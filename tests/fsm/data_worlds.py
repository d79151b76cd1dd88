"""Worlds of the machines that own memory: OUTGOING, INCOMING, ENCODING, EMBEDDING."""

from __future__ import annotations

from collections import Counter

from epd.failure import FailureKind
from epd.fsm import embedding as m
from epd.fsm import encoding as e
from epd.fsm import incoming as i
from epd.fsm import outgoing as o
from epd.fsm import room as r
from epd.fsm.incoming import Incoming
from epd.fsm.kernel import Effect, Event
from epd.fsm.outgoing import Outgoing
from tests.fsm.tables import (
    FAILURE,
    GRANT,
    make_embedding,
    make_encoding,
    make_event,
    make_incoming,
    make_outgoing,
)
from tests.fsm.world import Choices, World


class RoomWorld(World):
    """What both ends of a room have around them."""

    machine: Outgoing | Incoming

    def __init__(self) -> None:
        super().__init__()
        self.owned = False
        self.num_leases = 0
        self.given = False

    def choices(self) -> Choices:
        yield from (r.DeadlinePassed(), r.PeerLost(), r.PeerSilent())
        if self.done[o.Do.ARM_GRACE] or self.done[i.Do.ARM_GRACE]:
            yield r.GraceEnded()

    def own(self) -> None:
        """Memory is its from now on, if it was not."""
        self.num_leases += not self.owned
        self.owned = True

    def free(self, effect: Effect) -> None:
        self.need(self.owned, f"{effect.name} of what is not owned")
        self.owned = False

    def need_failure(self, event: Event) -> None:
        """Its owner is told why."""
        self.need_reason(self.machine.why.reason, event)
        late = isinstance(event, r.DeadlinePassed)
        known = self.machine.why.kind is FailureKind.DEADLINE
        self.need(late == known, "another kind of failure")


class OutgoingWorld(RoomWorld):
    machine: Outgoing

    def __init__(self) -> None:
        super().__init__()
        self.machine = make_outgoing()
        self.writing = False
        self.withdrawn = False
        self.slots = "none"  # awaited, owned

    def choices(self) -> Choices:
        yield from super().choices()
        yield r.RetryDue()
        if self.slots == "awaited":
            yield o.SlotsLeased((1,))
        if self.machine.state is o.S.QUARANTINED:
            yield from (o.WriteSettled(), o.PeerFenced())
        if not self.given and not self.withdrawn:
            yield o.BytesReady(64)
            if self.machine.grant is not None:
                yield from (o.PartReady(16), o.PartReady(32))
        if not self.withdrawn:
            yield o.SourceFailed(FAILURE)
        yield from (o.GrantReceived(GRANT), o.CancelReceived(), o.CommitAcked())
        if self.writing:
            yield from (o.WriteSucceeded(1), o.WriteRefused("no"), o.WriteOutcomeUnknown("?"))

    def before(self, event: Event) -> None:
        if isinstance(event, o.BytesReady):
            self.given = True
            self.own()
        elif isinstance(event, o.SlotsLeased):
            self.slots = "owned"
        elif isinstance(event, o.SourceFailed):
            self.withdrawn = True
        elif isinstance(event, o.WriteSucceeded | o.WriteRefused | o.WriteOutcomeUnknown):
            self.writing = False

    def perform(self, effect: o.Do, event: Event) -> None:
        if effect is o.Do.RELEASE_SOURCE:
            self.need(not self.writing, "released under the write (F6)")
            self.free(effect)
        elif effect is o.Do.LEASE_SLOTS:
            self.need(self.slots == "none", "slots are leased once")
            self.slots = "awaited"
        elif effect is o.Do.RELEASE_SLOTS:
            self.need(not self.writing, "slots are returned under the write (F3)")
            self.slots = "none"
        elif effect is o.Do.HOLD_PART:
            self.own()
        elif effect is o.Do.START_WRITE:
            self.need(not self.writing, "one write at a time")
            self.need(self.owned, "writes what is not owned")
            self.need(self.machine.part_nbytes > 0, "writes nothing")
            self.writing = True
        elif effect is o.Do.SEND_COMMIT:
            self.need(self.machine.written_nbytes == 64, "what is committed was written")
        elif effect is o.Do.CONCLUDE_FAILED:
            self.need_failure(event)

    def at_end(self) -> None:
        told = self.done[o.Do.CONCLUDE_FAILED] + self.done[o.Do.CONCLUDE_DELIVERED]
        self.need(told == 1 or (told == 0 and self.withdrawn), f"the owner is told {told} times")
        self.need(not self.owned, "memory is left over")
        self.need(self.slots == "none", "slots to write from are left over")
        if not {"PeerLost", "PeerFenced"} & set(self.past):
            said = (o.Do.SEND_ABORT, o.Do.SEND_CANCEL_ACK, o.Do.SEND_COMMIT, o.Do.SEND_DOUBT)
            self.need(any(self.done[message] for message in said), "the consumer hears of no end")


class IncomingWorld(RoomWorld):
    machine: Incoming

    def __init__(self) -> None:
        super().__init__()
        self.machine = make_incoming()
        self.publishing = False
        self.called_off = False
        self.blocks = False  # were leased
        self.granted = False

    def choices(self) -> Choices:
        yield from super().choices()
        if self.done[i.Do.ARM_RETRY] or self.done[i.Do.START_FENCE]:
            yield r.RetryDue()
        if self.machine.state is i.S.QUARANTINED:
            yield i.PeerFenced()
        if not self.given:
            yield i.SlotsLeased((1, 2), 64)
            if not self.blocks:
                yield i.BlocksLeased((3, 4), 1)
        yield i.CancelRequested()
        yield from (i.CancelAcked(), i.AbortReceived(FAILURE), i.DoubtReceived(FAILURE))
        yield from (i.CommitReceived(64, ((64, 1),)), i.CommitReceived(63, ((63, 1),)))
        if self.publishing:
            yield from (i.Published(), i.PublishFailed("checksum"))

    def before(self, event: Event) -> None:
        if isinstance(event, i.BlocksLeased):
            self.blocks = True
            self.own()
        elif isinstance(event, i.SlotsLeased):
            self.given = True
            self.own()
        elif isinstance(event, i.CancelRequested):
            self.called_off = True
        elif isinstance(event, i.Published | i.PublishFailed):
            self.publishing = False

    def fire(self, event: Event) -> None:
        super().fire(event)
        if isinstance(event, i.BlocksLeased):
            self.need(self.machine.blocks == event.blocks, "it does not know what to release")
        if isinstance(event, i.SlotsLeased):
            self.need(self.machine.slots == event.slots, "it does not know what to release")

    def perform(self, effect: i.Do, event: Event) -> None:
        if effect is i.Do.RELEASE_SLOTS:
            self.need(not (event.by_time and self.granted), "time frees memory in use (F7)")
            self.free(effect)
        elif effect is i.Do.SEND_GRANT:
            self.granted = True
        elif effect is i.Do.CONCLUDE_FAILED and not self.called_off:
            self.need_failure(event)
        elif effect is i.Do.PUBLISH:
            self.need(self.done[effect] == 1, "a room is received once (F10)")
            self.publishing = True
        elif effect is i.Do.CONCLUDE_DELIVERED:
            self.free(effect)

    def at_end(self) -> None:
        told = self.done[i.Do.CONCLUDE_FAILED] + self.done[i.Do.CONCLUDE_DELIVERED]
        self.need(told == 1, f"the owner is told {told} times")
        self.need(not self.owned, "memory is left over")
        if not self.given:
            self.need(self.done[i.Do.WITHDRAW_LEASE] == 1, "it stays in the queue for slots")


class EncodingWorld(World):
    def __init__(self, *, stored: bool = False) -> None:
        super().__init__()
        self.machine: e.Encoding = make_encoding(stored=stored)
        self.turn = "no"  # waits, counts
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
        if self.turn == "waits":
            yield e.TurnCame()
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
            yield e.PreprocessCrashed("a bug")
        elif self.work == "prepared":
            yield e.BatchStarted()
        elif self.work == "batch":
            yield from (e.EncodeSucceeded("rows"), e.EncodeFailed("because"))

    def before(self, event: Event) -> None:
        self.serial += isinstance(event, e.Requested)
        if isinstance(event, e.TurnCame):
            self.turn = "counts"
        elif isinstance(event, e.PreprocessSucceeded | e.PreprocessFailed):
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
        if effect in (e.Do.START_LOAD, e.Do.START_PREPROCESS):
            self.need(self.turn == "counts", "work begins before its turn (F4)")
        if effect is e.Do.AWAIT_TURN:
            self.need(self.turn == "no", "it waits for a turn that it has")
            self.turn = "waits"
        elif effect in (e.Do.COUNT_AHEAD, e.Do.LEAVE_AHEAD):
            self.turn = "counts" if effect is e.Do.COUNT_AHEAD else "no"
        elif effect is e.Do.START_LOAD:
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
        self.need(self.turn == "no", "a turn, or a place in the queue for one, is left over")


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
