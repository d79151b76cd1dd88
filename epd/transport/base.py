"""Ports of the two planes, and of time: what a role may assume of the outside.

Control plane: `Bus` moves small typed messages, at most once, in order per peer, and never blocks
on a peer.  Data plane: `TransferEngine` moves bytes into a peer's registered memory, without a
word; a role sends a `Commit` message behind a write.  The two fail differently, so they are two
ports.  Each adapter passes the contract kit of its port (tests/contract/).

Ownership rule of the data plane: until the outcome is there, memory that a write reads belongs to
OUTGOING, and memory that it lands in to INCOMING.  `Written` and `WriteFailed` are definite.
`WriteUnknown` means that bytes may still be read from the source or land in the target.  Both stay
owned until the writer's engine has settled (`settle`: nothing of its own moves any more).  If the
other side was lost, they stay so until `fence` is true: it cannot touch them any more.  A time-out
is neither (fault F7).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from epd.errors import Told
from epd.messages import Address, Message, Record, RemoteRegion, TransportLack, TransportOffer

Life = tuple[str, int]  # instance id, epoch
Buffer = Any  # contiguous, C-order, exposes the buffer protocol: memoryview, bytes, numpy array


@dataclass(frozen=True, slots=True)
class Reference:
    """Bytes that are handed on within a process as what holds them, wherever that lies: in a
    device's memory, too.  See `DataPlane.takes_references`."""

    holder: Any
    nbytes: int


class Clock(Protocol):
    """Time as roles see it; virtual in the simulator."""

    def now_s(self) -> float:
        """Monotonic seconds, for durations and timers."""

    def wall_s(self) -> float:
        """Wall-clock seconds, comparable between processes of one host or hosts under NTP."""

    def call_at(self, when_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Run `callback` on the loop once `now_s() >= when_s`."""


class TimerHandle(Protocol):
    def cancel(self) -> None: ...


class Random(Protocol):
    """Keyed randomness: equal keys give equal draws in the simulator, in any order of calls."""

    def integer(self, *key: object) -> int:
        """In [0, 2**63)."""


class Received(NamedTuple):
    """One message as the bus hands it to the role: decoded, with its sender's life and payloads."""

    source: str
    epoch: int
    message: Any  # a Message; which one, its handler knows
    payloads: tuple[Any, ...] = ()


class Bus(Protocol):
    """The control plane of one instance."""

    address: Address
    dropped: Counter[str]  # what was not let in or not sent, by kind

    def connect(self, peer: Address) -> None:
        """Learn how to reach a peer; a new epoch replaces the old connection. Never blocks."""

    def disconnect(self, instance_id: str) -> None:
        """Forget a peer and drop what is queued for it."""

    def reopen(self, instance_id: str) -> None:
        """Give the connection to a peer up, with what is queued in it, and open another."""

    def send(self, instance_id: str, message: Message, payloads: Sequence[Buffer] = ()) -> bool:
        """Queue a message.  False: not queued (unknown peer, or a full queue).  Raises Unsendable
        alone."""

    def start(self, deliver: Callable[[Received], None]) -> None:
        """Begin receiving; `deliver` is called on the loop, in order per peer, and never raises."""

    async def close(self) -> None:
        """Flush briefly, close sockets, remove ipc files."""


class Written(Record, kw_only=False, tag=True):
    """All bytes are in the target's memory and the source is not read any more."""

    nbytes: int
    checksum: int  # of the bytes in slot order; 0: not computed


class WriteFailed(Record, kw_only=False, tag=True):
    """Definite: no byte of this write lands from now on and the source is not read any more."""

    reason: str


class WriteUnknown(Record, kw_only=False, tag=True):
    """Bytes may still move.  Source and target stay owned until fenced (faults F6 to F8)."""

    reason: str


WriteOutcome = Written | WriteFailed | WriteUnknown


class Region(Protocol):
    """Own registered memory: `num_slots` slots of `slot_nbytes`, registered once, never moved."""

    remote: RemoteRegion

    @property
    def buffer(self) -> memoryview:
        """The whole memory, writable, `num_slots * slot_nbytes` bytes."""

    def views(self, slots: Sequence[int], nbytes: int) -> list[Any]:
        """What was written to `slots`, in order, `nbytes` in all, as memoryviews, no copy; or the
        one `Reference` that was deposited for exactly these.

        A look: the memory of a region that is not `by_reference` has all that has arrived now.
        """

    def forget(self, slots: Sequence[int]) -> None:
        """The lease ended: drop references deposited for these slots (local backend)."""


class TransferEngine(Protocol):
    """The data plane of one instance: one engine per process, not per request."""

    def allocate(
        self, name: str, num_slots: int, slot_nbytes: int, *, by_reference: bool = False
    ) -> Region:
        """Allocate and register memory that peers may write to.

        `by_reference`: a producer in this very process may deposit its buffers instead of copying
        bytes, or a `Reference`; `views` then returns what was deposited.  Raises `TransportError`.
        """

    async def write(
        self, source: Sequence[Buffer], target: RemoteRegion, slots: Sequence[int]
    ) -> WriteOutcome:
        """Write buffers, concatenated, into `slots` in order, filling each slot but the last."""

    async def checksum(self, views: Sequence[Buffer]) -> int:
        """The checksum that `Written` carries, of these bytes in order; off the loop when large."""

    async def settle(self, peer: Address) -> bool:
        """True once no write that we have begun to this epoch of the peer can move a byte any more:
        sources and targets are free.  False: not sure.  Bars nobody.

        For writes that ended as `WriteUnknown`, or whose caller was cancelled, while the peer is
        trusted.  Bounded as `fence` is, and repeated by the caller.
        """

    async def fence(
        self, peer: Address, host_id: str, pid: int, *, has_ended: bool = False
    ) -> bool:
        """True once this epoch of the peer can never write to our memory again; False: not sure.

        For a peer that was lost: it is barred for good, should it live.  Includes `settle`.
        `has_ended`: its process attests that this epoch has (`close` was True there), and that is
        as if the process had.  Bounded: answers within about a second.  The caller retries with
        back-off.
        """

    def revoke(self, region: Region) -> None:
        """Make the region unreachable for new writes and release it."""

    async def close(self) -> bool:
        """Wait for writes in flight, release all memory, remove shared memory segments.  True: as
        if the process had ended, nothing that this epoch began moves a byte any more."""


@dataclass(frozen=True, slots=True)
class StorageUsage:
    """How full a storage is; `nbytes` as of its last look, which others may have changed since."""

    nbytes: int
    capacity_nbytes: int
    evictions: int  # by this process


class Storage(Protocol):
    """Values by key that outlive processes and may be shared by them.

    It may forget and it may be slow, but it does not lie: what `get` returns is what was put under
    this key with this very note, whole.  Neither method raises for what a disk can do.
    """

    @property
    def tier(self) -> str:
        """Its name in metrics: `disk`, `store`."""

    async def get(self, key: str, note: bytes, nbytes: int) -> Buffer | None:
        """The value, in memory of its own; None: not there, torn, other note or length."""

    async def put(self, key: str, note: bytes, value: Sequence[Buffer]) -> bool:
        """Keep a value; False: it could not be kept.  `key`: hex digits."""

    async def listing(self) -> Sequence[str] | None:
        """Keys that it has, by whomever they were put, those to be forgotten first at the head.

        None: as when it was asked last, or it has no list."""

    def usage(self) -> StorageUsage: ...

    async def close(self) -> None:
        """Wait briefly for what is being written."""


class DataPlane(TransferEngine, Protocol):
    """The data plane as roles see it: one or more engines, and which of them reaches whom.

    What moves no device's memory inherits that there are no mirrors.
    """

    @property
    def offers(self) -> tuple[TransportOffer, ...]:
        """Ways by which peers can reach this instance, the best first; it joins with them."""

    @property
    def lacks(self) -> tuple[TransportLack, ...]:
        """Ways that it would offer if something were not missing."""
        return ()

    def descriptor(self, region: Region, transport: str) -> RemoteRegion:
        """How a peer reaches an own region over this transport; empty: the one that made it."""

    def parts(self, region: Region, transport: str) -> tuple[RemoteRegion, ...]:
        """How a peer reaches the region of this name at the other ranks of a group, in their order:
        each has the same slots in its own."""
        return ()

    def recut(self, region: Region, num_parts: int) -> Region:
        """The memory of an own region once more, as a region in which each slot is so many."""

    def mirror(self, region: Region, memory: object = None) -> Region | None:
        """A region of a device's memory in the place of an own one, for peers that can write there.
        `memory`: that the backend has made; else new, with the same slots.  None: no transport of
        this instance can."""
        return None

    def landing(self, region: Region, transport: str) -> Region:
        """Where writes to an own region land over this transport: in it, or in its mirror."""
        return region

    @property
    def refused(self) -> Counter[str]:
        """Connections of the data plane that were severed for wrong frames, by kind."""
        return Counter()

    def guard(self, region: Region) -> None:
        """From now on every transport that asks the owner declines a write into a slot of this own
        region unless it is lent to the writer; shared memory does not."""
        return

    def lend(self, target: RemoteRegion, slots: Sequence[int], peer: Address, room: str) -> None:
        """Let this life of a peer, with its ranks, write to these slots for this room."""
        return

    def take_back(self, target: RemoteRegion, room: str) -> None:
        """No write for the room begins any more."""
        return

    def takes_references(self, target: RemoteRegion) -> bool:
        """Whether a `Reference` may be written to the region: it lies in this process, or in the
        memory of a device, by a transport that reads that of ours (`holder.raw()`)."""


class TransportError(Told):
    """A transport cannot do what was asked; the text names the thing and the remedy."""


class Unsendable(TransportError):
    """A message that no peer would take: it cannot be encoded, or is larger than any may be."""
