"""Both ends of every room at this instance: TRANSFER machines over the bus and the data plane.

The table says what may happen; this role says how: a grant becomes a message, a write goes to the
transfer engine, a fence is asked until it holds.  What the bytes mean is the owner's
(`room_owners.py`).  A room has at most one machine per side here; when both
ends live in one instance the messages take the loop's next turn and the write deposits a reference.

Ended transfers stay as tombstones for `tombstone_s`, so that late messages find an answer and a
grant cannot revive what was cancelled (fault F42).  Words of a peer count only if they come from
the epoch that the room was opened with (fault F44).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from epd.config import Timing
from epd.fsm import transfer as fsm
from epd.fsm.kernel import Event
from epd.fsm.transfer import Do, Manifest, Side, Transfer
from epd.fsm.transfer_table import TABLE
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
from epd.roles.base import Actor, Role, performs, receives
from epd.roles.doubts import Doubts
from epd.roles.room_owners import Consumer, Producer
from epd.scheduling.pairing import common
from epd.transport.base import Received, Region, WriteFailed, Written

assert Transfer.table is TABLE  # importing the table binds it to the machine


class Transfers(Role[Transfer]):
    """The registry of rooms of one instance."""

    def __init__(self, actor: Actor, timing: Timing) -> None:
        super().__init__(actor)
        self._timing = timing
        self._rooms: dict[tuple[str, Side], Transfer] = {}
        self._producers: dict[str, Producer] = {}
        self._consumers: dict[str, Consumer] = {}
        self._retries: dict[Transfer, float] = {}  # when a word is said again, the first one first
        self._ended: dict[tuple[str, Side], float] = {}  # tombstones: until when, oldest first
        self.extend(Doubts(actor, timing, self.ask_again))

    def find(self, room: str, side: Side) -> Transfer | None:
        return self._rooms.get((room, side))

    def live(self) -> dict[str, int]:
        return {"transfers": len(self._rooms) - len(self._ended)}

    # --- opening ----------------------------------------------------------------------------------

    def open_consumer(
        self, room: str, attempt: int, peer: Address, owner: Consumer, key: str, deadline_s: float
    ) -> Transfer:
        """A room that we want filled: a machine in PENDING, in the owner's line for slots."""
        transfer = self._open(room, Side.CONSUMER, attempt, peer, deadline_s, key)
        self._consumers[room] = owner
        return transfer

    def open_producer(
        self,
        room: str,
        attempt: int,
        peer: Address,
        owner: Producer,
        key: str,
        manifest: Manifest,
        deadline_s: float,
    ) -> Transfer:
        """A room that we will fill; adopts a machine whose grant or cancel came first."""
        transfer = self.find(room, Side.PRODUCER)
        if transfer is None:
            transfer = self._open(room, Side.PRODUCER, attempt, peer, deadline_s, key)
        transfer.owner, transfer.meta = key, manifest
        self._producers[room] = owner
        if manifest.offers:
            self._arm_retry(transfer, None)
        return transfer

    def _open(
        self, room: str, side: Side, attempt: int, peer: Address, deadline_s: float, key: str = ""
    ) -> Transfer:
        transfer = Transfer(room, side, attempt, peer, key, self.actor.journal)
        self._rooms[room, side] = transfer
        self.actor.arm(
            self._timer(transfer, "deadline"),
            self.actor.until(deadline_s),
            lambda: self.fire(transfer, fsm.DeadlinePassed()),
        )
        return transfer

    def bound_wait(self, transfer: Transfer, timeout_s: float) -> None:
        """Leave a peer that answers and sends nothing as one that is silent."""

        def waited() -> None:
            self.fire(transfer, fsm.PeerSilent())
            if not transfer.terminal:  # it waits for slots of ours, or for an outcome
                self.bound_wait(transfer, timeout_s)

        self.actor.arm(self._timer(transfer, "wait"), timeout_s, waited)

    def ask_again(self, transfer: Transfer, delay_s: float) -> None:
        """A doubt has a pace of its own."""
        self._retries.pop(transfer, None)
        again = partial(self.fire, transfer, fsm.RetryDue())
        self.actor.arm(self._timer(transfer, "doubt"), delay_s, again)

    def _timer(self, transfer: Transfer, what: str) -> str:
        return f"transfer/{transfer.key}/{transfer.side._value_}/{what}"

    def _owners(self, side: Side) -> dict[str, Producer] | dict[str, Consumer]:
        return self._producers if side is Side.PRODUCER else self._consumers

    def ended(self, machine: Transfer) -> None:
        machine.source, room = None, (machine.key, machine.side)
        if room in self._ended:  # a late word: its timers are gone
            return
        for what in ("deadline", "wait", "doubt", "grace"):
            self.actor.disarm(self._timer(machine, what))
        self._retries.pop(machine, None)
        if not self._retries:
            self.actor.disarm("transfer/retries")
        if self._rooms.get(room) is machine:
            self._ended[room] = self.clock.now_s() + self._timing.tombstone_s
            if not self.actor.armed("transfer/tombstones"):
                self.actor.arm("transfer/tombstones", self._timing.tombstone_s, self._forget)

    def _forget(self) -> None:
        """Drop tombstones that are old enough; looks a few times per `tombstone_s`."""
        now_s = self.clock.now_s()
        for room, until_s in list(self._ended.items()):
            if until_s > now_s:
                self.actor.arm("transfer/tombstones", self._timing.tombstone_s / 8, self._forget)
                return
            del self._ended[room], self._rooms[room]
            self._owners(room[1]).pop(room[0], None)

    # --- messages ---------------------------------------------------------------------------------

    @receives(Grant)
    def on_grant(self, received: Received) -> None:
        message: Grant = received.message
        transfer = self.find(message.room, Side.PRODUCER)
        if transfer is None:  # the grant is faster than the request
            peer = Address(message.region.instance_id, message.region.epoch, "")
            # Nobody would tell of its loss again, or its deadline cannot be read yet.
            if self.actor.is_lost(peer) or not self.actor.knows_time:
                return
            transfer = self._open(
                message.room, Side.PRODUCER, message.attempt, peer, message.deadline_s
            )
        if self._is_from_peer(transfer, received):
            self.fire(transfer, fsm.GrantReceived(message))
            if (producer := self._producers.get(message.room)) is not None:
                producer.granted(transfer)

    @receives(CancelTransfer)
    def on_cancel(self, received: Received) -> None:
        message: CancelTransfer = received.message
        transfer = self.find(message.room, Side.PRODUCER)
        if transfer is None:  # cancel before request or grant: leave a tombstone that wins (F42)
            peer = Address(received.source, received.epoch, "")
            transfer = self._open(message.room, Side.PRODUCER, message.attempt, peer, 0.0)
        if self._is_from_peer(transfer, received):
            self.fire(transfer, fsm.CancelReceived(message.failure))

    @receives(Commit)
    def on_commit(self, received: Received) -> None:
        message: Commit = received.message
        event = fsm.CommitReceived(message.nbytes, message.parts, message.kv)
        self._fire_consumer(received, event)

    @receives(CancelAck)
    def on_cancel_ack(self, received: Received) -> None:
        self._fire_consumer(received, fsm.CancelAcked())

    @receives(TransferAborted)
    def on_aborted(self, received: Received) -> None:
        message: TransferAborted = received.message
        event = fsm.AbortReceived(message.kind, message.reason, message.retryable)
        self._fire_consumer(received, event)

    @receives(TransferInDoubt)
    def on_doubt(self, received: Received) -> None:
        event = fsm.DoubtReceived("transfer", received.message.reason, True)
        self._fire_consumer(received, event)

    @receives(CommitAck)
    def on_commit_ack(self, received: Received) -> None:
        transfer = self.find(received.message.room, Side.PRODUCER)
        if transfer is not None and self._is_from_peer(transfer, received):
            self.fire(transfer, fsm.CommitAcked())

    def _fire_consumer(self, received: Received, event: Event) -> None:
        transfer = self.find(received.message.room, Side.CONSUMER)
        if transfer is not None and self._is_from_peer(transfer, received):
            self.fire(transfer, event)

    def _is_from_peer(self, transfer: Transfer, received: Received) -> bool:
        peer = transfer.peer
        if (peer.instance_id, peer.epoch) == (received.source, received.epoch):
            return True
        self.actor.counters["message_of_other_epoch"] += 1
        return False

    def peer_lost(self, peer: Address) -> None:
        for transfer in list(self._rooms.values()):
            if (transfer.peer.instance_id, transfer.peer.epoch) == (peer.instance_id, peer.epoch):
                self.fire(transfer, fsm.PeerLost())

    def peer_silent(self, peer: Address) -> None:
        for transfer in list(self._rooms.values()):
            if (transfer.peer.instance_id, transfer.peer.epoch) == (peer.instance_id, peer.epoch):
                self.fire(transfer, fsm.PeerSilent())

    # --- effects: words ---------------------------------------------------------------------------

    @performs(Do.SEND_OFFER)
    def send_offer(self, transfer: Transfer, event: Event) -> None:
        self.actor.send(transfer.peer, transfer.meta.offer)

    @performs(Do.SEND_GRANT)
    def send_grant(self, transfer: Transfer, event: Event) -> None:
        self.actor.send(transfer.peer, self._consumers[transfer.key].grant(transfer))

    @performs(Do.SEND_COMMIT)
    def send_commit(self, transfer: Transfer, event: Event) -> None:
        producer = self._producers.get(transfer.key)
        kv = producer.commit_state(transfer) if producer is not None else None
        self.actor.send(
            transfer.peer,
            Commit(transfer.key, transfer.attempt, transfer.sent_nbytes, transfer.parts, kv),
        )

    @performs(Do.SEND_COMMIT_ACK)
    def send_commit_ack(self, transfer: Transfer, event: Event) -> None:
        self.actor.send(transfer.peer, CommitAck(transfer.key, transfer.attempt))

    @performs(Do.SEND_CANCEL)
    def send_cancel(self, transfer: Transfer, event: Event) -> None:
        self.actor.send(transfer.peer, CancelTransfer(transfer.key, transfer.attempt))

    @performs(Do.SEND_CANCEL_ACK)
    def send_cancel_ack(self, transfer: Transfer, event: Event) -> None:
        self.actor.send(transfer.peer, CancelAck(transfer.key, transfer.attempt))

    @performs(Do.SEND_ABORT)
    def send_abort(self, transfer: Transfer, event: Event) -> None:
        kind, reason, retryable = transfer.failure
        self.actor.send(
            transfer.peer,
            TransferAborted(
                transfer.key,
                transfer.attempt,
                kind or "cancelled",
                reason or f"the producer had ended this transfer ({transfer.state.name})",
                retryable,
            ),
        )

    @performs(Do.SEND_DOUBT)
    def send_doubt(self, transfer: Transfer, event: Event) -> None:
        _, reason, _ = transfer.failure
        self.actor.send(transfer.peer, TransferInDoubt(transfer.key, transfer.attempt, reason))

    # --- effects: memory --------------------------------------------------------------------------

    @performs(Do.HOLD_PART)
    def hold_part(self, transfer: Transfer, event: Event) -> None:
        self._producers[transfer.key].hold_part(transfer)

    @performs(Do.START_WRITE)
    async def start_write(self, transfer: Transfer, event: Event) -> Event:
        try:
            staged = await self._producers[transfer.key].stage(transfer)
        except Exception as error:
            self.actor.fault(f"staging {transfer.key}", error)
            return fsm.WriteRefused(repr(error))
        if staged is None:
            return fsm.WriteRefused("withdrawn before the write began")
        region = transfer.grant.region
        try:
            outcome = await self.actor.ports.transfers.write(staged.views, region, staged.slots)
        except Exception as error:
            self.actor.fault(f"write {transfer.key}", error)
            return fsm.WriteOutcomeUnknown(repr(error))
        if isinstance(outcome, Written):
            return fsm.WriteSucceeded(outcome.checksum)
        if isinstance(outcome, WriteFailed):
            return fsm.WriteRefused(outcome.reason)
        return fsm.WriteOutcomeUnknown(outcome.reason)

    @performs(Do.PUBLISH)
    async def publish(self, transfer: Transfer, event: Event) -> Event:
        try:
            return await self._consumers[transfer.key].publish(transfer)
        except Exception as error:
            self.actor.fault(f"publish {transfer.key}", error)
            return fsm.PublishFailed(repr(error))

    async def check_bytes(self, transfer: Transfer, region: Region, slots: Sequence[int]) -> Event:
        """Whether all that was wanted was written, and what landed in these slots, in the order of
        writing, is what the producer wrote, where it computed a sum."""
        written_nbytes = sum(nbytes for nbytes, _ in transfer.parts)
        if written_nbytes != transfer.nbytes:
            return fsm.PublishFailed(f"{written_nbytes} of {transfer.nbytes} bytes were written")
        at = 0
        for nbytes, checksum in transfer.parts:
            stop = at - (-nbytes // region.remote.slot_nbytes)
            if checksum:
                views = region.views(slots[at:stop], nbytes)
                found = await self.actor.ports.transfers.checksum(views)
                if found != checksum:
                    wrote = f"its producer wrote {checksum:#x}"
                    return fsm.PublishFailed(f"checksum of {transfer.key} is {found:#x}, {wrote}")
            at = stop
        return fsm.Published()

    @performs(Do.RELEASE_SOURCE)
    def release_source(self, transfer: Transfer, event: Event) -> None:
        if (producer := self._producers.get(transfer.key)) is not None:
            producer.release_source(transfer)

    @performs(Do.RELEASE_SLOTS)
    def release_slots(self, transfer: Transfer, event: Event) -> None:
        self._consumers[transfer.key].release_slots(transfer)

    @performs(Do.WITHDRAW_LEASE)
    def withdraw_lease(self, transfer: Transfer, event: Event) -> None:
        self._consumers[transfer.key].withdraw_lease(transfer)

    def descriptor(self, region: Region, peer: Address) -> RemoteRegion:
        """How this peer reaches an own region, over the transport of the pair."""
        data_plane, info = self.actor.ports.transfers, self.actor.peer_info(peer)
        names = common(data_plane.offers, info.transports) if info is not None else ()
        return data_plane.descriptor(region, names[0] if names else "")

    @performs(Do.CONCLUDE_FAILED)
    def conclude_failed(self, transfer: Transfer, event: Event) -> None:
        if (owner := self._owners(transfer.side).get(transfer.key)) is not None:
            owner.concluded(transfer, delivered=False)

    @performs(Do.CONCLUDE_DELIVERED)
    def conclude_delivered(self, transfer: Transfer, event: Event) -> None:
        if transfer.side is Side.PRODUCER:
            is_local = self.actor.is_self(transfer.peer)
            name = "local" if is_local else transfer.grant.region.backend
            self.actor.times.note_hop(transfer, name)
        if (owner := self._owners(transfer.side).get(transfer.key)) is not None:
            owner.concluded(transfer, delivered=True)

    # --- effects: time ----------------------------------------------------------------------------

    @performs(Do.ARM_RETRY)
    def _arm_retry(self, transfer: Transfer, event: Event | None) -> None:
        """All wait equally long, so who is put off goes to the end of one line."""
        self._retries.pop(transfer, None)
        self._retries[transfer] = self.clock.now_s() + self._timing.retry_interval_s
        if not self.actor.armed("transfer/retries"):
            self.actor.arm("transfer/retries", self._timing.retry_interval_s, self._retry)

    def _retry(self) -> None:
        """No answer is no sign, but the link may be why."""
        now_s = self.clock.now_s()
        for transfer, due_s in list(self._retries.items()):
            if due_s > now_s:
                self.actor.arm("transfer/retries", due_s - now_s, self._retry)
                return
            if self._retries.get(transfer) == due_s:  # no earlier one has changed that
                del self._retries[transfer]
                self.actor.doubt(transfer.peer)
                self.fire(transfer, fsm.RetryDue())

    @performs(Do.ARM_GRACE)
    def arm_grace(self, transfer: Transfer, event: Event) -> None:
        self.actor.arm(
            self._timer(transfer, "grace"),
            self._timing.abort_timeout_s,
            lambda: self.fire(transfer, fsm.GraceEnded()),
        )
