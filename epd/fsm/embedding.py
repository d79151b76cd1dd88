"""EMBEDDING: the rows of one `mm_hash` at a prefill instance, for all its requests.

Theory of operation
-------------------
One machine per hash, so one load per hash (fault F37): requests are *waiters*, each with a room of
its own at some encoder.  The first waiter's room becomes the load; the others follow.  If the load
fails, the next room takes over, so that one lost encoder fails nobody who has another.  When rows
are resident, the rooms that were not needed are cancelled.

If an encoder was lost, or does not answer, and no room is left, the gateways of all waiters are
asked for another one (AWAITING_ROOM).  They are asked again and again, for messages may be lost: a
loss costs its images, not the attempts.  A further room is a follower like any other; the waiter of
the room that it stands in for gets the rows.  A gateway that has none ends the attempt, and what it
does not answer fails by time.

If rows take much longer than is usual, one gateway is asked for a room besides (`LoadLate`, timed
by what loads have taken lately). With that room two transfers race (HEDGED), each with slots of its
own.  The second's are promised apart, and taken only if no other request needs them.  The first
that is delivered is the load; the other one is cancelled, and what it delivers all the same goes
back. If one of them fails, the other is the load.

References keep rows from the first request for them until their last consumer has used them; only
unreferenced rows can be evicted (faults F23, F24).  When all waiters leave during a load it is
ABANDONED: the memory is the transfer's until the outcome arrives.  Then the rows stay as cache or
the slots return (F21); a new waiter meanwhile joins the same load (F22).  The slots themselves are
owned by INCOMING until published, by this machine while RESIDENT.

Source: the asynchronous-load change of vLLM's encoder-cache connector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epd.failure import Failure
from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Ignore,
    Journal,
    Machine,
    Owned,
    Row,
    State,
    Table,
    unless,
)
from epd.records import Address, MediaItem


class Do(Effect):
    OPEN_TRANSFER = "lease slots and grant them for the current room"
    CANCEL_TRANSFER = "stop the current load"
    ARM_LATE = "fire LoadLate when rows take longer than is usual"
    ASK_RIVAL = "ask a waiter's gateway for a room besides the one that is late"
    OPEN_RIVAL = "lease slots for the second room, if they can be promised, and grant them"
    CANCEL_RIVAL = "stop the load that came second, and give back what was promised for it"
    END_RACE = "one load is left: give back what was promised for two"
    CANCEL_ROOM = (
        "tell the encoder that the leaving waiter's room is not needed; if it is a load, stop it"
    )
    CANCEL_FOLLOWERS = "tell the encoders of all other rooms that they are not needed"
    KEEP_ROWS = "enter the order of use, from which unreferenced rows are evicted"
    NOTIFY_READY = "tell every waiter that the rows are resident"
    ASK_ROOM = "ask every waiter's gateway for another room"
    ARM_RETRY = "fire RetryDue later"
    ARM_NO_ROOM = "fire NoRoomCame later"
    NOTIFY_ONE = "tell the new waiter that the rows are resident"
    NOTIFY_FAILED = "tell every waiter that the rows will not come"
    RELEASE_ROWS = "return the slots to the pool"


class Own(Owned):
    LOAD = "a transfer that loads the rows, and owns their slots", Do.CANCEL_TRANSFER
    RIVAL = (
        "a second transfer of the same rows, and a promise of its slots",
        Do.CANCEL_RIVAL,
        Do.END_RACE,
    )
    ROWS = "the rows and their slots", Do.RELEASE_ROWS


class S(State):
    ABSENT = "nobody has asked"
    REQUESTED = "waits for slots of the receive pool", Own.LOAD
    LOADING = "rows are on their way; waiters wait", Own.LOAD
    HEDGED = (
        "the load is late: another encoder was asked, too; the first one wins",
        Own.LOAD,
        Own.RIVAL,
    )
    RESIDENT = "the rows are here", Own.ROWS
    ABANDONED = "nobody waits; the outcome of the load is awaited", Own.LOAD
    AWAITING_ROOM = "its encoder was lost, or is silent; the gateways are asked for another room"
    FAILED = "no room is left to try"
    QUARANTINED = "the load's outcome is unknown; its slots stay with the transfer until fenced"
    EVICTED = "forgotten"


@dataclass(frozen=True, slots=True)
class Want:
    """One item of one request that waits for rows."""

    item: MediaItem
    attempt: int
    deadline_s: float  # in the time of this gateway
    gateway: str
    ready: Callable[[str, object], None]  # room, rows
    failed: Callable[[Failure], None]
    ask: Callable[[Address, Failure | None, float], None]
    """For a room at another encoder than this: why, or None and since when it is waited for."""
    stands_for: str = ""  # the room whose waiter hears of the rows; empty: this one


@dataclass(slots=True)
class Wanted(Event):
    room: str
    item: Want


@dataclass(slots=True)
class RivalWanted(Wanted):
    """In a room that was asked for because another one is late."""


@dataclass(slots=True)
class Unwanted(Event):
    """A waiter left: it used the rows, or it was aborted."""

    room: str
    item: Want | None = None


@dataclass(slots=True)
class LeaseGranted(Event):
    pass


@dataclass(slots=True)
class LoadLate(Event):
    """It takes longer than is usual."""

    by_time = True


@dataclass(slots=True)
class Loaded(Event):
    brings = (Own.ROWS,)
    ends = (Own.LOAD,)
    rows: object
    slots: tuple[int, ...]
    room: str = ""  # of two


@dataclass(slots=True)
class LoadFailed(Event):
    ends = (Own.LOAD,)
    failure: Failure
    room: str = ""  # of two, here and below


@dataclass(slots=True)
class LoadLost(Event):
    """Its outcome is unknown; its slots stay with the transfer."""

    ends = (Own.LOAD,)
    failure: Failure
    room: str = ""


@dataclass(slots=True)
class EncoderLost(Event):
    """Its encoder was lost or does not answer, which another one can make up for; slots stay with
    the transfer."""

    ends = (Own.LOAD,)
    failure: Failure
    room: str = ""


@dataclass(slots=True)
class RetryDue(Event):
    by_time = True


@dataclass(slots=True)
class NoRoomCame(Event):
    by_time = True


@dataclass(slots=True)
class LoadTimedOut(Event):
    by_time = True
    ends = (Own.LOAD,)
    failure: Failure
    room: str = ""


@dataclass(slots=True)
class SlotsReturned(Event):
    pass


@dataclass(slots=True)
class EvictionRequested(Event):
    """The pool needs slots."""


@dataclass(slots=True)
class IdleTimePassed(Event):
    by_time = True


def others_wait(embedding: Embedding, event: Unwanted) -> bool:
    return any(room != event.room for room in embedding.waiters)


def other_waits(embedding: Embedding, event: Failed) -> bool:
    """For slots: of the two loads, the one that has not failed."""
    return event.room != embedding.rival and not embedding.rival_has_slots


def another_room(embedding: Embedding, event: Event) -> bool:
    return bool(embedding.untried())


def unreferenced(embedding: Embedding, event: Event) -> bool:
    return not embedding.waiters


def add_waiter(embedding: Embedding, event: Wanted) -> None:
    embedding.waiters[event.room] = event.item


def begin(embedding: Embedding, event: Wanted) -> None:
    add_waiter(embedding, event)
    embedding.room = event.room
    embedding.tried.add(event.room)


def begin_rival(embedding: Embedding, event: RivalWanted) -> None:
    add_waiter(embedding, event)
    embedding.rival, embedding.rival_has_slots = event.room, False
    embedding.tried.add(event.room)


def note_slots(embedding: Embedding, event: LeaseGranted) -> None:
    embedding.rival_has_slots = True


def remove_waiter(embedding: Embedding, event: Unwanted) -> None:
    embedding.waiters.pop(event.room, None)


def next_room(embedding: Embedding, event: Event) -> None:
    embedding.room = embedding.untried()[0]
    embedding.tried.add(embedding.room)


def keep_rows(embedding: Embedding, event: Loaded) -> None:
    embedding.rows, embedding.slots = event.rows, event.slots


def drop_rows(embedding: Embedding, event: Event) -> None:
    embedding.rows = None


def keep_first(embedding: Embedding, event: Loaded) -> None:
    """The first one is the load; the rival is the other."""
    if event.room == embedding.rival:
        embedding.room, embedding.rival = embedding.rival, embedding.room
    keep_rows(embedding, event)


def keep_other(embedding: Embedding, event: Failed) -> None:
    if event.room != embedding.rival:
        embedding.room = embedding.rival


def keep_failure(embedding: Embedding, event: Failed) -> None:
    embedding.failure = event.failure


Failed = LoadFailed | LoadLost | LoadTimedOut | EncoderLost
_FAILED = (LoadFailed, LoadTimedOut, LoadLost, EncoderLost)
_WANTED = (Wanted, RivalWanted)
_IN_LOAD = (S.REQUESTED, S.LOADING)
_ENDED = (S.FAILED, S.EVICTED)
_AGAIN = (Do.ASK_ROOM, Do.ARM_RETRY)

# One line per row, as the table that it is.
# fmt: off
ROWS = (
    Row(S.ABSENT, _WANTED, S.REQUESTED, (Do.OPEN_TRANSFER,), begin),
    Row(S.ABSENT, IdleTimePassed, S.EVICTED),
    Row((S.REQUESTED, S.HEDGED), _WANTED, None, (), add_waiter, note="a follower of the same load (F37)"),
    Row(S.LOADING, RivalWanted, S.HEDGED, (Do.OPEN_RIVAL,), begin_rival, note="the first of two wins (F62)"),
    Row(S.LOADING, Wanted, None, (), add_waiter, note="a follower of the same load (F37)"),
    Row(S.REQUESTED, LeaseGranted, S.LOADING, (Do.ARM_LATE,)),
    Row(S.LOADING, LoadLate, None, (Do.ASK_RIVAL,), note="F62"),
    Row(S.HEDGED, LeaseGranted, None, (), note_slots),
    Row(_IN_LOAD, Unwanted, None, (Do.CANCEL_ROOM,), remove_waiter, others_wait),
    Row(S.REQUESTED, Unwanted, S.EVICTED, (Do.CANCEL_ROOM,), remove_waiter, unless(others_wait)),
    Row(S.LOADING, Unwanted, S.ABANDONED, (Do.CANCEL_TRANSFER, Do.CANCEL_ROOM), remove_waiter, unless(others_wait), "the slots stay owned (F21)"),
    Row(S.LOADING, Loaded, S.RESIDENT, (Do.KEEP_ROWS, Do.CANCEL_FOLLOWERS, Do.NOTIFY_READY), keep_rows),
    Row(S.HEDGED, Unwanted, None, (Do.CANCEL_ROOM,), remove_waiter, others_wait),
    Row(S.HEDGED, Unwanted, S.ABANDONED, (Do.CANCEL_TRANSFER, Do.CANCEL_ROOM), remove_waiter, unless(others_wait)),
    Row(S.HEDGED, Loaded, S.RESIDENT, (Do.KEEP_ROWS, Do.CANCEL_FOLLOWERS, Do.NOTIFY_READY), keep_first, note="the other one's slots come back"),
    Row(S.HEDGED, _FAILED, S.REQUESTED, (Do.END_RACE,), keep_other, other_waits),
    Row(S.HEDGED, _FAILED, S.LOADING, (Do.END_RACE,), keep_other, unless(other_waits)),
    Row(_IN_LOAD, _FAILED, S.REQUESTED, (Do.OPEN_TRANSFER,), next_room, another_room),
    Row(_IN_LOAD, (LoadFailed, LoadTimedOut), S.FAILED, (Do.NOTIFY_FAILED,), keep_failure, unless(another_room)),
    Row(S.REQUESTED, LoadLost, S.FAILED, (Do.NOTIFY_FAILED,), keep_failure, unless(another_room)),
    Row(S.LOADING, LoadLost, S.QUARANTINED, (Do.NOTIFY_FAILED,), keep_failure, unless(another_room)),
    Row(_IN_LOAD, EncoderLost, S.AWAITING_ROOM, (Do.ARM_NO_ROOM, *_AGAIN), keep_failure, unless(another_room), "its images are encoded elsewhere (F19)"),
    Row(S.AWAITING_ROOM, _WANTED, S.REQUESTED, (Do.OPEN_TRANSFER,), begin),
    Row(S.AWAITING_ROOM, Unwanted, None, (), remove_waiter, others_wait),
    Row(S.AWAITING_ROOM, Unwanted, S.EVICTED, (), remove_waiter, unless(others_wait)),
    Row(S.AWAITING_ROOM, RetryDue, None, _AGAIN, note="the question or the answer may be lost"),
    Row(S.AWAITING_ROOM, NoRoomCame, S.FAILED, (Do.NOTIFY_FAILED,)),
    Row(S.ABANDONED, _WANTED, S.LOADING, (), add_waiter, note="resurrection: the same load (F22)"),
    Row(S.ABANDONED, Loaded, S.RESIDENT, (Do.KEEP_ROWS, Do.CANCEL_FOLLOWERS), keep_rows, note="kept as cache (F21)"),
    Row(S.ABANDONED, (LoadFailed, LoadTimedOut, EncoderLost), S.FAILED, (), keep_failure),
    Row(S.ABANDONED, LoadLost, S.QUARANTINED, (), keep_failure),
    Row(S.RESIDENT, _WANTED, None, (Do.NOTIFY_ONE,), add_waiter),
    Row(S.RESIDENT, Unwanted, None, (), remove_waiter),
    Row(S.RESIDENT, (EvictionRequested, IdleTimePassed), S.EVICTED, (), drop_rows, unreferenced),
    Row(S.RESIDENT, (EvictionRequested, IdleTimePassed), None, when=unless(unreferenced), note="referenced rows stay (F23, F24)"),
    Row(S.QUARANTINED, _WANTED, S.REQUESTED, (Do.OPEN_TRANSFER,), begin, note="a new room, new slots"),
    Row(S.QUARANTINED, Unwanted, None, (), remove_waiter),
    Row(S.QUARANTINED, (SlotsReturned, IdleTimePassed), S.FAILED, note="by time it forgets the hash; the slots stay with the transfer"),
)

IGNORES = (
    Ignore(_ENDED, (Unwanted, LeaseGranted, SlotsReturned, EvictionRequested, IdleTimePassed, *_FAILED), "it has ended; the transfer owns what is still to return"),
    Ignore((S.REQUESTED, S.LOADING, S.HEDGED, S.RESIDENT, S.ABANDONED, S.AWAITING_ROOM), (SlotsReturned,), "slots of an earlier load of this hash"),
    Ignore((S.REQUESTED, S.LOADING, S.HEDGED, S.ABANDONED, S.AWAITING_ROOM), (EvictionRequested, IdleTimePassed), "nothing to evict yet"),
    Ignore((S.QUARANTINED,), (EvictionRequested, *_FAILED), "the load was given up; its slots are the transfer's"),
    Ignore((S.ABANDONED,), (Unwanted,), "the waiter has left once"),
)

TABLE = Table("EMBEDDING", __doc__ or "", S, S.ABSENT, _ENDED, ROWS, IGNORES, timers={NoRoomCame: (Do.ARM_NO_ROOM,), RetryDue: (Do.ARM_RETRY,), LoadLate: (Do.ARM_LATE,)})
# fmt: on


class Embedding(Machine):
    """Rows of one hash; `waiters` maps a room to its item, in order of arrival."""

    table = TABLE
    __slots__ = (
        "failure", "rival", "rival_has_slots", "room", "rows", "slots", "tried", "waiters",
    )  # fmt: skip

    def __init__(self, mm_hash: str, journal: Journal = NULL_JOURNAL) -> None:
        super().__init__(mm_hash, journal)
        self.waiters: dict[str, Want] = {}
        self.room = ""  # of the current load
        self.rival = ""  # of two loads, the other one
        self.rival_has_slots = False
        self.tried: set[str] = set()
        self.rows: object = None
        self.slots: tuple[int, ...] = ()
        self.failure: Failure | None = None

    @property
    def item(self) -> Want | None:
        return self.waiters.get(self.room)

    @property
    def at_rest(self) -> bool:
        """Cached: nothing is on its way."""
        return self.state is S.RESIDENT

    @property
    def loads(self) -> tuple[str, ...]:
        """The rooms whose outcome it awaits, or has."""
        return (self.room, self.rival) if self.state is S.HEDGED else (self.room,)

    def untried(self) -> list[str]:
        return [room for room in self.waiters if room not in self.tried]

    def rooms_for(self, room: str) -> list[str]:
        """A waiter's rooms, its own first."""
        further = [key for key, want in self.waiters.items() if want.stands_for == room]
        return [room, *further]

    def latest(self, want: Want) -> MediaItem:
        """Where its rows were to come from in the end."""
        return self.waiters[self.rooms_for(want.item.room)[-1]].item
