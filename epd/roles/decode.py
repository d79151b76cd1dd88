"""The decode role: KV in, tokens out.

An offer becomes a request that waits for blocks, then for the bytes.  It gets blocks for its prompt
and the next token; with pictures, whose rows are not here to compute it again, all it can need.
The grant names the blocks of the prompt, without the first ones if their contents are here already
(`scheduling/prefix_keys.py`), but always the last; the commit carries what decoding needs besides
KV: the first token, the rope delta (fault F26), the number of tokens, blocks and layers, and the
bytes of each part that was written while prefill computed, which are checked against what was
granted before a single token is decoded.
"""

from __future__ import annotations

from epd.config import DecodeConfig
from epd.failure import Failure, FailureKind
from epd.fsm import request as fsm
from epd.fsm import transfer as transfer_fsm
from epd.fsm.kernel import Event, Machine
from epd.fsm.request import Do, Request
from epd.fsm.transfer import Transfer
from epd.messages import Address, CancelTransfer, Grant, KvOffer, KvState
from epd.roles.base import Actor, Role, performs, receives
from epd.roles.landing import Landing
from epd.roles.requests import Requests
from epd.roles.transfers import Transfers
from epd.scheduling.kv_order import KvOrder
from epd.transport.base import Received


class DecodeRole(Role[Request]):
    """Consumer of KV."""

    def __init__(
        self, actor: Actor, transfers: Transfers, requests: Requests, config: DecodeConfig
    ) -> None:
        super().__init__(actor)
        self._transfers = transfers
        self._requests = requests
        self._config = config
        self._layout = requests.engine.kv_layout
        self._landing = Landing(requests.engine, requests.return_blocks)
        requests.extend(self)
        requests.reports.related.append(self._transfer_of)

    def live(self) -> dict[str, int]:
        return {"kv_landing": self._landing.num_leased}

    def _transfer_of(self, request: Request) -> list[Machine | None]:
        return [self._transfers.find(request.kv_room, transfer_fsm.Side.CONSUMER)]

    @receives(KvOffer)
    def on_kv_offer(self, received: Received) -> None:
        message: KvOffer = received.message
        source = Address(received.source, received.epoch, "")
        if self.actor.is_lost(source):  # nobody would tell of its loss again
            return
        key = f"{message.request_id}/{message.attempt}"
        if self._requests.get(key) is not None:
            return  # repeated
        if self._requests.has_ended(key):
            self.actor.send(received.source, CancelTransfer(message.room, message.attempt))
            return
        if (refusal := self._refusal(message)) is not None:
            self.actor.send(received.source, CancelTransfer(message.room, message.attempt, refusal))
            return
        request = Request(key, message, message.token_ids, self.actor.journal)
        request.kv_room = message.room
        request.decode_here = True
        self._requests.open(request)
        transfer = self._transfers.open_consumer(
            message.room,
            message.attempt,
            source,
            self,
            key,
            message.first_token_deadline_s,
        )
        transfer.meta = message
        self._requests.fire(request, fsm.KvOffered())

    def _refusal(self, message: KvOffer) -> tuple[str, str, bool] | None:
        """Kind, reason, and whether another attempt may do better."""
        own = self._layout
        busy = self.actor.refusal("decode", len(self._requests), self._config.max_queue)
        if busy:
            return "busy", busy, True
        if message.layout != own:
            return "contract", f"KV layouts differ: prefill {message.layout}, decode {own}", False
        num_tokens = _num_tokens(message)
        needed, size = self._requests.num_blocks_for(num_tokens), self._requests.pool.size
        if needed > size:
            reason = (
                f"{num_tokens} tokens need {needed} KV blocks and the decode instance has {size}; "
                "ask for fewer tokens, or raise engine.kv_nbytes"
            )
            return "capacity", reason, False
        if not self._landing.fits(self._prompt_blocks(message)):
            reason = (
                f"the KV of {message.num_prompt_tokens} tokens does not fit the decode instance's "
                "landing memory; raise engine.kv_landing_nbytes"
            )
            return "capacity", reason, False
        return None

    def _prompt_blocks(self, offer: KvOffer) -> int:
        return self._requests.num_blocks_for(offer.num_prompt_tokens)

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.RESERVE_BLOCKS)
    def reserve_blocks(self, request: Request, event: Event) -> None:
        def leased(blocks: tuple[int, ...], num_held: int) -> None:
            transfer = self._transfers.find(request.kv_room, transfer_fsm.Side.CONSUMER)
            assert transfer is not None  # with its end it left the line
            assert isinstance(request.message, KvOffer)  # it came by one
            received = range(num_held, self._prompt_blocks(request.message))
            transfer.nbytes = len(received) * self._layout.block_nbytes
            self._landing.lease(request.kv_room, blocks, received, ready)

        def ready(slots: tuple[int, ...]) -> None:
            transfer = self._transfers.find(request.kv_room, transfer_fsm.Side.CONSUMER)
            assert transfer is not None  # as before
            self._transfers.fire(transfer, transfer_fsm.SlotsLeased(slots))

        self._requests.reserve(request, leased)

    @performs(Do.CANCEL_TRANSFER)
    def cancel_transfer(self, request: Request, event: Event) -> None:
        transfer = self._transfers.find(request.kv_room, transfer_fsm.Side.CONSUMER)
        if transfer is not None:
            self._transfers.fire(transfer, transfer_fsm.CancelRequested())

    # --- consumer of KV ---------------------------------------------------------------------------

    def grant(self, transfer: Transfer) -> Grant:
        offer: KvOffer = transfer.meta
        return Grant(
            transfer.key,
            transfer.attempt,
            "",
            self._transfers.descriptor(self._requests.region, transfer.peer),
            transfer.slots,
            None,
            offer.num_prompt_tokens,
            offer.first_token_deadline_s,
            self._prompt_blocks(offer) * self._layout.slots_per_block - len(transfer.slots),
        )

    async def publish(self, transfer: Transfer) -> Event:
        kv: KvState | None = transfer.kv
        offer: KvOffer = transfer.meta
        num_blocks = self._prompt_blocks(offer)
        expected = (offer.num_prompt_tokens, num_blocks, self._layout.num_layers)
        if kv is None or (kv.num_tokens, kv.num_blocks, kv.num_layers) != expected:
            return transfer_fsm.PublishFailed(f"KV state {kv} does not match {expected}")
        size = self._layout.slots_per_block
        num_held = num_blocks - len(transfer.slots) // size
        if not num_held <= kv.num_whole <= num_blocks:
            return transfer_fsm.PublishFailed(f"{kv.num_whole} blocks were not sent whole")
        order = KvOrder(num_held, kv.num_whole, num_blocks, size)
        places = order.places(0, order.num_slots)
        slots = [transfer.slots[place - num_held * size] for place in places]
        checked = await self._transfers.check_bytes(transfer, self._requests.region, slots)
        if isinstance(checked, transfer_fsm.Published):
            self._requests.region.views((), 0)  # a look: the engine reads the memory alone
            await self._landing.land(transfer.key)
        return checked

    def release_slots(self, transfer: Transfer) -> None:
        self._landing.release(transfer.key)

    def withdraw_lease(self, transfer: Transfer) -> None:
        self._requests.leave_line(transfer.key)
        self._landing.leave(transfer.key)

    def concluded(self, transfer: Transfer, *, delivered: bool) -> None:
        request = self._requests.get(transfer.owner)
        assert request is not None  # it waits for this outcome, also when it was called off
        if delivered:
            blocks = self._landing.take(transfer.key)
            outcome: Event = fsm.RemoteKvArrived(blocks, transfer.kv)
        elif transfer.failure[0] == "withdrawn":
            outcome = fsm.KvWithdrawn()
        else:
            kind, reason, _ = transfer.failure
            failure = Failure(FailureKind(kind or "cancelled"), reason, transfer.peer.instance_id)
            outcome = fsm.KvFailed(failure)
        self._requests.fire(request, outcome)


def _num_tokens(offer: KvOffer) -> int:
    """Tokens whose KV the request can ever need here."""
    return offer.num_prompt_tokens + offer.sampling.max_tokens - offer.num_emitted
