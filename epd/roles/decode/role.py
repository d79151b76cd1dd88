"""The decode role: KV in, tokens out.

An offer becomes a request that waits for blocks, then for the bytes.  It gets blocks for its prompt
and the next token; with images, whose rows are not here to compute it again, all it can need. The
grant names the blocks of the prompt that the next token sees, without those whose contents are here
already (`scheduling/prefix_keys.py`), but always the last.  The commit carries what decoding needs
besides KV: the first token, the rope delta (fault F26), and the numbers of tokens, blocks and
layers.  It also has the bytes of each part that was written while prefill computed.  They are
checked against the grant before a token is decoded.
"""

from __future__ import annotations

from functools import partial

from epd.config import DecodeConfig
from epd.failure import Failure, FailureKind
from epd.fsm.incoming import (
    BlocksLeased,
    CancelRequested,
    Incoming,
    PublishFailed,
    SlotsLeased,
)
from epd.fsm.kernel import Event, Machine
from epd.fsm.request import Do, KvFailed, KvOffered, KvWithdrawn, RemoteKvArrived, Request
from epd.keys import attempt_key
from epd.layouts import owned
from epd.messages import Address, CancelTransfer, Grant, KvLayout, KvOffer
from epd.roles.adapter_objection import adapter_objection
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.decode.landing import Landing
from epd.roles.incoming import IncomingRooms
from epd.roles.steps.record import rank_of
from epd.roles.steps.requests import Requests
from epd.scheduling.kv_order import KvOrder, held_first
from epd.transport.base import Received


class DecodeRole(Component[Request]):
    """Consumer of KV."""

    def __init__(
        self, actor: Actor, incoming: IncomingRooms, requests: Requests, config: DecodeConfig
    ) -> None:
        super().__init__(actor)
        self._rooms = incoming
        self._requests = requests
        self._config = config
        self._layout = requests.engine.kv_layout
        self._slot_nbytes = self._layout.whole.slot_nbytes  # of which rooms count the bytes
        self._landing = Landing(requests.engine)
        requests.kv.own.take_in()
        requests.on_reserved = self._reserved
        requests.extend(self)
        requests.reports.related.append(self._transfer_of)

    def live(self) -> dict[str, int]:
        return {"kv_landing": self._landing.num_leased}

    def _transfer_of(self, request: Request) -> list[Machine | None]:
        return [self._rooms.find(request.kv_room)]

    @receives(KvOffer)
    def on_kv_offer(self, received: Received) -> None:
        message: KvOffer = received.message
        source = Address(received.source, received.epoch, "")
        if self.actor.is_lost(source):  # nobody would tell of its loss again
            return
        key = attempt_key(message.request_id, message.attempt)
        if self._requests.get(key) is not None:
            return  # repeated
        if self._requests.has_ended(key):
            self.actor.send(
                received.source, CancelTransfer(room=message.room, attempt=message.attempt)
            )
            return
        if (refusal := self._refusal(message, source)) is not None:
            self.actor.send(
                received.source,
                CancelTransfer(room=message.room, attempt=message.attempt, failure=refusal),
            )
            return
        request = Request(
            key,
            message,
            message.token_ids,
            self.actor.journal,
            decode_here=True,
            rank=rank_of(message, self.clock.now_s()),
        )
        self._requests.open(request)
        self._rooms.open(
            message.room,
            message.attempt,
            source,
            self,
            key,
            message.num_prompt_tokens,
            message.first_token_deadline_s,
            message.gateway.instance_id,
        )
        self._requests.fire(request, KvOffered())

    def _refusal(self, message: KvOffer, source: Address) -> Failure | None:
        own = self._layout
        asked = message.gateway.instance_id, "decode", len(self._requests)
        if refusal := self.actor.refusal(*asked, self._config.max_queue):
            return refusal
        if message.layout.whole != own.whole:
            reason = f"KV layouts differ: prefill {message.layout}, decode {own}"
            return Failure(FailureKind.CONTRACT, reason)
        if reason := self._requests.kv.objection(message.layout):
            return Failure(FailureKind.CONTRACT, reason)
        if lacks := adapter_objection(self._requests.engine, message.adapter):
            return lacks
        if too_many := self._requests.objection(_num_tokens(message), "the decode instance"):
            return too_many
        num_received = self._num_received(message.num_prompt_tokens)
        if not (self._is_in_place(source) or self._landing.fits(num_received)):
            reason = (
                f"the KV of {message.num_prompt_tokens} tokens does not fit the decode instance's "
                "landing memory; raise engine.kv_landing_nbytes"
            )
            return Failure(FailureKind.CAPACITY, reason)
        return None

    def _is_in_place(self, peer: Address) -> bool:
        """Its bytes land in the pool's own blocks, once a registry has listed it."""
        return self._requests.kv.own.is_pool(self._rooms.transport_with(peer))

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.RESERVE_BLOCKS)
    def reserve_blocks(self, request: Request, event: Event) -> None:
        self._requests.reserve(request)

    def _reserved(self, request: Request, leased: BlocksLeased) -> None:
        incoming = self._rooms.find(request.kv_room)
        assert incoming is not None  # with its end it left the queue
        self._rooms.fire(incoming, leased)

    @performs(Do.CANCEL_TRANSFER)
    def cancel_transfer(self, request: Request, event: Event) -> None:
        incoming = self._rooms.find(request.kv_room)
        if incoming is not None:
            self._rooms.post(incoming, CancelRequested())

    # --- consumer of KV ---------------------------------------------------------------------------

    def grant(self, incoming: Incoming) -> Grant:
        assert self._landing.has(incoming.key) is not self._is_in_place(incoming.peer)
        num_slots = self._num_received(incoming.num_rows) * self._layout.slots_per_block
        region = self._requests.kv.written(self._producer(incoming))
        there = self._rooms.descriptor(region, incoming)
        return Grant(
            room=incoming.key,
            attempt=incoming.attempt,
            mm_hash="",
            region=there,
            slots=incoming.slots,
            contract=None,
            num_rows=incoming.num_rows,
            deadline_s=incoming.deadline_s,
            gateway=incoming.gateway,
            num_held=num_slots - len(incoming.slots),
            parts=self._rooms.parts(region, incoming),
            layout=self._layout,
            held=incoming.held_places,
        )

    def _num_received(self, num_tokens: int) -> int:
        """Blocks that come of a prompt, with those of its state, if none are here."""
        return len(self._requests.moved(num_tokens)) + self._layout.num_state_blocks

    def _producer(self, incoming: Incoming) -> KvLayout:
        """How its ranks share heads."""
        request = self._requests.get(incoming.owner)
        assert request is not None  # it waits for this room
        assert isinstance(request.message, KvOffer)
        return request.message.layout

    async def publish(self, incoming: Incoming) -> Event:
        kv, num_tokens = incoming.kv, incoming.num_rows
        num_blocks = len(self._requests.moved(num_tokens))
        expected = (num_tokens, num_blocks, self._layout.num_layers)
        if kv is None or (kv.num_tokens, kv.num_blocks, kv.num_layers) != expected:
            return PublishFailed(f"KV state {kv} does not match {expected}")
        size = self._layout.slots_per_block
        num_held = self._num_received(num_tokens) - len(incoming.slots) // size
        if not num_held <= kv.num_whole <= num_blocks:
            return PublishFailed(f"{kv.num_whole} blocks were not sent whole")
        order = KvOrder(num_held, kv.num_whole, num_blocks, size, self._layout.num_state_blocks)
        places = order.places(0, order.num_slots)
        slots = [incoming.slots[place - num_held * size] for place in places]
        land = partial(
            self._requests.kv.land,
            self._producer(incoming),
            self._rooms.transport_of(incoming),
            incoming.slots,
            self._received(incoming),
        )
        return await self._rooms.check_bytes(incoming, slots, self._slot_nbytes, land)

    def _received(self, incoming: Incoming) -> tuple[int, ...]:
        """Of its blocks, those that the transfer fills, in the order of places."""
        first, blocks = self._layout.num_state_blocks, incoming.blocks
        order = held_first(self._requests.moved(incoming.num_rows), incoming.held_places)
        rows = [blocks[first + place] for place in order[incoming.num_held :]]
        return (*rows, *blocks[:first])

    def await_landing(self, incoming: Incoming) -> None:
        received = self._received(incoming)
        if self._is_in_place(incoming.peer):
            self._can_land(incoming, self._landing.slots(received))
        else:
            self._landing.join(incoming.key, received)
            self._let_land()

    def _let_land(self) -> None:
        for room, slots in self._landing.grants():
            incoming = self._rooms.find(room)
            assert incoming is not None  # with its end it left the queue
            self._can_land(incoming, slots)

    def _can_land(self, incoming: Incoming, slots: tuple[int, ...]) -> None:
        self._rooms.post(incoming, SlotsLeased(slots, len(slots) * self._slot_nbytes))

    def withdraw_lease(self, incoming: Incoming) -> None:
        self._requests.leave_queue(incoming.owner)
        self._landing.leave(incoming.key)
        self._let_land()

    def release_slots(self, incoming: Incoming) -> None:
        self._requests.return_blocks(owned(self._take(incoming)) + incoming.ahead)

    def _take(self, incoming: Incoming) -> tuple[int, ...]:
        """Its blocks, which are another's from now on; where they landed is free."""
        self._landing.release(incoming.key)
        self._let_land()
        return incoming.blocks

    def concluded(self, incoming: Incoming, failure: Failure | None) -> None:
        request = self._requests.get(incoming.owner)
        assert request is not None  # it waits for this outcome, also when it was called off
        if failure is None:
            assert incoming.kv is not None  # publishing has looked at it
            outcome: Event = RemoteKvArrived(self._take(incoming), incoming.kv, incoming.ahead)
        elif failure.kind is FailureKind.WITHDRAWN:
            outcome = KvWithdrawn()
        else:
            outcome = KvFailed(failure.of(incoming.peer.instance_id))
        self._requests.post(request, outcome)


def _num_tokens(offer: KvOffer) -> int:
    """Tokens whose KV the request can ever need here."""
    return offer.num_prompt_tokens + offer.sampling.max_tokens - offer.num_emitted
