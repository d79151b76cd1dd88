"""The consumer's end of every room at this instance: INCOMING machines over bus and data plane.

The table has what may happen, and this component how: leased slots become a grant, landed bytes are
checked, and a fence is asked until it holds. The meaning of the bytes is their consumer's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from epd.config import Timing
from epd.failure import Failure, FailureKind
from epd.fsm.incoming import (
    AbortReceived,
    CancelAcked,
    CommitReceived,
    Do,
    DoubtReceived,
    Incoming,
    PeerFenced,
    Published,
    PublishFailed,
)
from epd.fsm.kernel import Event
from epd.fsm.room import PeerSilent
from epd.groups.asks import LandedWrites, RankLost
from epd.messages import (
    Address,
    CancelAck,
    CancelTransfer,
    Commit,
    CommitAck,
    Grant,
    RemoteRegion,
    TransferAborted,
    TransferInDoubt,
)
from epd.roles.base import Actor, performs, receives
from epd.roles.rooms import Rooms
from epd.scheduling.pairing import common
from epd.transport.base import Received, Region

SumUp = Callable[[LandedWrites], Awaitable[Sequence[int]]]  # of what has landed, of each write


class Consumer(Protocol):
    """The owner of the slots, to which the bytes of a room go."""

    def await_landing(self, incoming: Incoming) -> None:
        """Stand in the queue for slots that its blocks can land in, for `SlotsLeased`."""

    def withdraw_lease(self, incoming: Incoming) -> None:
        """Leave the queue for slots or blocks."""

    def grant(self, incoming: Incoming) -> Grant:
        """Where the producer may write, now that slots are leased."""

    async def publish(self, incoming: Incoming) -> Event:
        """Check what landed: Published or PublishFailed."""

    def release_slots(self, incoming: Incoming) -> None:
        """Nothing writes into the slots any more."""

    def concluded(self, incoming: Incoming, failure: Failure | None) -> None:
        """The bytes are here, or never will be."""


class IncomingRooms(Rooms[Incoming, Consumer]):
    end = "incoming"
    fires = Incoming

    def __init__(self, actor: Actor, timing: Timing) -> None:
        super().__init__(actor, timing)
        self._lent: dict[str, RemoteRegion] = {}  # by room, where its peer may write now
        self._transports: dict[str, str] = {}  # by room, over which it was granted

    def open(
        self,
        room: str,
        attempt: int,
        peer: Address,
        consumer: Consumer,
        owner: str,
        num_rows: int,
        deadline_s: float,
        gateway: str,
    ) -> Incoming:
        """A room for bytes of `peer`: a machine in PENDING, in the owner's queue for slots."""
        journal = self.actor.journal
        incoming = Incoming(room, attempt, peer, owner, num_rows, deadline_s, gateway, journal)
        self._owners[room] = consumer
        return self._add(incoming, deadline_s, gateway)

    def bound_wait(self, incoming: Incoming, timeout_s: float) -> None:
        """Leave a peer that was granted slots, answers and sends nothing as one that is silent."""
        self.arm(incoming, timeout_s, PeerSilent())

    # --- messages ---------------------------------------------------------------------------------

    @receives(Commit)
    def on_commit(self, received: Received) -> None:
        """Only a granted room is committed: one that is not found here is over, and forgotten."""
        message: Commit = received.message
        if self.find(message.room) is None:
            peer = Address(received.source, received.epoch, "")
            self.actor.send(peer, CommitAck(room=message.room, attempt=message.attempt))
        self._hear(received, CommitReceived(message.nbytes, message.parts, message.kv))

    @receives(CancelAck)
    def on_cancel_ack(self, received: Received) -> None:
        self._hear(received, CancelAcked())

    @receives(TransferAborted)
    def on_aborted(self, received: Received) -> None:
        self._hear(received, AbortReceived(received.message.failure))

    @receives(TransferInDoubt)
    def on_doubt(self, received: Received) -> None:
        failure = Failure(FailureKind.TRANSFER, received.message.reason)
        self._hear(received, DoubtReceived(failure))

    # --- effects: messages ------------------------------------------------------------------------

    @performs(Do.SEND_GRANT)
    def send_grant(self, incoming: Incoming, event: Event) -> None:
        """Only to a peer that a registry has listed; until then it is repeated, as if lost."""
        if self._is_known(incoming):
            grant = self._owners[incoming.key].grant(incoming)
            self._lent[incoming.key] = grant.region
            lend = self.actor.ports.transfers.lend
            lend(grant.region, grant.slots, incoming.peer, incoming.key)
            self.actor.send(incoming.peer, grant)

    def forgotten(self, room: str) -> None:
        super().forgotten(room)
        self._transports.pop(room, None)

    def _take_back(self, incoming: Incoming) -> None:
        if (region := self._lent.pop(incoming.key, None)) is not None:
            self.actor.ports.transfers.take_back(region, incoming.key)

    def descriptor(self, region: Region, incoming: Incoming) -> RemoteRegion:
        """How the peer reaches an own region, over the transport of the pair; a grant that is
        repeated names the same."""
        if incoming.key not in self._transports:
            self._transports[incoming.key] = self.transport_with(incoming.peer)
        return self.actor.ports.transfers.descriptor(region, self.transport_of(incoming))

    def transport_with(self, peer: Address) -> str:
        """Of the pair; empty: they have none, or no registry has listed that life of the peer."""
        info = self.actor.peer_info(peer)
        names = common(self.actor.ports.transfers.offers, info.transports if info else ())
        return names[0] if names else ""

    def transport_of(self, incoming: Incoming) -> str:
        """Over which it was granted slots; empty: none, or not yet."""
        return self._transports.get(incoming.key, "")

    def parts(self, region: Region, incoming: Incoming) -> tuple[RemoteRegion, ...]:
        """How it reaches the region at the other ranks of this instance."""
        return self.actor.ports.transfers.parts(region, self.transport_of(incoming))

    def landing(self, region: Region, incoming: Incoming) -> Region:
        """Where the bytes of a room that was granted slots are."""
        return self.actor.ports.transfers.landing(region, self.transport_of(incoming))

    @performs(Do.SEND_COMMIT_ACK)
    def send_commit_ack(self, incoming: Incoming, event: Event) -> None:
        self.actor.send(incoming.peer, CommitAck(room=incoming.key, attempt=incoming.attempt))

    @performs(Do.SEND_CANCEL)
    def send_cancel(self, incoming: Incoming, event: Event) -> None:
        self.actor.send(incoming.peer, CancelTransfer(room=incoming.key, attempt=incoming.attempt))

    # --- effects: memory --------------------------------------------------------------------------

    @performs(Do.PUBLISH)
    async def publish(self, incoming: Incoming, event: Event) -> Event:
        self._take_back(incoming)
        try:
            return await self._owners[incoming.key].publish(incoming)
        except RankLost as lost:  # the group ends, as it should
            return PublishFailed(str(lost))
        except Exception as error:
            self.actor.fault(f"publish {incoming.key}", error)
            return PublishFailed(repr(error))

    async def check_bytes(
        self, incoming: Incoming, slots: Sequence[int], slot_nbytes: int, sum_up: SumUp
    ) -> Event:
        """Whether all bytes of the room were written; and where their producer computed a sum,
        whether the bytes in these slots, in the order of writing, have it."""
        written_nbytes = sum(nbytes for nbytes, _ in incoming.parts)
        if written_nbytes != incoming.nbytes:
            return PublishFailed(f"{written_nbytes} of {incoming.nbytes} bytes were written")
        at = 0
        summed: dict[tuple[int, ...], tuple[int, int]] = {}  # by slots: bytes, and their sum
        for nbytes, checksum in incoming.parts:
            stop = at - (-nbytes // slot_nbytes)
            if checksum:
                summed[tuple(slots[at:stop])] = (nbytes, checksum)
            at = stop
        sums = await sum_up([(at, nbytes) for at, (nbytes, _) in summed.items()])
        for found, (_, checksum) in zip(sums, summed.values(), strict=True):
            if found != checksum:
                wrote = f"its producer wrote {checksum:#x}"
                return PublishFailed(f"checksum of {incoming.key} is {found:#x}, {wrote}")
        return Published()

    async def check_region(self, incoming: Incoming, region: Region, slots: Sequence[int]) -> Event:
        """`check_bytes` of what landed in an own region."""
        checksum = self.actor.ports.transfers.checksum

        async def sum_up(written: LandedWrites) -> list[int]:
            return [await checksum(region.views(slots, nbytes)) for slots, nbytes in written]

        return await self.check_bytes(incoming, slots, region.remote.slot_nbytes, sum_up)

    @performs(Do.AWAIT_LANDING)
    def await_landing(self, incoming: Incoming, event: Event) -> None:
        self._owners[incoming.key].await_landing(incoming)

    @performs(Do.WITHDRAW_LEASE)
    def withdraw_lease(self, incoming: Incoming, event: Event) -> None:
        self._owners[incoming.key].withdraw_lease(incoming)

    @performs(Do.RELEASE_SLOTS)
    def release_slots(self, incoming: Incoming, event: Event) -> None:
        self._take_back(incoming)
        self._owners[incoming.key].release_slots(incoming)

    @performs(Do.START_FENCE)
    async def start_fence(self, incoming: Incoming, event: Event) -> Event | None:
        return await self._fence(incoming, PeerFenced())

    # --- effects: ends ----------------------------------------------------------------------------

    @performs(Do.CONCLUDE_FAILED)
    def conclude_failed(self, incoming: Incoming, event: Event) -> None:
        self._owners[incoming.key].concluded(incoming, incoming.why)

    @performs(Do.CONCLUDE_DELIVERED)
    def conclude_delivered(self, incoming: Incoming, event: Event) -> None:
        self._owners[incoming.key].concluded(incoming, None)
