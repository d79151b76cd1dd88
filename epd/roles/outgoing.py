"""The producer's end of every room at this instance: OUTGOING machines over bus and data plane.

The table has what may happen, and this component how: a commit becomes a message, and a write goes
to the transfer engine. The engine is asked about a write in doubt until it has an answer. What the
bytes are is their producer's business. If producer and consumer are the same process, the message
arrives in the loop's next turn, and the write hands over a reference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from epd.config import Timing
from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event
from epd.fsm.outgoing import (
    CancelReceived,
    CommitAcked,
    Do,
    GrantReceived,
    Manifest,
    Outgoing,
    PeerFenced,
    Requested,
    SlotsLeased,
    SourceFailed,
    WriteOutcomeUnknown,
    WriteRefused,
    WriteSettled,
    WriteSucceeded,
)
from epd.fsm.room import DeadlinePassed
from epd.groups.asks import WritePart
from epd.messages import (
    Address,
    CancelAck,
    CancelTransfer,
    Commit,
    CommitAck,
    Grant,
    TransferAborted,
    TransferInDoubt,
)
from epd.roles.base import Actor, performs, receives
from epd.roles.fan_out import FanOuts
from epd.roles.rooms import Rooms
from epd.scheduling.step_cost import Rate
from epd.transport.base import Buffer, Received, WriteFailed, WriteOutcome, Written

MAX_UNASKED = 1024  # rooms whose grant may be faster than their request


class Staged(NamedTuple):
    """Bytes to be written, and the granted slots that they fill in order."""

    views: Sequence[Buffer]
    slots: Sequence[int]


class Spread(NamedTuple):
    """A write of which ranks do parts."""

    parts: Sequence[WritePart]


class Producer(Protocol):
    """Who makes the bytes of a room and owns the source."""

    def granted(self, outgoing: Outgoing) -> None:
        """The consumer has memory for it."""

    def hold_part(self, outgoing: Outgoing) -> None:
        """Own what is ready (`written_nbytes` to `ready_nbytes`) and nothing else."""

    def lease(self, outgoing: Outgoing) -> bool:
        """Stand in the queue for slots to write from, for `SlotsLeased`; False: it needs none."""

    def release_slots(self, outgoing: Outgoing) -> None:
        """Leave that queue; nothing reads the slots any more."""

    async def stage(self, outgoing: Outgoing, grant: Grant) -> Staged | Spread | None:
        """The bytes from `written_nbytes` on, `part_nbytes` of them, where a write may read them
        until they are released; None: their owner has ended.  Nothing of them has been written when
        it raises."""

    def release_source(self, outgoing: Outgoing) -> None:
        """Nothing reads the source any more."""

    def concluded(self, outgoing: Outgoing, failure: Failure | None) -> None:
        """The bytes were delivered, or never will be."""


class OutgoingRooms(Rooms[Outgoing, Producer]):
    """At most one machine per room: its grant or its cancel may be faster than its request."""

    end = "outgoing"
    fires = Outgoing

    def __init__(self, actor: Actor, timing: Timing) -> None:
        super().__init__(actor, timing)
        self._fan_outs = FanOuts(actor)
        self._cost = Rate(actor.clock.now_s)  # of a byte

    def open(
        self,
        room: str,
        attempt: int,
        peer: Address,
        producer: Producer,
        owner: str,
        manifest: Manifest,
        deadline_s: float,
        gateway: str,
    ) -> Outgoing:
        """A room that we will fill; adopts a machine whose grant or cancel came first."""
        if (outgoing := self.find(room)) is None:
            outgoing = self._open(room, attempt, peer, deadline_s, gateway)
        elif not outgoing.terminal:
            self.arm(outgoing, self.actor.until(deadline_s, gateway), DeadlinePassed())
        self._owners[room] = producer
        self.post(outgoing, Requested(owner, manifest))
        if manifest.offer is not None:
            self.arm_retry(outgoing, None)
        return outgoing

    def _open(
        self, room: str, attempt: int, peer: Address, deadline_s: float, gateway: str
    ) -> Outgoing:
        made = Outgoing(room, attempt, peer, self.actor.journal)
        return self._add(made, deadline_s, gateway)

    def _num_unasked(self) -> int:
        """Rooms that were granted and that nobody has asked to fill yet."""
        return (
            len(self._rooms)
            - len(self._ended)
            - sum(room not in self._ended for room in self._owners)
        )

    def call_off(self, room: str, failure: Failure) -> None:
        """Its consumer cannot be asked: that is its end, for its owner too."""
        outgoing = self.find(room)
        if outgoing is not None and not outgoing.terminal:
            self.post(outgoing, SourceFailed(failure))  # behind what it was asked for with
            self.actor.mailbox.post(
                f"call off {room}", self._owners[room].concluded, outgoing, failure
            )

    # --- messages ---------------------------------------------------------------------------------

    @receives(Grant)
    def on_grant(self, received: Received) -> None:
        message: Grant = received.message
        outgoing = self.find(message.room)
        if outgoing is None:  # the grant is faster than the request
            peer = Address(message.region.instance_id, message.region.epoch, "")
            if not self.actor.knows_time_of(message.gateway):  # its deadline cannot be read yet
                return
            if self._num_unasked() >= MAX_UNASKED:
                self.actor.counters["grants_not_asked_for"] += 1
                return
            due = message.deadline_s, message.gateway
            outgoing = self._open(message.room, message.attempt, peer, *due)
            self._await_request(outgoing, message)
        if self._is_from_peer(outgoing, received):
            self.fire(outgoing, GrantReceived(message))
            if (producer := self._owners.get(message.room)) is not None:
                producer.granted(outgoing)

    def _await_request(self, outgoing: Outgoing, grant: Grant) -> None:
        """In that time a link is opened anew, or its peer given up.  A grant that was held up for
        longer than a tombstone stands, or whose peer is lost, opens a room that is over: nobody
        will ask for it."""

        def give_up() -> None:
            self.actor.counters["grants_not_asked_for"] += 1
            why = Failure(FailureKind.TRANSFER, "the producer was not asked for it")
            self.fire(outgoing, SourceFailed(why))

        left_s = self.actor.until(grant.deadline_s, grant.gateway)
        delay_s = min(left_s, 3 * self._timing.link_timeout_s)
        self.actor.timers.arm(outgoing, DeadlinePassed, delay_s, give_up)

    @receives(CancelTransfer)
    def on_cancel(self, received: Received) -> None:
        message: CancelTransfer = received.message
        if self.find(message.room) is None:  # before request and grant: a tombstone, and wins (F42)
            peer = Address(received.source, received.epoch, "")
            self._open(message.room, message.attempt, peer, 0.0, "")
        self._hear(received, CancelReceived(message.failure))

    @receives(CommitAck)
    def on_commit_ack(self, received: Received) -> None:
        self._hear(received, CommitAcked())

    # --- effects: messages ------------------------------------------------------------------------

    @performs(Do.SEND_OFFER)
    def send_offer(self, outgoing: Outgoing, event: Event) -> None:
        assert outgoing.manifest is not None
        assert outgoing.manifest.offer is not None
        self.actor.send(outgoing.peer, outgoing.manifest.offer)

    @performs(Do.SEND_COMMIT)
    def send_commit(self, outgoing: Outgoing, event: Event) -> None:
        room, attempt = outgoing.key, outgoing.attempt
        kv = outgoing.kv.state if outgoing.kv is not None else None
        commit = Commit(
            room=room, attempt=attempt, nbytes=outgoing.sent_nbytes, parts=outgoing.parts, kv=kv
        )
        self.actor.send(outgoing.peer, commit)

    @performs(Do.SEND_CANCEL_ACK)
    def send_cancel_ack(self, outgoing: Outgoing, event: Event) -> None:
        self.actor.send(outgoing.peer, CancelAck(room=outgoing.key, attempt=outgoing.attempt))

    @performs(Do.SEND_ABORT)
    def send_abort(self, outgoing: Outgoing, event: Event) -> None:
        aborted = TransferAborted(room=outgoing.key, attempt=outgoing.attempt, failure=outgoing.why)
        self.actor.send(outgoing.peer, aborted)

    @performs(Do.SEND_DOUBT)
    def send_doubt(self, outgoing: Outgoing, event: Event) -> None:
        doubt = TransferInDoubt(
            room=outgoing.key, attempt=outgoing.attempt, reason=outgoing.why.reason
        )
        self.actor.send(outgoing.peer, doubt)

    # --- effects: memory --------------------------------------------------------------------------

    @performs(Do.HOLD_PART)
    def hold_part(self, outgoing: Outgoing, event: Event) -> None:
        self._owners[outgoing.key].hold_part(outgoing)

    @performs(Do.LEASE_SLOTS)
    def lease_slots(self, outgoing: Outgoing, event: Event) -> None:
        if not self._owners[outgoing.key].lease(outgoing):
            self.post(outgoing, SlotsLeased(()))

    @performs(Do.RELEASE_SLOTS)
    def release_slots(self, outgoing: Outgoing, event: Event) -> None:
        self._owners[outgoing.key].release_slots(outgoing)

    @performs(Do.START_WRITE)
    async def start_write(self, outgoing: Outgoing, event: Event) -> Event:
        grant = outgoing.grant
        assert grant is not None
        if not self._is_known(outgoing):
            return WriteRefused(f"no registry has told of {outgoing.peer.instance_id}'s life yet")
        try:
            staged = await self._owners[outgoing.key].stage(outgoing, grant)
        except Exception as error:
            self.actor.fault(f"staging {outgoing.key}", error)
            return WriteRefused(repr(error))
        if staged is None:
            return WriteRefused("withdrawn before the write began")
        expected_s = self._cost.expected_s(outgoing.part_nbytes) if self._cost.is_known else None
        try:
            with self.actor.progress.writes.work(expected_s, outgoing.peer) as work:
                outcome = await self._write(outgoing, grant, staged)
        except Exception as error:
            self.actor.fault(f"write {outgoing.key}", error)
            return WriteOutcomeUnknown(repr(error))
        self._cost.observe(outgoing.part_nbytes, self.clock.now_s() - work.began_s)
        if isinstance(outcome, Written):
            return WriteSucceeded(outcome.checksum)
        if isinstance(outcome, WriteFailed):
            return WriteRefused(outcome.reason)
        return WriteOutcomeUnknown(outcome.reason)

    def _write(
        self, outgoing: Outgoing, grant: Grant, staged: Staged | Spread
    ) -> Awaitable[WriteOutcome]:
        if isinstance(staged, Spread):
            return self._fan_outs.write(f"{outgoing.key}+{outgoing.written_nbytes}", staged.parts)
        write = self.actor.ports.transfers.write
        return write(staged.views, grant.region, staged.slots)

    @performs(Do.SETTLE_WRITE)
    async def settle_write(self, outgoing: Outgoing, event: Event) -> Event | None:
        if self.actor.is_lost(outgoing.peer):
            return await self._fence(outgoing, PeerFenced())
        settle = self.actor.ports.transfers.settle
        if await self._all_hold(outgoing, lambda rank, host_id, pid: settle(rank)):
            return WriteSettled()
        self._ask_again(outgoing)
        return None

    @performs(Do.RELEASE_SOURCE)
    def release_source(self, outgoing: Outgoing, event: Event) -> None:
        if (producer := self._owners.get(outgoing.key)) is not None:
            producer.release_source(outgoing)

    # --- effects: ends ----------------------------------------------------------------------------

    @performs(Do.CONCLUDE_FAILED)
    def conclude_failed(self, outgoing: Outgoing, event: Event) -> None:
        if (producer := self._owners.get(outgoing.key)) is not None:
            producer.concluded(outgoing, outgoing.why)

    @performs(Do.CONCLUDE_DELIVERED)
    def conclude_delivered(self, outgoing: Outgoing, event: Event) -> None:
        assert outgoing.grant is not None
        is_local = self.actor.is_self(outgoing.peer)
        self.actor.times.note_hop(outgoing, "local" if is_local else outgoing.grant.region.backend)
        self._owners[outgoing.key].concluded(outgoing, None)
