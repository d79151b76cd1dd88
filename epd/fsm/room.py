"""A room of the data plane, as both of its ends see it; E to P (rows) and P to D (KV).

Theory of operation
-------------------
A room joins two independent facts: the *consumer* leased slots for it (a grant), and the *producer*
has the bytes.  Either may come first.  With both, the producer writes; the last write is followed
by a commit, which the consumer acknowledges.  Offers, grants, commits and cancels are repeated
until answered, so the bus may lose any of them.

Each end has its own machine and its own memory: OUTGOING owns the *source* (rows in its cache, KV
blocks), INCOMING owns the *slots*. A write cannot be interrupted, so cancelling is a state:
CANCEL_PENDING and EXPIRE_PENDING still own the memory and wait for the outcome. At the producer
that is the writer's result, at the consumer the writer's message (CancelAck, a late Commit, an
abort). An end that cannot learn the outcome is QUARANTINED. Time moves an end towards quarantine
and never frees memory (faults F6 to F8).

Terminal states other than DELIVERED are tombstones: they stay for a bounded time and answer late
messages, so a grant behind its own cancel cannot revive the room (fault F42).

Sources: Mooncake connector of vLLM (transfer id and reservation id, tombstones); TokenSpeed #437.
"""

from __future__ import annotations

from dataclasses import dataclass

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event, Journal, Machine
from epd.records import Address

# --- what happens to either end -------------------------------------------------------------------


@dataclass(slots=True)
class PeerLost(Event):
    """The gateway declared the other end's epoch lost; it may still be alive and writing."""

    by_time = True


@dataclass(slots=True)
class PeerSilent(Event):
    """The other end does not answer, for long (LINK); it may be alive and write."""

    by_time = True


@dataclass(slots=True)
class DeadlinePassed(Event):
    by_time = True


@dataclass(slots=True)
class GraceEnded(Event):
    """A pending outcome did not arrive in time."""

    by_time = True


@dataclass(slots=True)
class RetryDue(Event):
    """No answer came: the last message is sent again."""

    by_time = True


@dataclass(slots=True)
class Failed(Event):
    failure: Failure


# --- one end --------------------------------------------------------------------------------------


class Room(Machine):
    """Base of both machines; the key is the room's name."""

    __slots__ = ("attempt", "failure", "owner", "peer")

    def __init__(
        self, room: str, attempt: int, peer: Address, owner: str, journal: Journal
    ) -> None:
        super().__init__(room, journal)
        self.attempt = attempt
        self.peer = peer  # the other end
        self.owner = owner  # key of the machine that makes or wants the bytes
        self.failure: Failure | None = None

    @property
    def why(self) -> Failure:
        """Of an end that failed: the row that reports it, or one before, has noted it."""
        assert self.failure is not None
        return self.failure


def keep_failure(room: Room, event: Failed) -> None:
    room.failure = event.failure


def note_lost(room: Room, event: Event) -> None:
    room.failure = Failure(FailureKind.LOST, f"instance {room.peer.instance_id} was lost")


def silence_of(peer: Address) -> Failure:
    return Failure(FailureKind.TRANSFER, f"instance {peer.instance_id} does not answer")


def note_silent(room: Room, event: Event) -> None:
    room.failure = silence_of(room.peer)


def note_late(room: Room, event: Event) -> None:
    reason = "the transfer did not end before its deadline"
    room.failure = Failure(FailureKind.DEADLINE, reason)
