"""KV of a vLLM server for another one: a ticket, by which that one fetches it.

Theory of operation
-------------------
vLLM's NixlConnector moves KV by itself.  The server that has computed a prompt keeps its blocks for
a while, and answers with `kv_transfer_params`: a ticket.  The other server gets it beside the
prompt, and reads the blocks.  So what a room here moves from prefill to decode is a ticket, in
place of KV.  Every rule of a room holds for it: offer, grant, commit with a checksum, cancel.

A ticket is made by a server and read by a server; clients have no say in it.  One that is not used
costs the prefill server its blocks until their lease ends there.  No stream waits as long as that
for a token (`command.py`), so nothing is read that has become another prompt's.

Prefill samples the first token, and so does the server that decodes.  They must agree; if they do
not, the attempt fails, and the next one goes on behind the token that the client has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from epd.failure import Failure, FailureKind
from epd.frontend import JsonObject
from epd.fsm.incoming import BlocksLeased
from epd.fsm.kernel import Event
from epd.fsm.outgoing import BytesReady, KvSource, Outgoing
from epd.fsm.request import Do, FirstTokenSampled, RemoteKvArrived, Request, StepLaunched
from epd.groups.kv import KvRanks
from epd.messages import CancelTransfer, Grant, KvLayout, KvOffer, KvState
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.outgoing import OutgoingRooms, Staged
from epd.roles.prefill.kv_producer import KvProducer
from epd.scheduling.block_pool import BlockPool
from epd.transport.base import Received
from epd.vllm.requests import ServerRequests

if TYPE_CHECKING:
    from epd.roles.steps.requests import Requests, Reserved

NUM_TICKETS = 1024  # of requests that an instance decodes
MAX_NBYTES = 1 << 16  # of a ticket: 128,000 tokens in blocks of 16
LAYOUT = KvLayout(
    num_layers=1,
    num_parts=1,
    block_size=1 << 24,  # so a prompt has one
    num_kv_heads=1,
    head_dim=1,
    dtype="ticket",
    block_nbytes=MAX_NBYTES,
)
PREFILL_ALONE: JsonObject = {"do_remote_decode": True, "do_remote_prefill": False}


class TicketRequests(ServerRequests):
    """What prefill and decode share out."""

    def __init__(self, *made: object) -> None:
        super().__init__(*made)  # type: ignore[arg-type]
        self.pool = BlockPool(NUM_TICKETS)
        self.kv = KvRanks(self.engine, self.actor.ports.transfers, None)
        self.actor.ports.transfers.guard(self.kv.own.region)
        self.on_reserved: Reserved = lambda request, leased: None
        self._queue: dict[str, Request] = {}

    def live(self) -> dict[str, int]:
        return {**super().live(), "tickets": self.pool.num_leased + len(self._queue)}

    def moved(self, num_tokens: int) -> range:
        return range(LAYOUT.rows.count(num_tokens))

    def reserve(self, request: Request) -> None:
        self._queue[request.key] = request
        self.actor.mailbox.look("tickets", self._lease)

    def leave_queue(self, key: str) -> None:
        self._queue.pop(key, None)

    def return_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.give_back(blocks)
        self.actor.mailbox.look("tickets", self._lease)

    def _lease(self) -> None:
        while self._queue and (blocks := self.pool.take(1)) is not None:
            self.on_reserved(self._queue.pop(next(iter(self._queue))), BlocksLeased(blocks, 0))

    def body_of(self, request: Request) -> JsonObject:
        body = super().body_of(request)
        if not request.decode_here:
            sampling = cast("JsonObject", body["sampling_params"])
            least = min(1, cast("int", sampling["min_tokens"]))
            body["sampling_params"] = {**sampling, "max_tokens": 1, "min_tokens": least}
            body |= {"stream": False, "kv_transfer_params": PREFILL_ALONE}
        return body

    def first_failure(self, request: Request, event: Event) -> Failure | None:
        if not isinstance(event, FirstTokenSampled) or request.decode_here:
            return None
        nbytes = len(self.ticket_of(request))
        if not nbytes:
            reason = "the vLLM server keeps no KV: start it with the --kv-transfer-config printed"
            return Failure(FailureKind.INTERNAL, reason)
        if nbytes > MAX_NBYTES:
            reason = f"its KV is in too many blocks: they take {nbytes} bytes, at most {MAX_NBYTES}"
            return Failure(FailureKind.CAPACITY, reason)
        return None

    def ticket_of(self, request: Request) -> bytes:
        """Of a prompt that was computed here; empty: the server gave none."""
        params = self.answer_of(request).kv_transfer_params
        return msgspec.json.encode(params) if params else b""

    @performs(Do.START_DECODING)
    def start_decoding(self, request: Request, event: Event) -> None:
        """Of its own prompts the server decodes already."""
        if isinstance(event, RemoteKvArrived):
            (block,) = event.blocks
            (ticket,) = self.kv.own.region.views([block], MAX_NBYTES)
            body = self.body_of(request) | {"kv_transfer_params": msgspec.json.decode(ticket)}
            self.ask(request, body, [event.kv.first_token.token_id])
            self.post(request, StepLaunched(1, ahead=False))

    @performs(Do.RELEASE_BLOCKS)
    def release_blocks(self, request: Request, event: Event) -> None:
        self.return_blocks(request.blocks)


class TicketProducer(KvProducer):
    """What leaves is a ticket; it is there when the prompt is computed, all at once."""

    def __init__(self, actor: Actor, outgoing: OutgoingRooms, requests: TicketRequests) -> None:
        super().__init__(actor, outgoing, cast("Requests", requests))
        self._own = requests
        self._tickets: dict[str, bytes] = {}  # by room

    def live(self) -> dict[str, int]:
        return {"tickets_leaving": len(self._tickets)}

    @performs(Do.HAND_OVER_KV)
    def hand_over_kv(self, request: Request, event: Event) -> None:
        outgoing = self.find(request)
        assert outgoing is not None  # opened when its answer was asked for
        self._tickets[outgoing.key] = self._own.ticket_of(request).ljust(MAX_NBYTES)
        num_tokens, first = len(request.prompt), request.output[0]
        state = KvState(
            num_tokens=num_tokens,
            first_token=first,
            rope_delta=0,
            num_layers=1,
            num_blocks=1,
            num_whole=1,
        )
        self._rooms.post(outgoing, BytesReady(MAX_NBYTES, KvSource((), state)))

    def granted(self, outgoing: Outgoing) -> None:
        """There are no parts."""

    def hold_part(self, outgoing: Outgoing) -> None:
        """A ticket has no other owner."""

    async def stage(self, outgoing: Outgoing, grant: Grant) -> Staged:
        return Staged([self._tickets[outgoing.key]], grant.slots)

    def release_source(self, outgoing: Outgoing) -> None:
        self._tickets.pop(outgoing.key, None)


class WithoutKv(Component[Request]):
    """Of an instance whose server has no NixlConnector: it decodes what it prefills."""

    def find(self, request: Request) -> None:
        """No KV leaves."""

    @receives(KvOffer)
    def on_kv_offer(self, received: Received) -> None:
        offer: KvOffer = received.message
        failure = Failure(FailureKind.AWAY, "this vLLM server has no NixlConnector: it takes no KV")
        cancel = CancelTransfer(room=offer.room, attempt=offer.attempt, failure=failure)
        self.actor.send(received.source, cancel)

    @performs(
        *(Do.OFFER_KV, Do.WITHDRAW_OFFER, Do.PUSH_KV, Do.HAND_OVER_KV, Do.MOVE_KV),
        *(Do.RESERVE_BLOCKS, Do.CANCEL_TRANSFER),
    )
    def refuse(self, request: Request, event: Event) -> None:
        raise AssertionError(f"{request.key}: no KV comes to this vLLM server, or leaves it")
