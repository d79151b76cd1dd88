"""The prefill role: prompts in, KV out.

A request with images waits until all slots for its rows are promised, then for the rows.  It joins
the batch when enough of its prompt can be computed without the rows that still load; a text-only
request does at once.  What becomes of its KV is `kv_producer.py`'s business; if decode lives here
too, the hand-over is a row of the table and no bytes move.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from epd.config import PrefillConfig
from epd.failure import Failure, FailureKind
from epd.fsm.embedding import Want
from epd.fsm.kernel import Event, Machine
from epd.fsm.request import (
    Do,
    EmbeddingFailed,
    EmbeddingReady,
    EmbeddingsPromised,
    EmbeddingsRequired,
    Request,
    TextOnly,
)
from epd.keys import attempt_key
from epd.messages import (
    Address,
    CancelTransfer,
    MediaItem,
    PrefillRequest,
    RequestAborted,
    RequestFailed,
    RoomAdded,
    RoomWanted,
)
from epd.roles.adapter_objection import adapter_objection
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.incoming import IncomingRooms
from epd.roles.prefill.embeddings import Embeddings
from epd.roles.prefill.held_prompts import HeldPrompts
from epd.roles.steps.attempts import Attempts
from epd.roles.steps.record import rank_of
from epd.roles.steps.step import layouts_of
from epd.transport.base import Received


class LeavingKv(Protocol):
    """KV that leaves this instance."""

    def find(self, request: Request) -> Machine | None:
        """The transfer of its KV."""


class PrefillRole(Component[Request]):
    """Holds only the language model; producer of KV."""

    def __init__(
        self,
        actor: Actor,
        kv: LeavingKv,
        incoming: IncomingRooms,
        requests: Attempts,
        embeddings: Embeddings | None,
        config: PrefillConfig,
    ) -> None:
        super().__init__(actor)
        self._rooms = incoming
        self._requests = requests
        self._embeddings = embeddings  # None: a text-only model
        self._config = config
        self._kv = kv
        self.held = HeldPrompts(actor, requests)
        requests.extend(self)
        requests.reports.related.append(self._transfers_of)

    def _transfers_of(self, request: Request) -> list[Machine | None]:
        items = getattr(request.message, "items", ())
        rooms = [self._rooms.find(i.room) for i in items]
        return [*rooms, self._kv.find(request)]

    # --- messages ---------------------------------------------------------------------------------

    @receives(PrefillRequest)
    def on_prefill_request(self, received: Received) -> None:
        message: PrefillRequest = received.message
        key = attempt_key(message.request_id, message.attempt)
        if self._requests.get(key) is not None or self.actor.is_former(received):
            return  # repeated, or nobody's: whom it names, no registry may ever tell the end of
        if self._requests.has_ended(key):
            self._dismiss_images(message)
            aborted = RequestAborted(request_id=message.request_id, attempt=message.attempt)
            self.actor.send(received.source, aborted)
            return
        if (refusal := self._refusal(message)) is not None:
            self._dismiss_images(message)
            failed = RequestFailed(
                request_id=message.request_id, attempt=message.attempt, failure=refusal
            )
            self.actor.send(message.gateway, failed)
            return
        remaining = message.sampling.max_tokens - message.num_emitted
        layouts = layouts_of(message.items)
        rope = self._requests.engine.rope_positions(len(message.token_ids), layouts)
        request = Request(
            key,
            message,
            message.token_ids,
            self.actor.journal,
            decode_here=self.actor.is_self(message.decode) or remaining <= 1,
            lease_s=message.lease_s if self._requests.can_hold else 0.0,
            min_early_tokens=self._config.min_early_tokens,
            rank=rank_of(message, self.clock.now_s()),
            rope_delta=rope.delta,
        )
        self._requests.open(request, rope.positions)
        arrived = EmbeddingsRequired() if message.items else TextOnly()
        self._requests.fire(request, arrived)

    @receives(RoomAdded)
    def on_room_added(self, received: Received) -> None:
        message: RoomAdded = received.message
        if self.actor.is_former(received):
            return  # as above
        request = self._requests.get(attempt_key(message.request_id, message.attempt))
        if request is not None and self._embeddings is not None:
            for item in request.message.items[message.index : message.index + 1]:
                further = item.elsewhere(message.room, message.encoder)
                if self._embeddings.add_room(item.room, further, is_rival=message.is_rival):
                    return
        self.actor.send(message.encoder, CancelTransfer(room=message.room, attempt=message.attempt))

    def _refusal(self, message: PrefillRequest) -> Failure | None:
        asked = message.gateway.instance_id, "prefill", len(self._requests)
        if refusal := self.actor.refusal(*asked, self._config.max_queue):
            return refusal
        if message.items and self._embeddings is None:
            return Failure(FailureKind.MEDIA, "this model takes no images")
        if self._embeddings is not None and (reason := self._embeddings.refusal(message.items)):
            return Failure(FailureKind.CAPACITY, reason)
        if lacks := adapter_objection(self._requests.engine, message.adapter):
            return lacks
        num_tokens = len(message.token_ids)
        if self.actor.is_self(message.decode):
            num_tokens += message.sampling.max_tokens - message.num_emitted
        return self._requests.objection(num_tokens)

    # --- effects: embeddings ----------------------------------------------------------------------

    @performs(Do.ACQUIRE_EMBEDDINGS)
    def acquire_embeddings(self, request: Request, event: Event) -> None:
        message = request.message
        embeddings = self._embeddings
        assert embeddings is not None  # or the images would have been refused
        record = self._requests.record(request)

        def ready(room: str, rows: object) -> None:
            record.rows[room] = rows
            self._requests.post(request, EmbeddingReady(room))

        def failed(failure: Failure) -> None:
            self._requests.post(request, EmbeddingFailed(failure))

        def ask(
            item: MediaItem, encoder: Address, failure: Failure | None, waited_s: float
        ) -> None:
            wanted = RoomWanted(
                request_id=message.request_id,
                attempt=message.attempt,
                index=item.index,
                encoder=encoder,
                failure=failure,
                waited_s=waited_s,
            )
            self.actor.send(message.gateway, wanted)
            self.actor.doubt(message.gateway)  # whose answer may not come

        def granted() -> None:
            for item in message.items:
                if request.terminal:
                    return
                due = message.first_token_deadline_s, message.gateway.instance_id
                asked = partial(ask, item)
                embeddings.want(Want(item, message.attempt, *due, ready, failed, asked))
            self._requests.fire(request, EmbeddingsPromised())

        embeddings.promise(request.key, message.items, granted)

    @performs(Do.RELEASE_EMBEDDINGS)
    def release_embeddings(self, request: Request, event: Event) -> None:
        items = getattr(request.message, "items", ())
        if not items or self._embeddings is None:
            return
        self._requests.record(request).rows.clear()
        for item in items:
            wanted = self._embeddings.unwant(item.mm_hash, item.room)
            if not wanted and item.room in request.missing:  # its turn for slots never came
                self._embeddings.dismiss(item, request.attempt)
        self._embeddings.give_up(request.key)

    def _dismiss_images(self, message: PrefillRequest) -> None:
        """This attempt will not run here: its encoders need not keep rows until its deadline."""
        if self._embeddings is not None:
            for item in message.items:
                self._embeddings.dismiss(item, message.attempt)
