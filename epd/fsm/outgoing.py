"""OUTGOING: the producer's end of a room, which owns the source that its bytes are read from.

Theory of operation
-------------------
`epd.fsm.room` describes rooms.  Bytes without a grant are PARKED (fault F1); a grant without bytes
is GRANTED.  With both, this end waits for memory to write from, if the bytes are to be copied for
that (AWAITING_SLOTS), and is then WRITING.  With all written it keeps the source until the commit
is acknowledged (WRITTEN).  A consumer of KV is asked for room first (an offer); rows are granted
unasked.

A source may come in parts (KV, while its prompt is computed): with a grant, what is ready is
written, one write at a time (STREAMING).  Between writes this end is GRANTED again, and with all
bytes ready it is WRITING until the last one has landed.  What is ready is one number of bytes, in
the order of both owners.

A write that is under way cannot be stopped: cancelled or out of time, its source is kept until its
outcome.  If the engine has none, this end is QUARANTINED until the engine has settled: none of its
writes to that peer moves a byte any more.  The consumer gets a message of the doubt and keeps its
slots until then (faults F6 to F8).
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
from epd.messages import Grant, KvOffer
from epd.records import Address, KvState, RowContract


class Do(Effect):
    SEND_OFFER = "ask the consumer for slots"
    HOLD_PART = "own what is ready and not written, and nothing else"
    LEASE_SLOTS = "get memory that the bytes can be written from, now or in its turn"
    RELEASE_SLOTS = "leave the queue for that memory, or return it"
    START_WRITE = "write what is ready into the granted slots"
    SEND_COMMIT = "tell the consumer that every byte has landed"
    SEND_CANCEL_ACK = "tell the consumer that its slots will not be written again"
    SEND_ABORT = "tell the consumer that nothing is coming"
    SEND_DOUBT = "tell the consumer that it failed and that bytes may still land"
    REPORT_HANG = "tell the operator that a write does not end"
    RELEASE_SOURCE = "give the source's memory back"
    SETTLE_WRITE = "find out whether the own write still moves anything"
    CONCLUDE_FAILED = "tell the owner that nothing will arrive"
    CONCLUDE_DELIVERED = "tell the owner that the bytes arrived"
    ARM_RETRY = "fire RetryDue later"
    ARM_GRACE = "fire GraceEnded later"


class Own(Owned):
    SOURCE = "the source, or ready parts of it", Do.RELEASE_SOURCE
    LEASE = "a place in the queue for slots to write from", Do.RELEASE_SLOTS
    SLOTS = "the slots that its bytes were copied to, if they had to be", Do.RELEASE_SLOTS
    WRITE = "a write that may still move bytes"


_WRITE = (Own.SOURCE, Own.SLOTS, Own.WRITE)


class S(State):
    PENDING = "neither bytes nor grant"
    GRANTED = "holds a grant, waits for bytes"
    PARKED = "waits for the grant", Own.SOURCE
    AWAITING_SLOTS = "bytes and a grant; waits for slots to write from", Own.SOURCE, Own.LEASE
    STREAMING = "a write of a part is under way, more are to come", Own.SOURCE, Own.WRITE
    WRITING = "a write is under way", *_WRITE
    WRITTEN = "all has landed; kept until the commit is acknowledged", Own.SOURCE, Own.SLOTS
    CANCEL_PENDING = "cancelled, the outcome of its write is awaited", *_WRITE
    EXPIRE_PENDING = "out of time, the outcome of its write is awaited", *_WRITE
    QUARANTINED = "outcome unknown; engine or fence must tell", *_WRITE
    DELIVERED = "acknowledged"
    CANCELLED = "tombstone of a cancelled room"
    EXPIRED = "tombstone of a room out of time"
    FAILED = "tombstone of a failed room"


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a producer will deliver, for the contract check and for the offer."""

    contract: RowContract | None  # None for KV
    num_rows: int  # rows, or tokens of KV
    offer: KvOffer | None = None


@dataclass(slots=True)
class Requested(Event):
    """Somebody will make the bytes, and what they will be; a grant or a cancel may be faster."""

    owner: str
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class KvSource:
    """KV of a whole prompt.  With it the room has taken its blocks over, and nobody else has them."""

    blocks: tuple[int, ...]
    state: KvState  # what the consumer needs besides the bytes


@dataclass(slots=True)
class BytesReady(Event):
    """The producing stream has finished: the source may be read (fault F2)."""

    brings = (Own.SOURCE,)
    nbytes: int
    kv: KvSource | None = None  # None: rows


@dataclass(slots=True)
class PartReady(Event):
    """So many bytes, in the order of sending, may be read; the rest is being made."""

    nbytes: int


@dataclass(slots=True)
class GrantReceived(Event):
    grant: Grant


@dataclass(slots=True)
class SlotsLeased(Event):
    """The bytes can be written from these, or, without any, from where they are."""

    brings = (Own.SLOTS,)
    ends = (Own.LEASE,)
    slots: tuple[int, ...]


@dataclass(slots=True)
class SourceFailed(Failed):
    """The owner cannot make the bytes, or does not any more."""


@dataclass(slots=True)
class WriteSucceeded(Event):
    ends = (Own.WRITE,)
    checksum: int


@dataclass(slots=True)
class WriteRefused(Event):
    """Definite: nothing of this write lands any more."""

    ends = (Own.WRITE,)
    reason: str


@dataclass(slots=True)
class WriteOutcomeUnknown(Event):
    reason: str


@dataclass(slots=True)
class WriteSettled(Event):
    """Nothing of a write whose outcome was unknown moves any more."""

    ends = (Own.WRITE,)


@dataclass(slots=True)
class PeerFenced(Event):
    """The consumer was lost, and nothing that is left of a write reaches it any more."""

    ends = (Own.WRITE,)


@dataclass(slots=True)
class CommitAcked(Event):
    pass


@dataclass(slots=True)
class CancelReceived(Event):
    """From the consumer, or the gateway in its place, perhaps with its reason."""

    failure: Failure | None = None


# --- guards and actions ---------------------------------------------------------------------------


def contract_holds(outgoing: Outgoing, event: BytesReady | GrantReceived) -> bool:
    """Size and contract agree (fault F11); read from the grant and the source, whichever is new."""
    grant = event.grant if isinstance(event, GrantReceived) else outgoing.grant
    nbytes = event.nbytes if isinstance(event, BytesReady) else outgoing.nbytes
    manifest = outgoing.manifest
    assert grant is not None
    assert manifest is not None
    return (
        nbytes <= (grant.num_held + len(grant.slots)) * grant.slot_nbytes
        and grant.contract == manifest.contract
        and grant.num_rows == manifest.num_rows
    )


def offers(outgoing: Outgoing, event: Event) -> bool:
    """Whether the consumer must be asked first (KV)."""
    return outgoing.manifest is not None and outgoing.manifest.offer is not None


def is_news(outgoing: Outgoing, event: PartReady) -> bool:
    return event.nbytes > outgoing.written_nbytes


def more_is_ready(outgoing: Outgoing, event: WriteSucceeded) -> bool:
    return outgoing.ready_nbytes > outgoing.written_nbytes + outgoing.part_nbytes


def keep_manifest(outgoing: Outgoing, event: Requested) -> None:
    outgoing.owner, outgoing.manifest = event.owner, event.manifest


def keep_source(outgoing: Outgoing, event: BytesReady) -> None:
    outgoing.nbytes, outgoing.kv = event.nbytes, event.kv


def keep_grant(outgoing: Outgoing, event: GrantReceived) -> None:
    outgoing.grant = event.grant


def keep_slots(outgoing: Outgoing, event: SlotsLeased) -> None:
    outgoing.slots = event.slots


def keep_last_part(outgoing: Outgoing, event: BytesReady) -> None:
    """All is ready, while a part is being written."""
    keep_source(outgoing, event)
    outgoing.ready_nbytes = outgoing.sent_nbytes


def write_source(outgoing: Outgoing, event: BytesReady) -> None:
    keep_last_part(outgoing, event)
    _write_ready(outgoing)


def write_granted(outgoing: Outgoing, event: GrantReceived) -> None:
    keep_grant(outgoing, event)
    outgoing.ready_nbytes = outgoing.sent_nbytes
    _write_ready(outgoing)


def keep_part(outgoing: Outgoing, event: PartReady) -> None:
    outgoing.ready_nbytes = max(outgoing.ready_nbytes, event.nbytes)


def write_part(outgoing: Outgoing, event: PartReady) -> None:
    keep_part(outgoing, event)
    _write_ready(outgoing)


def _write_ready(outgoing: Outgoing) -> None:
    outgoing.part_nbytes = outgoing.ready_nbytes - outgoing.written_nbytes


def keep_written(outgoing: Outgoing, event: WriteSucceeded) -> None:
    outgoing.parts += ((outgoing.part_nbytes, event.checksum),)
    outgoing.written_nbytes += outgoing.part_nbytes
    outgoing.part_nbytes = 0


def write_next(outgoing: Outgoing, event: WriteSucceeded) -> None:
    keep_written(outgoing, event)
    _write_ready(outgoing)


def keep_refusal(outgoing: Outgoing, event: WriteRefused | WriteOutcomeUnknown) -> None:
    outgoing.failure = Failure(FailureKind.TRANSFER, event.reason)


def keep_broken(outgoing: Outgoing, event: BytesReady | GrantReceived) -> None:
    keep_source(outgoing, event) if isinstance(event, BytesReady) else keep_grant(outgoing, event)
    reason = (
        f"contract check failed: producer has {outgoing.manifest} of {outgoing.nbytes} bytes, "
        f"consumer granted {outgoing.grant}"
    )
    outgoing.failure = Failure(FailureKind.CONTRACT, reason)


def note_called_off(outgoing: Outgoing, event: CancelReceived) -> None:
    reason = f"instance {outgoing.peer.instance_id} does not want it any more"
    outgoing.failure = event.failure or Failure(FailureKind.TRANSFER, reason)


# --- the table ------------------------------------------------------------------------------------

# One line per row, as the table that it is.
# fmt: off
_TOMBSTONES = (S.CANCELLED, S.EXPIRED, S.FAILED)
_ENDED = (S.DELIVERED, *_TOMBSTONES)
_UNWRITTEN = (S.PENDING, S.GRANTED, S.PARKED, S.AWAITING_SLOTS)
_UNDER_WAY = (S.STREAMING, S.WRITING)
_PENDING_OUTCOME = (S.CANCEL_PENDING, S.EXPIRE_PENDING)
_FAIL = (Do.SEND_ABORT, Do.CONCLUDE_FAILED)
_CALLED_OFF = (Do.SEND_CANCEL_ACK, Do.CONCLUDE_FAILED)

ROWS = (
    # Nothing yet.
    Row((S.PENDING, S.GRANTED), Requested, None, (), keep_manifest, note="of GRANTED, the grant was faster (F1)"),
    Row(S.PENDING, BytesReady, S.PARKED, (), keep_source, note="bytes before grant (F1)"),
    Row(S.PENDING, GrantReceived, S.GRANTED, (), keep_grant, note="grant before bytes"),
    # No write is under way: time, loss and either end's will end it at once.
    Row((*_UNWRITTEN, S.WRITTEN), CancelReceived, S.CANCELLED, _CALLED_OFF, note_called_off, note="also before the grant (F42)"),
    Row(_UNWRITTEN, SourceFailed, S.FAILED, (Do.SEND_ABORT,), keep_failure),
    Row((*_UNWRITTEN, S.WRITTEN), PeerLost, S.FAILED, (Do.CONCLUDE_FAILED,), note_lost),
    Row(_UNWRITTEN, DeadlinePassed, S.EXPIRED, _FAIL, note_late, note="the reaper of F1"),
    # A grant, and no bytes.
    Row(S.GRANTED, PartReady, S.STREAMING, (Do.HOLD_PART, Do.START_WRITE), write_part, is_news, "KV of a prompt that is being computed"),
    Row(S.GRANTED, PartReady, None, when=unless(is_news)),
    Row(S.GRANTED, BytesReady, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,), write_source, contract_holds),
    Row(S.GRANTED, BytesReady, S.FAILED, _FAIL, keep_broken, unless(contract_holds), note="contract drift (F11)"),
    # Bytes, and no grant.
    Row(S.PARKED, GrantReceived, S.AWAITING_SLOTS, (Do.LEASE_SLOTS,), write_granted, contract_holds),
    Row(S.PARKED, GrantReceived, S.FAILED, _FAIL, keep_broken, unless(contract_holds), note="contract drift (F11)"),
    # Both, and nothing is written yet.
    Row(S.AWAITING_SLOTS, SlotsLeased, S.WRITING, (Do.START_WRITE,), keep_slots),
    # No grant comes: the offer is said again; whose peer answers nothing gives up, and is tried
    # elsewhere (F48).
    Row((S.PENDING, S.PARKED), RetryDue, None, (Do.SEND_OFFER, Do.ARM_RETRY), when=offers, note="the offer may be lost"),
    Row((S.PENDING, S.PARKED), RetryDue, None, when=unless(offers)),
    Row((S.PENDING, S.PARKED), PeerSilent, S.FAILED, _FAIL, note_silent, offers),
    Row((S.PENDING, S.PARKED), PeerSilent, None, when=unless(offers)),
    # A write is under way.
    Row(S.STREAMING, PartReady, None, (Do.HOLD_PART,), keep_part, is_news),
    Row(S.STREAMING, PartReady, None, when=unless(is_news)),
    Row(S.STREAMING, BytesReady, S.WRITING, (), keep_last_part, contract_holds, "the end goes when the part has landed"),
    Row(S.STREAMING, BytesReady, S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,), keep_broken, unless(contract_holds), note="contract drift (F11)"),
    Row(S.STREAMING, WriteSucceeded, None, (Do.HOLD_PART, Do.START_WRITE), write_next, more_is_ready),
    Row(S.STREAMING, WriteSucceeded, S.GRANTED, (), keep_written, unless(more_is_ready), "what has landed need not be kept"),
    Row(S.WRITING, WriteSucceeded, None, (Do.START_WRITE,), write_next, more_is_ready, "that was a part"),
    Row(S.WRITING, WriteSucceeded, S.WRITTEN, (Do.SEND_COMMIT, Do.ARM_RETRY), keep_written, unless(more_is_ready)),
    Row(_UNDER_WAY, WriteRefused, S.FAILED, _FAIL, keep_refusal),
    Row(_UNDER_WAY, WriteOutcomeUnknown, S.QUARANTINED, (Do.CONCLUDE_FAILED, Do.SEND_DOUBT, Do.SETTLE_WRITE), keep_refusal, note="the source may still be read (F8)"),
    Row(_UNDER_WAY, SourceFailed, S.CANCEL_PENDING, (), keep_failure, note="the owner withdrew it"),
    Row(_UNDER_WAY, CancelReceived, S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,), note_called_off),
    Row(_UNDER_WAY, PeerLost, S.CANCEL_PENDING, (Do.CONCLUDE_FAILED,), note_lost),
    Row(_UNDER_WAY, DeadlinePassed, S.EXPIRE_PENDING, (Do.CONCLUDE_FAILED, Do.ARM_GRACE), note_late),
    # Its outcome is awaited.
    Row(S.CANCEL_PENDING, (WriteSucceeded, WriteRefused), S.CANCELLED, (Do.SEND_CANCEL_ACK,)),
    Row(S.EXPIRE_PENDING, (WriteSucceeded, WriteRefused), S.EXPIRED, (Do.SEND_CANCEL_ACK,)),
    Row(_PENDING_OUTCOME, WriteOutcomeUnknown, S.QUARANTINED, (Do.SETTLE_WRITE,)),
    Row(S.CANCEL_PENDING, DeadlinePassed, S.EXPIRE_PENDING, (Do.ARM_GRACE,)),
    Row(S.EXPIRE_PENDING, GraceEnded, None, (Do.REPORT_HANG, Do.ARM_GRACE), note="the operator is told"),
    Row((*_PENDING_OUTCOME, S.QUARANTINED), BytesReady, None, (), keep_source, note="the end of a source whose part is in doubt: released with it"),
    # Outcome unknown: only the own engine's message or a fence frees the source.
    Row(S.QUARANTINED, WriteSettled, S.FAILED, (Do.SEND_ABORT,), note="the writer's last message"),
    Row(S.QUARANTINED, PeerFenced, S.FAILED),
    Row(S.QUARANTINED, GrantReceived, None, (Do.SEND_DOUBT,), note="the doubt was lost"),
    Row(S.QUARANTINED, RetryDue, None, (Do.SETTLE_WRITE,)),
    # All has landed.
    Row(S.WRITTEN, CommitAcked, S.DELIVERED, (Do.CONCLUDE_DELIVERED,)),
    Row(S.WRITTEN, RetryDue, None, (Do.SEND_COMMIT, Do.ARM_RETRY)),
    Row(S.WRITTEN, GrantReceived, None, (Do.SEND_COMMIT,), note="the commit was lost"),
    Row(S.WRITTEN, DeadlinePassed, S.EXPIRED, (Do.CONCLUDE_FAILED,), note_late),
    # Ended: answer late messages, hand back late bytes and slots.
    Row(_ENDED, CancelReceived, None, (Do.SEND_CANCEL_ACK,)),
    Row(_TOMBSTONES, GrantReceived, None, (Do.SEND_ABORT,), note="cancel wins (F42)"),
    Row(_TOMBSTONES, Requested, None, (), keep_manifest, note="the cancel was faster (F42)"),
    Row(_TOMBSTONES, BytesReady, None, (), keep_source),
    Row(_TOMBSTONES, SlotsLeased, None, (), keep_slots),
)

IGNORES = (
    Ignore((S.PARKED, S.AWAITING_SLOTS, *_UNDER_WAY, S.WRITTEN, *_PENDING_OUTCOME, S.QUARANTINED, S.DELIVERED), (Requested,), "the request was repeated"),
    Ignore((S.PENDING,), (PartReady,), "there is no room for it yet; it is said again when there is"),
    Ignore((S.GRANTED, S.AWAITING_SLOTS, *_UNDER_WAY, S.DELIVERED), (GrantReceived,), "a repeated grant"),
    Ignore((S.GRANTED, S.AWAITING_SLOTS, *_UNDER_WAY, S.WRITTEN), (PeerSilent,), "the consumer gives up, if it never hears of the bytes"),
    Ignore((*_UNWRITTEN, *_UNDER_WAY), (CommitAcked,), "an answer to nothing this end has said"),
    Ignore((S.PARKED, S.AWAITING_SLOTS, S.WRITING, S.WRITTEN), (PartReady,), "all of it is ready"),
    Ignore((S.WRITTEN,), (SourceFailed,), "the bytes are there: too late to withdraw"),
    Ignore((*_PENDING_OUTCOME, S.QUARANTINED), (CancelReceived,), "it is being cancelled already, and cancel wins (F42)"),
    Ignore(_PENDING_OUTCOME, (GrantReceived,), "it is being cancelled already, and cancel wins (F42)"),
    Ignore((*_PENDING_OUTCOME, S.QUARANTINED), (CommitAcked, SourceFailed, PeerLost, PeerSilent), "its write decides, whatever is said meanwhile"),
    Ignore((*_PENDING_OUTCOME, S.QUARANTINED, *_ENDED), (PartReady,), "nothing more is sent"),
    Ignore(_ENDED, (SourceFailed, WriteSettled, CommitAcked, PeerLost, PeerSilent, PeerFenced), "it has ended; a late answer or notice has nothing left to change"),
)

TABLE = Table(
    "OUTGOING",
    __doc__ or "",
    S,
    S.PENDING,
    _ENDED,
    ROWS,
    IGNORES,
    held={
        S.EXPIRE_PENDING: "the own engine still reads the source: its outcome decides (F8)",
        S.QUARANTINED: "only the writer's end or a fence may free memory (F7, F8)",
    },
    timers={
        DeadlinePassed: (),
        RetryDue: (Do.ARM_RETRY, Do.SETTLE_WRITE),
        GraceEnded: (Do.ARM_GRACE,),
    },
)
# fmt: on


class Outgoing(Room):
    """The producer's end of a room."""

    __slots__ = (
        "grant",
        "kv",
        "manifest",
        "nbytes",
        "part_nbytes",
        "parts",
        "ready_nbytes",
        "slots",
        "written_nbytes",
    )
    table = TABLE

    def __init__(self, room: str, attempt: int, peer: Address, journal: Journal) -> None:
        super().__init__(room, attempt, peer, "", journal)
        self.manifest: Manifest | None = None  # the grant may be faster than the request
        self.grant: Grant | None = None
        self.slots: tuple[int, ...] = ()  # that it is written from
        self.nbytes = 0
        self.kv: KvSource | None = None  # with all of its bytes
        self.ready_nbytes = 0  # of what is sent, in that order: may be read,
        self.part_nbytes = 0  # is being written,
        self.written_nbytes = 0  # has landed
        self.parts: tuple[tuple[int, int], ...] = ()  # bytes and checksum of each write

    @property
    def egress_nbytes(self) -> int:
        """What left for the consumer: of rows that each rank of a group has, once for each."""
        assert self.grant is not None
        is_whole = self.grant.contract is not None and not self.grant.is_sharded
        return self.sent_nbytes * (1 + len(self.grant.parts) if is_whole else 1)

    @property
    def sent_nbytes(self) -> int:
        """Of the source: what the consumer does not hold already."""
        assert self.grant is not None
        return self.nbytes - self.grant.num_held * self.grant.slot_nbytes
