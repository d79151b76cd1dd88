"""The receive pool of a prefill instance: EMBEDDING machines over slots, leases and a budget.

Registered once for the process's life (fault F5): slots are leased, not registrations.  An image
takes as many slots as its rows need, each holding whole rows, in any order, so the pool cannot
fragment.  There are three books.  The `Budget` promises a request all the slots of all its images
before it may ask for one of them (fault F24).  The `LeaseQueue` hands out free slots in order
within a quota per encoder (fault F41).  The `LruCache` has the resident rows without a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from epd.config import PrefillConfig, Timing
from epd.failure import Failure, FailureKind
from epd.fsm.embedding import (
    Do,
    Embedding,
    EncoderLost,
    EvictionRequested,
    LeaseGranted,
    Loaded,
    LoadFailed,
    LoadLost,
    LoadTimedOut,
    RivalWanted,
    SlotsReturned,
    Unwanted,
    Want,
    Wanted,
)
from epd.fsm.incoming import CancelRequested, Incoming, SlotsLeased
from epd.fsm.kernel import Event
from epd.fsm.room import silence_of
from epd.groups.asks import OtherRanks
from epd.groups.rows import RankRows, RowRanks
from epd.messages import Address, CancelTransfer, Grant, MediaItem, RowContract
from epd.roles.base import Actor, Component, performs
from epd.roles.incoming import IncomingRooms
from epd.roles.prefill.lateness import Lateness
from epd.scheduling.pool import Budget, Lease, LeaseQueue, LruCache, Pool


class Embeddings(Component[Embedding]):
    """Consumer of rows."""

    fires = Embedding

    def __init__(
        self,
        actor: Actor,
        incoming: IncomingRooms,
        contract: RowContract,
        config: PrefillConfig,
        timing: Timing,
        is_given_up: Callable[[Address], bool],
        lift: Callable[[object], object],
        ranks: OtherRanks | None = None,
    ) -> None:
        """`is_given_up`: whether an encoder does not answer this instance.  `lift`: rows that have
        arrived go to the device.  `ranks`: the others of a group."""
        super().__init__(actor)
        self._rooms = incoming
        self._is_given_up = is_given_up
        self._lift = lift
        self.contract = contract
        self._rows_timeout_s = config.rows_timeout_s
        self._lateness = Lateness(actor, self, incoming, config, timing)
        self.extend(self._lateness)
        own = RankRows(actor.ports.transfers, config, contract)
        self._rows_per_slot, self.region = own.rows_per_slot, own.region
        actor.ports.transfers.guard(self.region)
        num_slots = self.region.remote.num_slots
        self.ranks = RowRanks(own, contract, ranks, shards=config.rows_at_ranks == "sharded")
        self.pool = Pool(num_slots)
        quota = max(1, int(num_slots * config.max_slots_share_per_peer))
        self._leases = LeaseQueue(self.pool, quota)
        self._budget = Budget(num_slots)
        self._cache = LruCache(num_slots)
        self._embeddings: dict[str, Embedding] = {}
        self._busy: dict[str, Embedding] = {}  # those that load, or are referenced
        self._granted: dict[str, Callable[[], None]] = {}  # request waiting for its promise

    def live(self) -> dict[str, int]:
        return {
            "embeddings_loading": len(self._embeddings) - len(self._cache),
            "embedding_references": sum(len(e.waiters) or e.terminal for e in self._busy.values()),
            "slots": self.pool.num_leased - self._cache.used,
            "slot_promises": max(len(self._budget), len(self._granted)),
            "lease_queue": len(self._leases),
        }

    def fired(self, machine: Embedding, event: Event) -> None:
        super().fired(machine, event)
        is_idle = machine.at_rest and not machine.waiters
        if is_idle:  # it can make room for others
            self._soon(self._pump_leases)
        if not (machine.terminal or is_idle):
            self._busy[machine.key] = machine
        elif self._busy.get(machine.key) is machine:
            del self._busy[machine.key]

    # --- for requests -----------------------------------------------------------------------------

    def num_slots_for(self, num_rows: int) -> int:
        return -(-num_rows // self._rows_per_slot)

    def refusal(self, items: tuple[MediaItem, ...]) -> str:
        """Why these items can never be resident together; empty if they can."""
        needed = sum(self.num_slots_for(item.num_rows) for item in items)
        if needed <= self.pool.size:
            return ""
        return (
            f"the images need {needed} slots of {self.region.remote.slot_nbytes} bytes and the "
            f"receive pool has {self.pool.size}; send fewer or smaller images, or raise "
            "prefill.pool_nbytes"
        )

    def promise(self, key: str, items: tuple[MediaItem, ...], granted: Callable[[], None]) -> None:
        """Call `granted` once all slots of these items are promised; it may be at once."""
        self._granted[key] = granted
        self._budget.join(key, sum(self.num_slots_for(item.num_rows) for item in items))
        self._soon(self._pump_budget)

    def give_up(self, key: str) -> None:
        """The request needs its promise no longer (idempotent)."""
        self._granted.pop(key, None)
        self._budget.leave(key)
        self._soon(self._pump_budget)

    def want(self, want: Want) -> None:
        self._want(Wanted(want.item.room, want))

    def _want(self, event: Wanted) -> None:
        want = event.item
        embedding = self._embeddings.get(want.item.mm_hash)
        if embedding is None or embedding.terminal:  # ended, and just now telling its waiters
            embedding = Embedding(want.item.mm_hash, self.actor.journal)
            self._embeddings[want.item.mm_hash] = embedding
        self.fire(embedding, event)
        if self._leases.rejoin(embedding.room):
            self._soon(self._pump_budget)

    def add_room(self, room: str, item: MediaItem, *, is_rival: bool = False) -> bool:
        """Rows that `room` waits for may come in that of `item`, too; False: it does not wait."""
        embedding = self._embeddings.get(item.mm_hash)
        if embedding is None or (own := embedding.waiters.get(room)) is None:
            return False
        if item.room not in embedding.waiters:  # else it was told before
            further = replace(
                own, item=item, ready=_hear_nothing, failed=_hear_nothing, stands_for=room
            )
            self._want((RivalWanted if is_rival else Wanted)(item.room, further))
        return True

    def unwant(self, mm_hash: str, room: str) -> bool:
        """A waiter leaves; False if it was none."""
        embedding = self._embeddings.get(mm_hash)
        if embedding is None or room not in embedding.waiters:
            return False
        for each in embedding.rooms_for(room):
            self.post(embedding, Unwanted(each, embedding.waiters[each]))
        return True

    def dismiss(self, item: MediaItem, attempt: int) -> None:
        """The encoder may drop this room: its rows are here, or are not needed (F43)."""
        self.actor.send(item.encoder, CancelTransfer(room=item.room, attempt=attempt))

    def _soon(self, pump: Callable[[], None]) -> None:
        self.actor.mailbox.look("receive pool", pump)

    def _pump_budget(self) -> None:
        for key in self._budget.grants(self._leases.num_stranded):
            granted = self._granted.pop(key, None)
            if granted is not None:
                try:
                    granted()
                except Exception as error:
                    self.actor.fault(f"promise {key}", error)

    def _pump_leases(self) -> None:
        """Hand out slots; while the first of the queue lacks some, evict what nobody references.

        What an eviction has freed is handed out: nothing else would wake who waits for it.
        """
        while True:
            for lease, slots in self._leases.grants():
                self._start(lease, slots)
            lacking = self._leases.wanted()
            victims = self._cache.victims(lacking, lambda k: not self._embeddings[k].waiters)
            if not victims:
                return
            for key in victims:
                self.fire(self._embeddings[key], EvictionRequested())

    def _start(self, lease: Lease, slots: tuple[int, ...]) -> None:
        incoming = self._rooms.find(lease.key)
        assert incoming is not None  # with its end it left the queue
        embedding = self._embeddings.get(incoming.owner)
        if embedding is not None and lease.key in embedding.loads:
            self.fire(embedding, LeaseGranted())
        nbytes = incoming.num_rows * self.contract.row_nbytes
        self._rooms.fire(incoming, SlotsLeased(slots, nbytes))
        if self._rows_timeout_s:
            self._rooms.bound_wait(incoming, self._rows_timeout_s)

    def _return_slots(self, room: str, slots: tuple[int, ...]) -> None:
        self._leases.settled(room)
        self.region.forget(slots)
        self.pool.give_back(slots)

    # --- effects of EMBEDDING ---------------------------------------------------------------------

    @performs(Do.OPEN_TRANSFER)
    def open_transfer(self, embedding: Embedding, event: Event) -> None:
        is_next = not isinstance(event, Wanted)  # the room of one who waited for the load before it
        self._open(embedding, embedding.room, is_next=is_next)

    @performs(Do.OPEN_RIVAL)
    def open_rival(self, embedding: Embedding, event: Wanted) -> None:
        item = event.item.item
        count, withheld = self.num_slots_for(item.num_rows), self._leases.num_stranded
        if self._budget.spare(embedding.key, count, withheld):
            self._open(embedding, event.room, is_next=True)
        else:
            self.dismiss(item, event.item.attempt)
            full = Failure(FailureKind.BUSY, "the receive pool has no slots to spare")
            self.post(embedding, LoadFailed(full, event.room))

    def _open(self, embedding: Embedding, room: str, *, is_next: bool) -> None:
        want: Want = embedding.waiters[room]
        item = want.item
        if self.actor.is_lost(item.encoder):  # its loss was told before this room was opened
            reason = f"instance {item.encoder.instance_id} was lost"
            self.post(embedding, EncoderLost(Failure(FailureKind.LOST, reason), room))
            return
        if is_next and self._is_given_up(item.encoder):  # rooms that were open have heard of it
            self.post(embedding, EncoderLost(silence_of(item.encoder), room))
            return
        self._rooms.open(
            item.room,
            want.attempt,
            item.encoder,
            self,
            embedding.key,
            item.num_rows,
            want.deadline_s,
            want.gateway,
        )
        count = self.num_slots_for(item.num_rows)
        self._leases.join(Lease(item.room, count, item.encoder.instance_id))
        self._soon(self._pump_leases)

    @performs(Do.CANCEL_TRANSFER)
    def cancel_transfer(self, embedding: Embedding, event: Event) -> None:
        self._cancel(embedding.room)

    @performs(Do.CANCEL_RIVAL)
    def cancel_rival(self, embedding: Embedding, event: Event) -> None:
        self._cancel(embedding.rival)
        self.give_up(embedding.key)

    @performs(Do.END_RACE)
    def end_race(self, embedding: Embedding, event: Event) -> None:
        self.give_up(embedding.key)

    def _cancel(self, room: str) -> None:
        self._leases.strand(room)  # until the encoder's message, or a fence
        if (incoming := self._rooms.find(room)) is not None:
            self._rooms.post(incoming, CancelRequested())

    @performs(Do.CANCEL_ROOM)
    def cancel_room(self, embedding: Embedding, event: Unwanted) -> None:
        if event.room in embedding.loads:
            # The load was this waiter's own room, which nobody asks the encoder for any more: if
            # that request was lost, followers would wait for ever.  One of their rooms takes over.
            self._cancel(event.room)
        elif event.item is not None and event.room not in embedding.tried:
            self.dismiss(event.item.item, event.item.attempt)

    @performs(Do.CANCEL_FOLLOWERS)
    def cancel_followers(self, embedding: Embedding, event: Event) -> None:
        for want in map(embedding.waiters.__getitem__, embedding.untried()):
            self.dismiss(want.item, want.attempt)

    @performs(Do.KEEP_ROWS)
    def keep_rows(self, embedding: Embedding, event: Event) -> None:
        self._cache.add(embedding.key, len(embedding.slots))

    @performs(Do.NOTIFY_READY)
    def notify_ready(self, embedding: Embedding, event: Event) -> None:
        rows = self._lift(embedding.rows)  # once for all of them, and while they have it
        for want in list(embedding.waiters.values()):
            want.ready(want.item.room, rows)

    @performs(Do.NOTIFY_ONE)
    def notify_one(self, embedding: Embedding, event: Wanted) -> None:
        self._cache.touch(embedding.key)
        self.dismiss(event.item.item, event.item.attempt)
        event.item.ready(event.room, self._lift(embedding.rows))

    @performs(Do.NOTIFY_FAILED)
    def notify_failed(self, embedding: Embedding, event: Event) -> None:
        failure = embedding.failure
        assert failure is not None  # whatever orders this has said why
        for want in list(embedding.waiters.values()):
            is_media = failure.kind is FailureKind.MEDIA
            which = f"image {want.item.index + 1}: " if is_media else ""
            culprit = embedding.latest(want).encoder.instance_id
            want.failed(Failure(failure.kind, which + failure.reason, culprit))

    @performs(Do.RELEASE_ROWS)
    def release_rows(self, embedding: Embedding, event: Event) -> None:
        self._cache.remove(embedding.key)
        self.region.forget(embedding.slots)
        self.pool.give_back(embedding.slots)

    def ended(self, machine: Embedding) -> None:
        """Its waiters stay so until the outcomes that it has posted are done."""
        self.actor.mailbox.post(machine.key, self._forget, machine)

    def _forget(self, machine: Embedding) -> None:
        if self._embeddings.get(machine.key) is machine:
            del self._embeddings[machine.key]

    # --- consumer of rows -------------------------------------------------------------------------

    def grant(self, incoming: Incoming) -> Grant:
        return Grant(
            room=incoming.key,
            attempt=incoming.attempt,
            mm_hash=incoming.owner,
            region=self._rooms.descriptor(self.region, incoming),
            slots=incoming.slots,
            contract=self.contract,
            num_rows=incoming.num_rows,
            deadline_s=incoming.deadline_s,
            gateway=incoming.gateway,
            parts=self._rooms.parts(self.region, incoming),
            is_sharded=self.ranks.shards(incoming.num_rows),
        )

    def await_landing(self, incoming: Incoming) -> None:
        """Rows land where they are read."""

    def withdraw_lease(self, incoming: Incoming) -> None:
        self._leases.leave(incoming.key)

    async def publish(self, incoming: Incoming) -> Event:
        sum_up = partial(self.ranks.sums, incoming, self._rooms.transport_of(incoming))
        slot_nbytes = self.region.remote.slot_nbytes
        return await self._rooms.check_bytes(incoming, incoming.slots, slot_nbytes, sum_up)

    def release_slots(self, incoming: Incoming) -> None:
        self._return_slots(incoming.key, incoming.slots)
        embedding = self._embeddings.get(incoming.owner)
        if embedding is not None:
            self.post(embedding, SlotsReturned())
        self._soon(self._pump_leases)
        self._soon(self._pump_budget)

    def concluded(self, incoming: Incoming, failure: Failure | None) -> None:
        if failure is None:
            self._leases.settled(incoming.key)
        else:  # slots that it still owns stay in the peer's quota, and cannot be promised (F41)
            self._leases.strand(incoming.key)
        embedding = self._embeddings.get(incoming.owner)
        loads = embedding.loads if embedding is not None else ()
        if failure is None and incoming.key not in loads:
            self.release_slots(incoming)  # another one was first
        elif failure is None and embedding is not None:
            self._lateness.note(incoming, loads)
            rows = self.ranks.landed(incoming, self._rooms.transport_of(incoming))
            self.post(embedding, Loaded(rows, incoming.slots, incoming.key))
        elif failure is not None and embedding is not None and incoming.key in loads:
            self.post(embedding, _load_outcome(incoming, failure))
        self._soon(self._pump_leases)
        self._soon(self._pump_budget)


def _hear_nothing(*told: object) -> None:
    """Of a further room: the outcome comes by the waiter's own."""


def _load_outcome(incoming: Incoming, failure: Failure) -> Event:
    """Why a load ended without rows, as an event of EMBEDDING."""
    if failure.kind is FailureKind.LOST or failure == silence_of(incoming.peer):
        return EncoderLost(failure, incoming.key)
    if incoming.held:
        return LoadLost(failure, incoming.key)
    if failure.kind is FailureKind.DEADLINE:
        return LoadTimedOut(failure, incoming.key)
    return LoadFailed(failure, incoming.key)
