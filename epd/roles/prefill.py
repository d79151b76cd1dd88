"""The prefill role: prompts in, KV out.

A request with pictures waits until all slots for its rows are promised, then wants each item's
rows, and joins the batch when enough of its prompt can be computed without those that still load;
text-only requests go straight to the batch.  When its first chunk is scheduled, blocks are
asked for at the decode instance, so that asking and computing overlap; when the prompt is computed,
its blocks belong to the transfer.  If decode lives here too, the hand-over is a row of the table
and no bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from epd.config import PrefillConfig
from epd.fsm import request as fsm
from epd.fsm import transfer as transfer_fsm
from epd.fsm.kernel import Event, Machine
from epd.fsm.request import Do, Request
from epd.fsm.transfer import Manifest, Transfer
from epd.messages import (
    KvOffer,
    KvState,
    MediaItem,
    PrefillRequest,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
)
from epd.roles.base import Actor, Role, performs, receives
from epd.roles.embeddings import Embeddings, Want
from epd.roles.requests import Requests
from epd.roles.step import layouts_of
from epd.roles.transfers import Transfers
from epd.transport.base import Buffer, Received


class PrefillRole(Role[Request]):
    """Holds only the language model; producer of KV."""

    def __init__(
        self,
        actor: Actor,
        transfers: Transfers,
        requests: Requests,
        embeddings: Embeddings | None,
        config: PrefillConfig,
    ) -> None:
        super().__init__(actor)
        self._transfers = transfers
        self._requests = requests
        self._embeddings = embeddings  # None: a text-only model
        self._config = config
        self._handed_over: dict[str, Request] = {}
        self.draining = False
        requests.extend(self)
        requests.reports.related.append(self._transfers_of)

    def _transfers_of(self, request: Request) -> list[Machine | None]:
        items = getattr(request.message, "items", ())
        rooms = [self._transfers.find(i.room, transfer_fsm.Side.CONSUMER) for i in items]
        return [*rooms, self._transfers.find(request.kv_room, transfer_fsm.Side.PRODUCER)]

    def live(self) -> dict[str, int]:
        return {"kv_handed_over": len(self._handed_over)}

    # --- messages ---------------------------------------------------------------------------------

    @receives(PrefillRequest)
    def on_prefill_request(self, received: Received) -> None:
        message: PrefillRequest = received.message
        key = f"{message.request_id}/{message.attempt}"
        if self._requests.get(key) is not None:
            return  # repeated
        if self._requests.has_ended(key):
            self._dismiss_pictures(message)
            aborted = RequestAborted(message.request_id, message.attempt)
            self.actor.send(received.source, aborted)
            return
        kind, reason, retryable = self._refusal(message)
        if reason:
            self._dismiss_pictures(message)
            self.actor.send(
                message.gateway,
                RequestFailed(message.request_id, message.attempt, kind, reason, retryable),
            )
            return
        self.actor.send(message.gateway, RequestAccepted(message.request_id, message.attempt))
        request = Request(key, message, message.token_ids, self.actor.journal)
        remaining = message.sampling.max_tokens - message.num_emitted
        request.decode_here = self.actor.is_self(message.decode) or remaining <= 1
        request.rope = self._requests.engine.rope_positions(
            len(message.token_ids), layouts_of(message.items)
        )
        request.rope_delta = request.rope.delta
        self._requests.open(request)
        arrived = fsm.EmbeddingsRequired() if message.items else fsm.TextOnly()
        self._requests.fire(request, arrived)

    def _refusal(self, message: PrefillRequest) -> tuple[str, str, bool]:
        if self.draining:
            return "busy", "the prefill instance is draining", True
        if len(self._requests) >= self._config.max_queue:
            return "busy", f"the prefill instance has {self._config.max_queue} requests open", True
        if message.items and self._embeddings is None:
            return "media", "this model takes no pictures", False
        if self._embeddings is not None and (reason := self._embeddings.refusal(message.items)):
            return "capacity", reason, False
        num_tokens = len(message.token_ids)
        if self.actor.is_self(message.decode):
            num_tokens += message.sampling.max_tokens - message.num_emitted
        needed, size = self._requests.num_blocks_for(num_tokens), self._requests.pool.size
        if needed > size:
            reason = (
                f"{num_tokens} tokens need {needed} KV blocks and the instance has {size}; ask for "
                "fewer tokens, or raise engine.kv_nbytes"
            )
            return "capacity", reason, False
        return "", "", False

    # --- effects: embeddings ----------------------------------------------------------------------

    @performs(Do.ACQUIRE_EMBEDDINGS)
    def acquire_embeddings(self, request: Request, event: Event) -> None:
        message: PrefillRequest = request.message
        embeddings = self._embeddings
        assert embeddings is not None  # or the pictures would have been refused
        request.missing = {item.room for item in message.items}
        request.min_early_tokens = self._config.min_early_tokens

        def ready(room: str, rows: Any) -> None:
            self._requests.fire(request, fsm.EmbeddingReady(room, rows))

        def failed(item: MediaItem, kind: str, reason: str, retryable: bool) -> None:
            encoder = item.encoder.instance_id
            self._requests.fire(request, fsm.EmbeddingFailed(kind, reason, retryable, encoder))

        def granted() -> None:
            for item in message.items:
                if request.terminal:
                    return
                told = partial(failed, item)
                embeddings.want(Want(item, message.attempt, message.deadline_s, ready, told))
            self._requests.fire(request, fsm.EmbeddingsPromised())

        embeddings.promise(request.key, message.items, granted)

    @performs(Do.RELEASE_EMBEDDINGS)
    def release_embeddings(self, request: Request, event: Event) -> None:
        items = getattr(request.message, "items", ())
        if not items or self._embeddings is None:
            return
        request.rows.clear()
        missing, request.missing = request.missing, set()
        for item in items:
            wanted = self._embeddings.unwant(item.mm_hash, item.room)
            if not wanted and item.room in missing:  # its turn for slots never came
                self._embeddings.dismiss(item, request.attempt)
        self._embeddings.give_up(request.key)

    def _dismiss_pictures(self, message: PrefillRequest) -> None:
        """This attempt will not run here: its encoders need not keep rows until its deadline."""
        if self._embeddings is not None:
            for item in message.items:
                self._embeddings.dismiss(item, message.attempt)

    # --- effects: KV ------------------------------------------------------------------------------

    @performs(Do.OFFER_KV)
    def offer_kv(self, request: Request, event: Event) -> None:
        message: PrefillRequest = request.message
        request.kv_room = f"{request.key}/kv"
        offer = KvOffer(
            request.kv_room,
            message.request_id,
            message.attempt,
            len(message.token_ids),
            message.num_emitted,
            message.token_ids,
            message.sampling,
            self._requests.engine.kv_layout,
            message.gateway,
            message.deadline_s,
            message.items,
            message.reports,
        )
        self._transfers.open_producer(
            request.kv_room,
            message.attempt,
            message.decode,
            self,
            request.key,
            Manifest(None, len(message.token_ids), offers=True, offer=offer),
            message.deadline_s,
        )
        self.actor.send(message.decode, offer)

    @performs(Do.WITHDRAW_OFFER)
    def withdraw_offer(self, request: Request, event: Event) -> None:
        transfer = self._transfers.find(request.kv_room, transfer_fsm.Side.PRODUCER)
        if transfer is not None:
            withdrawn = transfer_fsm.SourceFailed("withdrawn", "prefill ended the request", False)
            self._transfers.fire(transfer, withdrawn)

    @performs(Do.HAND_OVER_KV)
    def hand_over_kv(self, request: Request, event: Event) -> None:
        transfer = self._transfers.find(request.kv_room, transfer_fsm.Side.PRODUCER)
        assert transfer is not None  # opened when the first chunk was scheduled
        self._handed_over[request.kv_room] = request
        blocks = request.block_table
        nbytes = len(blocks) * self._requests.engine.kv_layout.block_nbytes
        if self._requests.engine.kv_in_place:
            source = self._requests.engine.kv_views(blocks)
            self._transfers.fire(transfer, transfer_fsm.BytesReady(source, nbytes))
        else:
            self.actor.spawn(f"fetch {request.kv_room}", self._fetch_kv(transfer, blocks, nbytes))

    async def _fetch_kv(self, transfer: Transfer, blocks: tuple[int, ...], nbytes: int) -> None:
        """Bring blocks of a device's pool into host memory, and hand them over then.

        A transfer that ended meanwhile still owns them, and releases them when it is told.
        """
        try:
            source = await self._requests.engine.fetch_kv(blocks)
        except Exception as error:
            self.actor.fault(f"fetch {transfer.key}", error)
            failed = transfer_fsm.SourceFailed("engine", "the KV could not be read", True)
            self._transfers.fire(transfer, failed)
            self.release_source(transfer)
        else:
            self._transfers.fire(transfer, transfer_fsm.BytesReady(source, nbytes))

    # --- producer of KV ---------------------------------------------------------------------------

    def commit_state(self, transfer: Transfer) -> KvState | None:
        request = self._handed_over.get(transfer.key)
        if request is None:
            return None
        return KvState(
            num_tokens=len(request.prompt),
            first_token=request.output[0],
            rope_delta=request.rope_delta,
            num_layers=self._requests.engine.kv_layout.num_layers,
            num_blocks=len(request.block_table),
        )

    def granted(self, transfer: Transfer) -> None:
        """Blocks are computed in their turn, granted or not."""

    async def stage(self, transfer: Transfer) -> Sequence[Buffer] | None:
        """Blocks lie in registered memory; decode may hold the first ones already."""
        views: Sequence[Buffer] = transfer.source
        return views[transfer.grant.num_held :]

    def release_source(self, transfer: Transfer) -> None:
        request = self._handed_over.pop(transfer.key, None)
        if request is not None:
            self._requests.return_blocks(request.block_table)

    def concluded(self, transfer: Transfer, *, delivered: bool) -> None:
        request = self._requests.get(transfer.owner)
        if request is None:
            return
        peer = transfer.peer.instance_id
        failed = fsm.KvFailed(*transfer.failure, peer)
        self._requests.fire(request, fsm.KvDelivered() if delivered else failed)
