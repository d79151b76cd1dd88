"""The encode role: takes compressed images, makes rows and delivers them to granted rooms.

A request brings an image and a room.  The room is an OUTGOING (its consumer grants slots on its own
time); the image's hash is an ENCODING, which all rooms with that hash join.  Rows that were made
before are found in a tier (`row_tiers`).  Decode and resize run on pool threads, beside the device.
Batches are taken in order of arrival under a budget of patches, one at a time on the device's
launch thread.  When rows are resident, every room gets an event and goes its own way.  Rows that a
write cannot read where they lie go through the send ring (`send_ring`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

from epd.config import EncodeConfig, Timing
from epd.engine.base import EncodeFailure, Patches, Rows, VisionEngine
from epd.errors import MediaError
from epd.failure import Failure, FailureKind
from epd.fsm import encoding as encoding_fsm
from epd.fsm.encoding import Do, Encoding
from epd.fsm.kernel import Event
from epd.fsm.outgoing import BytesReady, CancelReceived, Manifest, Outgoing, SourceFailed
from epd.groups.asks import RankLost
from epd.messages import (
    AbortEncode,
    Address,
    EncodeAccepted,
    EncodeRejected,
    EncodeRequest,
    RequestFailed,
    RowsKept,
)
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.cache_events import CachePublisher
from epd.roles.encode.askers import Asker, Askers
from epd.roles.encode.row_producer import RowProducer
from epd.roles.encode.row_tiers import RowTiers, rows_of
from epd.roles.encode.send_ring import SendRing
from epd.roles.outgoing import OutgoingRooms
from epd.scheduling.run_ahead import RunAhead
from epd.scheduling.vision_batching import next_batch
from epd.transport.base import Received


class EncodeRole(Component[Encoding]):
    """Holds only the vision tower."""

    fires = Encoding

    def __init__(
        self,
        actor: Actor,
        outgoing: OutgoingRooms,
        engine: VisionEngine,
        config: EncodeConfig,
        timing: Timing,
        events: CachePublisher,
        *,
        encodes: bool = True,
        num_ranks: int = 1,
    ) -> None:
        """`encodes`: False where the engine has no tower, and rows can only be found.  `num_ranks`:
        that share out a batch."""
        super().__init__(actor)
        self.events = events
        self._encodes = encodes
        self._rooms = outgoing
        self._engine = engine
        self._config = config
        self._timing = timing
        self._num_ranks = num_ranks
        self.encodings: dict[str, Encoding] = {}
        self._busy: dict[str, Encoding] = {}  # those that are at work, or have rooms
        self._prepared: dict[str, Encoding] = {}
        self.tiers = RowTiers(actor, engine, config, events, self)
        self.extend(self.tiers)
        device_nbytes = self.tiers.books.device.order.capacity
        self._ahead = RunAhead(
            device_nbytes, self._is_granted, self._may_begin, self._claim, config.pixels_nbytes
        )
        has_ring = encodes and config.send_buffer_nbytes  # what is only found is used where it is
        ring = SendRing(actor.ports.transfers, engine, config) if has_ring else None
        self.producer = RowProducer(
            actor, outgoing, engine, ring, self._take_turns, self._close_room
        )
        self.num_encoded = 0
        self._num_arrived = 0
        self._askers = Askers(actor, timing)
        self._num_batches = 0  # under way
        self._hands = actor.hands
        self._hands.on_free.append(partial(actor.mailbox.look, "turns", self._take_turns))

    def live(self) -> dict[str, int]:
        return {
            "encodings": sum(not e.at_rest for e in self._busy.values()),
            "encoding_rooms": sum(len(e.rooms) for e in self._busy.values()),
            "encode_askers": len(self._askers),
            "prepared": len(self._prepared),
            "encodes_deferred": len(self._ahead),
            "encode_run_ahead": self._ahead.used,
            "pixels_nbytes": self._ahead.pixels_used,
            **self.producer.live(),
        }

    def fired(self, machine: Encoding, event: Event) -> None:
        super().fired(machine, event)
        is_idle = machine.at_rest and not machine.rooms
        if not (machine.terminal or is_idle):
            self._busy[machine.key] = machine
        elif self._busy.get(machine.key) is machine:
            del self._busy[machine.key]
        if machine.is_suspect and (machine.terminal or machine.rows is not None):
            self._hands.release(machine.key)
        if is_idle:
            copies = not isinstance(event, encoding_fsm.CopyFailed | encoding_fsm.CopyTimedOut)
            self.actor.mailbox.look("tiers", partial(self.tiers.make_room, copies))

    # --- messages ---------------------------------------------------------------------------------

    @receives(EncodeRequest)
    def on_encode_request(self, received: Received) -> None:
        message: EncodeRequest = received.message
        if self.actor.is_former(received):
            return  # nobody's: whom it names, no registry may ever tell the end of
        if message.room in self._askers:  # repeated: its first copy is at work
            self._accept(received)
            return
        engine = self._engine if self._encodes else None
        if refusal := self._askers.refusal(received, self._config.max_queue, engine):
            rejected = EncodeRejected(
                request_id=message.request_id,
                attempt=message.attempt,
                room=message.room,
                failure=refusal,
            )
            self.actor.send(received.source, rejected)
            return
        self._accept(received)
        outgoing = self._open_room(message, received.source)
        if outgoing is not None and outgoing.terminal:
            return  # its cancel came first (F42)
        source = Address(received.source, received.epoch, "")
        asked = message.request_id, message.attempt, source, message.mm_hash, message.reports
        asker = Asker(*asked, keeps=outgoing is None)
        self._askers.add(message.room, asker)
        encoding = self.encodings.get(message.mm_hash)
        if encoding is None:
            self._num_arrived += 1
            encoding = Encoding(
                message.mm_hash,
                received.payloads[0],
                message.grid_thw,
                self.actor.journal,
                num_rows=message.num_rows,
                pixels_nbytes=message.pixels_nbytes if self._encodes else 0,
                clip=message.clip,
                bounds=message.bounds,
                adapter=message.adapter,
                arrival=self._num_arrived,
                stored=self.tiers.has_storage,
                encodes=self._encodes,
            )
            self.encodings[message.mm_hash] = encoding
            self.tiers.books.miss()
        self.fire(encoding, encoding_fsm.Requested(message.room, message.is_suspect))
        self._take_turns()  # its grant may have been faster

    def _accept(self, received: Received) -> None:
        room, attempt = received.message.room, received.message.attempt
        self.actor.send(received.source, EncodeAccepted(room=room, attempt=attempt))

    def _open_room(self, message: EncodeRequest, gateway: str) -> Outgoing | None:
        if message.consumer is None:
            return None
        asked = message.room, message.attempt, message.consumer, self.producer, message.mm_hash
        manifest = Manifest(self._engine.contract, message.num_rows)
        return self._rooms.open(*asked, manifest, message.first_token_deadline_s, gateway)

    @receives(AbortEncode)
    def on_abort_encode(self, received: Received) -> None:
        """For a consumer that may be out of reach; rooms of its own, so none needs a tombstone."""
        room: str = received.message.room
        outgoing = self._rooms.find(room)
        if outgoing is not None:
            self._rooms.fire(outgoing, CancelReceived())
        elif (asker := self._askers.keeper(room)) is not None:
            self._close_kept(room, asker)

    def peer_lost(self, peer: Address) -> None:
        """Of a gateway: rooms that no consumer has granted slots for end with who asked for them;
        the others with their transfers."""
        for room, asker in self._askers.of(peer):
            outgoing = self._rooms.find(room)
            if asker.keeps:
                self._close_kept(room, asker)
            elif outgoing is not None and outgoing.grant is None:
                lost = Failure(FailureKind.AWAY, "the encoder does not hear the gateway")
                self._rooms.call_off(room, lost)

    def _close_kept(self, room: str, asker: Asker) -> None:
        encoding = self.encodings.get(asker.mm_hash)
        self._report(room, encoding)
        if encoding is not None:
            self.post(encoding, encoding_fsm.RoomClosed(room))

    # --- how far it runs ahead --------------------------------------------------------------------

    @performs(Do.AWAIT_TURN)
    def await_turn(self, encoding: Encoding, event: Event) -> None:
        self._ahead.join(encoding, self._nbytes_of(encoding), encoding.pixels_nbytes)
        self._take_turns()
        if encoding in self._ahead:
            self.actor.counters["encodes_deferred"] += 1

    @performs(Do.COUNT_AHEAD)
    def count_ahead(self, encoding: Encoding, event: Event) -> None:
        self._ahead.count(encoding, self._nbytes_of(encoding))

    @performs(Do.LEAVE_AHEAD)
    def leave_ahead(self, encoding: Encoding, event: Event) -> None:
        self._ahead.leave(encoding)
        self._take_turns()

    @performs(Do.FREE_PIXELS)
    def free_pixels(self, encoding: Encoding, event: Event) -> None:
        self._ahead.free_pixels(encoding)
        self._take_turns()

    def _take_turns(self) -> None:
        for encoding in self._ahead.turns():
            self.post(encoding, encoding_fsm.TurnCame())

    def _may_begin(self, encoding: Encoding) -> bool:
        """Suspects are made one at a time."""
        return not encoding.is_suspect or self._hands.may_take(encoding.key)

    def _claim(self, encoding: Encoding) -> None:
        if encoding.is_suspect:
            self._hands.claim(encoding.key)

    def _nbytes_of(self, encoding: Encoding) -> int:
        return encoding.num_rows * self._engine.contract.row_nbytes

    def _is_granted(self, encoding: Encoding) -> bool:
        found = map(self._rooms.find, encoding.rooms)
        return any(outgoing is not None and outgoing.grant is not None for outgoing in found)

    # --- effects of ENCODING ----------------------------------------------------------------------

    @performs(Do.START_PREPROCESS)
    async def start_preprocess(self, encoding: Encoding, event: Event) -> Event:
        try:
            patches = await self._engine.preprocess(
                encoding.image,
                encoding.expected,
                encoding.clip,
                encoding.bounds,
                partial(self._hands.take, [encoding.key]),
            )
            patches = replace(patches, adapter=encoding.adapter)
        except MediaError as error:
            self.actor.log.info(
                "an image is refused", key=encoding.key, reason=error, cause=error.__cause__
            )
            return encoding_fsm.PreprocessFailed(str(error))
        except Exception as error:
            self.actor.fault(f"preprocess {encoding.key}", error)
            return encoding_fsm.PreprocessCrashed(f"the image could not be processed: {error!r}")
        finally:
            self._hands.leave([encoding.key])
        return encoding_fsm.PreprocessSucceeded(patches)

    @performs(Do.ENQUEUE)
    def enqueue(self, encoding: Encoding, event: Event) -> None:
        self._prepared[encoding.key] = encoding
        self.actor.mailbox.put("vision batches", self._start_batches)  # with what else has come

    @performs(Do.DEQUEUE)
    def dequeue(self, encoding: Encoding, event: Event) -> None:
        self._prepared.pop(encoding.key, None)

    def _start_batches(self) -> None:
        """While there may be one more under way, and there is one."""
        while self._num_batches < self._engine.max_batches and (batch := self._next_batch()):
            self._num_batches += 1
            patches = [cast(Patches, encoding.patches) for encoding in batch]  # its own
            for encoding in batch:
                self.fire(encoding, encoding_fsm.BatchStarted())
            work = self._encode(batch, patches)
            self.actor.spawn("vision batch", work, partial(self._end_batch, batch))

    def _end_batch(self, batch: list[Encoding], outcomes: list[Event]) -> None:
        try:
            for encoding, outcome in zip(batch, outcomes, strict=True):
                self.fire(encoding, outcome)
        finally:
            self._num_batches -= 1
            self._hands.leave([encoding.key for encoding in batch])
            self._start_batches()

    def _next_batch(self) -> list[Encoding]:
        """Taken from those that are prepared."""
        line = []
        for encoding in list(self._prepared.values()):
            try:
                patches = cast(Patches, encoding.patches)
                line.append((encoding.arrival, encoding.key, int(patches.num_patches)))
            except Exception as error:  # of this one alone
                self.actor.fault(f"plan {encoding.key}", error)
                self.fire(encoding, encoding_fsm.EncodeFailed(f"no batch can have it: {error!r}"))
        most, is_behind = self._config.max_batch_patches, self._num_batches > 0
        keys = next_batch(line, most, self._num_ranks, is_behind=is_behind)
        return [self._prepared.pop(key) for key in keys]

    async def _encode(self, batch: list[Encoding], patches: list[Patches]) -> list[Event]:
        self._hands.take([one.key for one in batch])  # not before, lest an end in between counts
        expected_s = self._engine.patch_s * sum(one.num_patches for one in patches)
        try:
            with self.actor.progress.batches.work(expected_s or None):
                results = await self._engine.encode(patches)
        except RankLost as lost:  # this instance ends, as it should
            return [encoding_fsm.EncodeFailed(str(lost)) for _ in patches]
        except Exception as error:
            self.actor.fault("vision batch", error)
            return [encoding_fsm.EncodeFailed(f"the vision batch failed: {error}") for _ in patches]
        self.num_encoded += sum(isinstance(result, Rows) for result in results)
        return [
            encoding_fsm.EncodeFailed(result.reason)
            if isinstance(result, EncodeFailure)
            else encoding_fsm.EncodeSucceeded(result)
            for result in results
        ]

    @performs(Do.FILL_ROOMS)
    def fill_rooms(self, encoding: Encoding, event: Event) -> None:
        self.actor.times.note_stages(encoding)
        for room in list(encoding.rooms):
            self._fill(encoding, room)

    @performs(Do.FILL_ONE)
    def fill_one(self, encoding: Encoding, event: encoding_fsm.Requested) -> None:
        self.tiers.books.hit(encoding.key)
        self._fill(encoding, event.room)

    def _fill(self, encoding: Encoding, room: str) -> None:
        outgoing = self._rooms.find(room)
        if outgoing is not None:
            rows = rows_of(encoding)
            self.producer.sources[room] = rows
            self._rooms.post(outgoing, BytesReady(rows.nbytes))
        elif (asker := self._askers.keeper(room)) is not None:
            self.actor.send(
                asker.gateway,
                RowsKept(request_id=asker.request_id, attempt=asker.attempt, room=room),
            )
            self._close_kept(room, asker)

    @performs(Do.FAIL_ROOMS)
    def fail_rooms(self, encoding: Encoding, event: Event) -> None:
        failure = encoding.failure
        assert failure is not None  # whatever orders this has said why
        for room in list(encoding.rooms):
            asker = self._askers.keeper(room)
            self._report(room, encoding)
            if asker is not None:
                failed = RequestFailed(
                    request_id=asker.request_id, attempt=asker.attempt, failure=failure
                )
                self.actor.send(asker.gateway, failed)
            outgoing = self._rooms.find(room)
            if outgoing is not None:
                self._rooms.post(outgoing, SourceFailed(failure))
            self.post(encoding, encoding_fsm.RoomClosed(room))  # a late one pins no rows

    @performs(Do.ARM_OUTCOME)
    def arm_outcome(self, encoding: Encoding, event: Event) -> None:
        self.arm(encoding, self._timing.first_token_timeout_s, encoding_fsm.EncodeTimedOut())

    @performs(Do.REPORT_HANG)
    def report_hang(self, encoding: Encoding, event: Event) -> None:
        self.actor.counters["device_hangs"] += 1
        self.actor.log.warning("the vision tower does not answer", mm_hash=encoding.key)

    def ended(self, machine: Encoding) -> None:
        if self.encodings.get(machine.key) is machine:
            del self.encodings[machine.key]

    # --- rooms ------------------------------------------------------------------------------------

    def _close_room(self, outgoing: Outgoing) -> None:
        encoding = self.encodings.get(outgoing.owner)
        self._report(outgoing.key, encoding)
        if encoding is not None and outgoing.key in encoding.rooms:
            self.post(encoding, encoding_fsm.RoomClosed(outgoing.key))

    def _report(self, room: str, encoding: Encoding | None) -> None:
        self._askers.closed(room, encoding, self._rooms.find(room))
