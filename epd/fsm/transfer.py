"""TRANSFER: one room of the data plane, seen from either end; E to P (rows) and P to D (KV).

Theory of operation
-------------------
A room joins two independent facts: the *consumer* leased slots for it (a grant), and the *producer*
has the bytes.  Either may come first.  Bytes without a grant are PARKED (fault F1); a grant without
bytes is RESERVED; with both, the producer is WRITING.  The last write is followed by a commit, which the
consumer acknowledges; grants, commits and cancels are repeated until answered, so the bus may lose
any of them.

A source may come in parts (KV, while its prompt is computed): a producer that holds a grant writes
what is ready, one write at a time, and is STREAMING meanwhile; between writes it is RESERVED again,
and with all bytes ready it is WRITING until the last one has landed.  What is ready is one number of
bytes in an order that both owners know, so a consumer learns of parts only from the commit.

Both ends run this table, each with its own machine and its own memory: the producer owns the
*source* (rows in its cache, KV blocks), the consumer owns the *slots*.  What cannot be interrupted
is a write.  Cancelling is therefore a state: CANCEL_PENDING and EXPIRE_PENDING still own the memory
and wait for the outcome: the writer's result at the producer, the writer's word (CancelAck, a late
Commit, an abort) at the consumer.  If that word does not come, the transfer is QUARANTINED.  A
producer whose engine does not know the outcome stays there until the engine has settled: none of its
writes to that peer moves a byte any more; it says so to the consumer, which was told of the doubt and
keeps its slots until then.  A consumer whose peer was lost stays until that is fenced: known to be
unable to touch the memory any more.  A timer moves a transfer towards quarantine but never frees
memory (faults F6 to F8).

Terminal states other than RELEASED are tombstones: they stay for a bounded time and answer late
messages, so that a grant which follows its own cancel cannot revive the room (fault F42).

Sources: Mooncake connector of vLLM (transfer id and reservation id, tombstones); TokenSpeed #437.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from epd.fsm.kernel import (
    NULL_JOURNAL,
    Effect,
    Event,
    Journal,
    Machine,
    State,
)


class Side(Enum):
    PRODUCER = "producer"
    CONSUMER = "consumer"

    __hash__ = object.__hash__  # see State


class S(State):
    PENDING = "nothing yet: the consumer waits for slots, the producer for bytes and grant"
    RESERVED = "consumer: slots leased, grant sent; producer: holds a grant, waits for the bytes"
    PARKED = "producer: owns the source, waits for the grant"
    STREAMING = "producer: owns parts of the source, a write of one is under way, more are to come"
    WRITING = "producer: owns the source, a write is under way"
    COMPLETE = "producer: source kept until the commit is acknowledged; consumer: being published"
    CANCEL_PENDING = "memory still owned: cancelled, the outcome is awaited"
    EXPIRE_PENDING = "memory still owned: out of time, the outcome is awaited"
    QUARANTINED = "memory still owned: outcome unknown; the writer's end or a fence is awaited"
    RELEASED = "delivered; the consumer's slots belong to what was published"
    CANCELLED = "tombstone of a cancelled room; owns nothing"
    EXPIRED = "tombstone of a room out of time; owns nothing"
    FAILED = "tombstone of a failed room; owns nothing"


class Do(Effect):
    SEND_OFFER = "ask the consumer for slots"
    SEND_GRANT = "tell the producer where to write"
    HOLD_PART = "own what is ready and not written, and nothing else"
    START_WRITE = "write what is ready into the granted slots"
    SEND_COMMIT = "tell the consumer that every byte has landed"
    SEND_COMMIT_ACK = "tell the producer that the commit arrived"
    SEND_CANCEL = "ask the producer to stop"
    SEND_CANCEL_ACK = "tell the consumer that its slots will not be written again"
    SEND_ABORT = "tell the consumer that nothing is coming"
    SEND_DOUBT = "tell the consumer that it failed and that bytes may still land"
    PUBLISH = "make the landed bytes visible to their owner"
    RELEASE_SOURCE = "give the source's memory back"
    RELEASE_SLOTS = "return the slots to the pool"
    WITHDRAW_LEASE = "leave the queue for slots"
    SETTLE_WRITE = "find out whether the own write still moves anything"
    START_FENCE = "find out whether the other side, if it was lost, can still touch the memory"
    CONCLUDE_FAILED = "tell the owner that nothing will arrive"
    CONCLUDE_DELIVERED = "tell the owner that the bytes arrived"
    ARM_RETRY = "fire RetryDue later"
    ARM_GRACE = "fire GraceEnded later"


# --- events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class SlotsLeased(Event):
    slots: tuple[int, ...]


@dataclass(slots=True)
class BytesReady(Event):
    """The producing stream has finished: the source may be read (fault F2)."""

    source: Any
    nbytes: int


@dataclass(slots=True)
class PartReady(Event):
    """So many bytes, in the order of sending, may be read; the rest is being made."""

    nbytes: int


@dataclass(slots=True)
class GrantReceived(Event):
    grant: Any


@dataclass(slots=True)
class SourceFailed(Event):
    kind: str
    reason: str
    retryable: bool


@dataclass(slots=True)
class WriteSucceeded(Event):
    checksum: int


@dataclass(slots=True)
class WriteRefused(Event):
    """Definite: nothing of this write lands any more."""

    reason: str


@dataclass(slots=True)
class WriteOutcomeUnknown(Event):
    reason: str


@dataclass(slots=True)
class WriteSettled(Event):
    """Nothing of a write whose outcome was unknown moves any more."""


@dataclass(slots=True)
class CommitReceived(Event):
    nbytes: int
    parts: Any  # of each write: bytes and checksum
    kv: Any = None


@dataclass(slots=True)
class CommitAcked(Event):
    pass


@dataclass(slots=True)
class Published(Event):
    """What landed is visible and its owner has taken over the slots."""


@dataclass(slots=True)
class PublishFailed(Event):
    reason: str


@dataclass(slots=True)
class CancelRequested(Event):
    """The consumer's owner does not want it any more."""


@dataclass(slots=True)
class CancelReceived(Event):
    """The consumer, or the gateway in its place, told this producer to stop."""

    failure: tuple[str, str, bool] | None = None


@dataclass(slots=True)
class CancelAcked(Event):
    pass


@dataclass(slots=True)
class AbortReceived(Event):
    kind: str
    reason: str
    retryable: bool


@dataclass(slots=True)
class DoubtReceived(Event):
    """The producer failed, and its bytes may still land."""

    kind: str
    reason: str
    retryable: bool


@dataclass(slots=True)
class PeerLost(Event):
    """The gateway declared the other end's epoch lost; it may still be alive and writing."""

    by_time = True


@dataclass(slots=True)
class PeerSilent(Event):
    """The other end does not answer, for long (LINK); it may be alive and write."""

    by_time = True


@dataclass(slots=True)
class PeerFenced(Event):
    """The other end can never touch this memory again."""


@dataclass(slots=True)
class DeadlinePassed(Event):
    by_time = True


@dataclass(slots=True)
class GraceEnded(Event):
    """A pending outcome did not arrive in time."""

    by_time = True


@dataclass(slots=True)
class RetryDue(Event):
    """Also the exit by time of QUARANTINED: it is asked again until the end is certain."""

    by_time = True


# --- the machine ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a producer will deliver, for the contract check and for the offer."""

    contract: Any  # RowContract, or None for KV
    num_rows: int  # rows, or tokens of KV
    offers: bool = False
    offer: Any = None  # KvOffer


class Transfer(Machine):
    """One end of a room."""

    __slots__ = (
        "attempt",
        "failure",
        "grant",
        "kv",
        "meta",
        "nbytes",
        "owner",
        "part_nbytes",
        "parts",
        "peer",
        "ready_nbytes",
        "side",
        "slots",
        "source",
        "written_nbytes",
    )

    def __init__(
        self,
        room: str,
        side: Side,
        attempt: int,
        peer: Any,
        owner: str,
        journal: Journal = NULL_JOURNAL,
    ) -> None:
        super().__init__(room, journal)
        self.side = side
        self.attempt = attempt
        self.peer = peer  # Address of the other end
        self.owner = owner  # key of the machine that wants or makes the bytes
        self.slots: tuple[int, ...] = ()
        self.source: Any = None
        self.grant: Any = None
        self.nbytes = 0
        self.ready_nbytes = 0  # producer: of what is sent, in that order: may be read,
        self.part_nbytes = 0  # is being written,
        self.written_nbytes = 0  # has landed
        self.parts: tuple[tuple[int, int], ...] = ()  # bytes and checksum of each write
        self.kv: Any = None
        self.meta: Any = None  # what the role needs to build the grant or the commit
        self.failure = ("", "", True)  # kind, reason, retryable

    @property
    def sent_nbytes(self) -> int:
        """Of a producer's source: what the consumer does not hold already."""
        return self.nbytes - int(self.grant.num_held) * int(self.grant.region.slot_nbytes)


# --- guards ---------------------------------------------------------------------------------------


def is_consumer(transfer: Transfer, event: Event) -> bool:
    return transfer.side is Side.CONSUMER


def contract_holds(transfer: Transfer, event: Event) -> bool:
    """Size and contract agree (fault F11); read from the grant and the source, whichever is new."""
    grant = event.grant if isinstance(event, GrantReceived) else transfer.grant
    nbytes = event.nbytes if isinstance(event, BytesReady) else transfer.nbytes
    contract = transfer.meta
    return bool(
        nbytes <= (grant.num_held + len(grant.slots)) * grant.region.slot_nbytes
        and grant.contract == contract.contract
        and grant.num_rows == contract.num_rows
    )


def offers(transfer: Transfer, event: Event) -> bool:
    """A producer whose consumer must be asked first (KV); rows are granted unasked."""
    return transfer.side is Side.PRODUCER and transfer.meta is not None and transfer.meta.offers


def length_matches(transfer: Transfer, event: CommitReceived) -> bool:
    return event.nbytes == transfer.nbytes


# --- actions --------------------------------------------------------------------------------------


def keep_slots(transfer: Transfer, event: SlotsLeased) -> None:
    transfer.slots = event.slots


def keep_source(transfer: Transfer, event: BytesReady) -> None:
    transfer.source, transfer.nbytes = event.source, event.nbytes


def keep_grant(transfer: Transfer, event: GrantReceived) -> None:
    transfer.grant = event.grant


def keep_commit(transfer: Transfer, event: CommitReceived) -> None:
    transfer.parts, transfer.kv = event.parts, event.kv
