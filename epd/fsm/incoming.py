"""INCOMING: the consumer's end of a room, which owns the slots that its bytes land in.

Theory of operation
-------------------
`epd.fsm.room` describes rooms.  This end waits for slots (PENDING), grants them to the producer and
waits for its commit (RESERVED).  What has landed is checked and made visible (PUBLISHING); then the
slots belong to what was published.  Only the commit lists the parts.  KV ends in blocks: those are
waited for first, and where producers cannot write them, then slots in front of them are
(AWAITING_LANDING).

Granted slots return by a message of the writer that it will not touch them again, or by a fence. A
producer with an unknown outcome reports its doubt; or it is lost, or does not answer.  Each leaves
the slots QUARANTINED, sooner or later, until that message comes after all, or a fence (faults F6 to
F8).
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Effect, Event, Ignore, Journal, Owned, Row, State, Table, unless
from epd.fsm.room import (
    DeadlinePassed,
    Failed,
    GraceEnded,
    PeerLost,
    PeerSilent,
    RetryDue,
    Room,
    keep_failure,
    note_late,
    note_lost,
    note_silent,
)
from epd.records import Address, KvState


class Do(Effect):
    SEND_GRANT = "tell the producer where to write, once a registry has told of it"
    SEND_COMMIT_ACK = "tell the producer that the commit arrived"
    SEND_CANCEL = "ask the producer to stop"
    AWAIT_LANDING = "get memory that the bytes of its blocks can land in, now or in its turn"
    PUBLISH = "check the landed bytes, and make them visible to their owner"
    REPORT_HANG = "tell the operator that publishing does not end"
    RELEASE_SLOTS = "return what was leased for it"
    WITHDRAW_LEASE = "leave the queue for that"
    START_FENCE = "find out whether the producer, if it was lost, can still touch the memory"
    CONCLUDE_FAILED = "tell the owner that nothing will arrive"
    CONCLUDE_DELIVERED = "tell the owner that the bytes arrived"
    ARM_RETRY = "fire RetryDue later"
    ARM_GRACE = "fire GraceEnded later"


class Own(Owned):
    LEASE = "a place in the queue for blocks, or for slots", Do.WITHDRAW_LEASE
    BLOCKS = "blocks that cannot be written by others", Do.RELEASE_SLOTS
    SLOTS = "the slots that were leased, with what blocks they are for", Do.RELEASE_SLOTS
    GRANT = "a grant that the producer may write by"


class S(State):
    PENDING = "waits for slots, or for blocks", Own.LEASE
    AWAITING_LANDING = "has blocks; waits for slots to land in", Own.LEASE, Own.BLOCKS
    RESERVED = "slots leased, grant sent: the bytes are awaited", Own.SLOTS, Own.GRANT
    PUBLISHING = "the bytes are in the slots, and are checked and made visible", Own.SLOTS
    CANCEL_PENDING = "cancelled, the writer's message is awaited", Own.SLOTS, Own.GRANT
    EXPIRE_PENDING = "out of time, the writer's message is awaited", Own.SLOTS, Own.GRANT
    QUARANTINED = "outcome unknown; the writer's end or a fence must tell", Own.SLOTS, Own.GRANT
    DELIVERED = "the slots belong to what was published"
    CANCELLED = "tombstone of a cancelled room"
    EXPIRED = "tombstone of a room out of time"
    FAILED = "tombstone of a failed room"


# --- events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class BlocksLeased(Event):
    """`num_held`: of the first ones the contents are here already, or, with a window, of those in
    the places `held`.  `ahead`: its own, for later places of its table."""

    brings = (Own.BLOCKS,)
    blocks: tuple[int, ...]
    num_held: int
    held: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()


@dataclass(slots=True)
class SlotsLeased(Event):
    """`nbytes`: to be written into them."""

    brings = (Own.SLOTS,)
    ends = (Own.LEASE, Own.BLOCKS)
    slots: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class CommitReceived(Event):
    ends = (Own.GRANT,)
    nbytes: int
    parts: tuple[tuple[int, int], ...]  # of each write: bytes and checksum
    kv: KvState | None = None


@dataclass(slots=True)
class Published(Event):
    """What landed is visible and its owner has taken over the slots."""

    ends = (Own.SLOTS,)


@dataclass(slots=True)
class PublishFailed(Event):
    reason: str


@dataclass(slots=True)
class CancelRequested(Event):
    """By the owner, for which it has no use any more."""


@dataclass(slots=True)
class CancelAcked(Event):
    """The producer will never write into the slots again."""

    ends = (Own.GRANT,)


@dataclass(slots=True)
class AbortReceived(Failed):
    """The producer failed: nothing is written, nor will be."""

    ends = (Own.GRANT,)


@dataclass(slots=True)
class DoubtReceived(Failed):
    """The producer failed, and its bytes may still land."""


@dataclass(slots=True)
class PeerFenced(Event):
    """The producer was lost, and can never touch the slots again."""

    ends = (Own.GRANT,)


# --- guards and actions ---------------------------------------------------------------------------


def length_matches(incoming: Incoming, event: CommitReceived) -> bool:
    return event.nbytes == incoming.nbytes


def keep_blocks(incoming: Incoming, event: BlocksLeased) -> None:
    incoming.blocks, incoming.ahead = event.blocks, event.ahead
    incoming.num_held, incoming.held_places = event.num_held, event.held


def keep_slots(incoming: Incoming, event: SlotsLeased) -> None:
    incoming.slots, incoming.nbytes = event.slots, event.nbytes


def keep_late_slots(incoming: Incoming, event: SlotsLeased) -> None:
    incoming.slots, incoming.blocks, incoming.ahead = event.slots, (), ()


def keep_late_blocks(incoming: Incoming, event: BlocksLeased) -> None:
    incoming.slots, incoming.blocks, incoming.ahead = (), event.blocks, event.ahead


def keep_commit(incoming: Incoming, event: CommitReceived) -> None:
    incoming.parts, incoming.kv = event.parts, event.kv


def note_cancelled(incoming: Incoming, event: Event) -> None:
    incoming.failure = Failure(FailureKind.CANCELLED, "it is not wanted any more")


def note_called_off(incoming: Incoming, event: Event) -> None:
    reason = f"instance {incoming.peer.instance_id} was called off"
    incoming.failure = Failure(FailureKind.TRANSFER, reason)


def note_short_commit(incoming: Incoming, event: CommitReceived) -> None:
    reason = f"committed {event.nbytes} bytes where {incoming.nbytes} were granted"
    incoming.failure = Failure(FailureKind.CONTRACT, reason)


def note_bad_bytes(incoming: Incoming, event: PublishFailed) -> None:
    incoming.failure = Failure(FailureKind.TRANSFER, event.reason)


# --- the table ------------------------------------------------------------------------------------

# One line per row, as the table that it is.
# fmt: off
_UNGRANTED = (S.PENDING, S.AWAITING_LANDING)
_TOMBSTONES = (S.CANCELLED, S.EXPIRED, S.FAILED)
_ENDED = (S.DELIVERED, *_TOMBSTONES)
_PENDING_OUTCOME = (S.CANCEL_PENDING, S.EXPIRE_PENDING)
_CALLED_OFF = (Do.SEND_CANCEL, Do.CONCLUDE_FAILED)
_OUT_OF_TIME = (Do.CONCLUDE_FAILED, Do.SEND_CANCEL, Do.ARM_RETRY, Do.ARM_GRACE)

ROWS = (
    # No slots yet.
    Row(S.PENDING, BlocksLeased, S.AWAITING_LANDING, (Do.AWAIT_LANDING,), keep_blocks),
    Row(_UNGRANTED, SlotsLeased, S.RESERVED, (Do.SEND_GRANT, Do.ARM_RETRY), keep_slots),
    Row(_UNGRANTED, CancelRequested, S.CANCELLED, _CALLED_OFF, note_cancelled),
    Row((*_UNGRANTED, S.RESERVED), AbortReceived, S.FAILED, (Do.CONCLUDE_FAILED,), keep_failure),
    Row(_UNGRANTED, PeerLost, S.FAILED, (Do.CONCLUDE_FAILED,), note_lost),
    Row(_UNGRANTED, DeadlinePassed, S.EXPIRED, _CALLED_OFF, note_late),
    # Granted.
    Row(S.RESERVED, CommitReceived, S.PUBLISHING, (Do.SEND_COMMIT_ACK, Do.PUBLISH), keep_commit, length_matches),
    Row(S.RESERVED, CommitReceived, S.FAILED, (Do.SEND_COMMIT_ACK, Do.CONCLUDE_FAILED), note_short_commit, unless(length_matches), "the writer is done: the slots are free (F11)"),
    Row(S.RESERVED, CancelAcked, S.FAILED, (Do.CONCLUDE_FAILED,), note_called_off, note="the gateway has called off the producer"),
    Row(S.RESERVED, DoubtReceived, S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.ARM_RETRY), keep_failure, note="the slots wait for the writer's last message (F8)"),
    Row(S.RESERVED, CancelRequested, S.CANCEL_PENDING, (Do.SEND_CANCEL, Do.ARM_RETRY), note_cancelled),
    Row(S.RESERVED, RetryDue, None, (Do.SEND_GRANT, Do.ARM_RETRY), note="the grant may be lost"),
    Row(S.RESERVED, PeerLost, S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.START_FENCE), note_lost, note="lost is not dead: it may still write (F7)"),
    Row(S.RESERVED, DeadlinePassed, S.EXPIRE_PENDING, _OUT_OF_TIME, note_late),
    Row(S.RESERVED, PeerSilent, S.EXPIRE_PENDING, _OUT_OF_TIME, note_silent, note="given up, and tried elsewhere (F48); the slots wait for the writer's message (F7)"),
    # The writer's message is awaited.
    Row(S.CANCEL_PENDING, (CancelAcked, AbortReceived), S.CANCELLED, (Do.CONCLUDE_FAILED,)),
    Row(S.CANCEL_PENDING, CommitReceived, S.CANCELLED, (Do.SEND_COMMIT_ACK, Do.CONCLUDE_FAILED), note="the write was faster; it is over"),
    Row(S.CANCEL_PENDING, PeerLost, S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.START_FENCE), note_lost),
    Row(S.CANCEL_PENDING, DeadlinePassed, S.EXPIRE_PENDING, (Do.CONCLUDE_FAILED, Do.ARM_GRACE)),
    Row(S.EXPIRE_PENDING, (CancelAcked, AbortReceived), S.EXPIRED),
    Row(S.EXPIRE_PENDING, CommitReceived, S.EXPIRED, (Do.SEND_COMMIT_ACK,)),
    Row(S.EXPIRE_PENDING, (PeerLost, GraceEnded), S.QUARANTINED, (Do.START_FENCE,), note="time moves it here, and frees nothing (F7)"),
    Row(_PENDING_OUTCOME, RetryDue, None, (Do.SEND_CANCEL, Do.ARM_RETRY)),
    # Outcome unknown: only a message of the writer or a fence frees the slots.
    Row(S.QUARANTINED, (CancelAcked, AbortReceived, PeerFenced), S.FAILED),
    Row(S.QUARANTINED, CommitReceived, S.FAILED, (Do.SEND_COMMIT_ACK,)),
    Row(S.QUARANTINED, RetryDue, None, (Do.SEND_CANCEL, Do.START_FENCE)),
    # The bytes are here.
    Row(S.PUBLISHING, Published, S.DELIVERED, (Do.CONCLUDE_DELIVERED,)),
    Row(S.PUBLISHING, PublishFailed, S.FAILED, (Do.CONCLUDE_FAILED,), note_bad_bytes, note="wrong checksum"),
    Row(S.PUBLISHING, CommitReceived, None, (Do.SEND_COMMIT_ACK,), note="the ack was lost"),
    Row(S.PUBLISHING, DeadlinePassed, None, (Do.ARM_GRACE,), note="its outcome decides"),
    Row(S.PUBLISHING, GraceEnded, None, (Do.REPORT_HANG, Do.ARM_GRACE), note="its outcome decides; the operator is told"),
    # Ended: answer late messages, hand back late slots.
    Row(_ENDED, CommitReceived, None, (Do.SEND_COMMIT_ACK,)),
    Row(_TOMBSTONES, SlotsLeased, None, (), keep_late_slots, note="what it had before was returned"),
    Row(_TOMBSTONES, BlocksLeased, None, (), keep_late_blocks),
)

IGNORES = (
    Ignore(_UNGRANTED, (CancelAcked, CommitReceived, DoubtReceived), "nothing was granted: stray messages move nothing"),
    Ignore(_UNGRANTED, (PeerSilent,), "it waits for slots of its own side"),
    Ignore((*_PENDING_OUTCOME, S.QUARANTINED), (CancelRequested, DoubtReceived, PeerSilent), "it is being ended already: the writer's message is awaited"),
    Ignore((S.QUARANTINED,), (PeerLost,), "it is lost or not: only a fence tells more (F7)"),
    Ignore((S.PUBLISHING,), (CancelRequested,), "what has landed is published; its owner decides what to do with it"),
    Ignore((S.PUBLISHING,), (CancelAcked, AbortReceived, DoubtReceived), "an answer that the commit overtook"),
    Ignore((S.PUBLISHING,), (PeerLost, PeerSilent), "the bytes are here: nothing more is wanted of the peer"),
    Ignore(_ENDED, (CancelRequested, CancelAcked, AbortReceived, DoubtReceived, PeerLost, PeerSilent, PeerFenced), "it has ended; a late answer or notice has nothing left to change"),
)

TABLE = Table(
    "INCOMING",
    __doc__ or "",
    S,
    S.PENDING,
    _ENDED,
    ROWS,
    IGNORES,
    held={
        S.PUBLISHING: "bounded work of this process on bytes that are here: its outcome decides",
        S.QUARANTINED: "only the writer's end or a fence may free memory (F7, F8)",
    },
    timers={
        DeadlinePassed: (),
        RetryDue: (Do.ARM_RETRY, Do.START_FENCE),
        GraceEnded: (Do.ARM_GRACE,),
    },
)
# fmt: on


class Incoming(Room):
    """The consumer's end of a room."""

    __slots__ = (
        "ahead", "blocks", "deadline_s", "gateway", "held_places", "kv", "nbytes", "num_held", "num_rows",
        "parts", "slots",
    )  # fmt: skip
    table = TABLE

    def __init__(
        self,
        room: str,
        attempt: int,
        peer: Address,
        owner: str,
        num_rows: int,
        deadline_s: float,
        gateway: str,
        journal: Journal,
    ) -> None:
        super().__init__(room, attempt, peer, owner, journal)
        self.num_rows = num_rows  # wanted: rows, or tokens of KV
        self.deadline_s = deadline_s
        self.gateway = gateway  # in whose time that is
        self.blocks: tuple[int, ...] = ()  # of KV
        self.ahead: tuple[int, ...] = ()  # for places behind them
        self.num_held = 0  # of them, filled already
        self.held_places: tuple[int, ...] = ()  # their places, if not the first
        self.slots: tuple[int, ...] = ()
        self.nbytes = 0
        self.parts: tuple[tuple[int, int], ...] = ()  # of each write: bytes and checksum
        self.kv: KvState | None = None
