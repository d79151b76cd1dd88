"""The producer of KV: what prefill computes moves to decode while it is being computed.

When a prompt's first chunk is scheduled, blocks are requested at the decode instance. As soon as it
has granted them, finished KV is sent, in the order of `scheduling/kv_order.py`.  Full blocks go
when their chunk has been computed; while the last chunk runs, one group of its layers after
another.  There is one write at a time; KV that becomes ready meanwhile goes with the next. So when
the first token is there, only the last layers are still to be sent.

Until then the request owns its blocks.  It may give them up (preempted, aborted) while a write
reads them, so a part has a reference of its own until it has landed.  With the first token the room
takes all blocks over (`KvSource`), and nothing here has them any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event
from epd.fsm.outgoing import BytesReady, KvSource, Manifest, Outgoing, PartReady, SourceFailed
from epd.fsm.request import Do, KvDelivered, KvFailed, LayersComputed, Request
from epd.groups.kv import Sent
from epd.layouts import PASSED, owned
from epd.messages import Grant, KvOffer, KvState, PrefillRequest
from epd.roles.base import Actor, Component, performs
from epd.roles.outgoing import OutgoingRooms, Spread, Staged
from epd.roles.steps.requests import Requests
from epd.scheduling.kv_order import KvOrder, held_first


class _Text(NamedTuple):
    """A prompt whose KV is sent: of a request that computes it, or of a room that has it."""

    num_blocks: int  # that decode needs, without those of its state
    table: tuple[int, ...]  # its blocks in the order in which they are counted
    num_whole: int | None  # blocks that were sent before its last chunk began, if it has


class KvProducer(Component[Request]):
    """Performs the effects of REQUEST on KV that leaves an instance."""

    def __init__(self, actor: Actor, outgoing: OutgoingRooms, requests: Requests) -> None:
        super().__init__(actor)
        self._rooms = outgoing
        self._requests = requests
        self._layout = requests.engine.kv_layout
        self._whole = self._layout.whole  # of which rooms count the bytes
        self._held: dict[str, dict[int, int]] = {}  # by room: parts, place in prompt to block
        requests.extend(self)

    def live(self) -> dict[str, int]:
        return {"kv_parts_held": len(self._held)}

    def find(self, request: Request) -> Outgoing | None:
        return self._rooms.find(request.kv_room)

    # --- effects of REQUEST -----------------------------------------------------------------------

    @performs(Do.OFFER_KV)
    def offer_kv(self, request: Request, event: Event) -> None:
        message = request.message
        assert isinstance(message, PrefillRequest)  # what came as KV is decoded here
        offer = KvOffer(
            room=request.kv_room,
            request_id=message.request_id,
            attempt=message.attempt,
            num_prompt_tokens=len(message.token_ids),
            num_emitted=message.num_emitted,
            token_ids=message.token_ids,
            sampling=message.sampling,
            layout=self._layout,
            gateway=message.gateway,
            deadline_s=message.deadline_s,
            items=message.items,
            reports=message.reports,
            scope=message.scope,
            first_token_deadline_s=message.first_token_deadline_s,
            is_suspect=message.is_suspect,
            adapter=message.adapter,
        )
        self._rooms.open(
            request.kv_room,
            message.attempt,
            message.decode,
            self,
            request.key,
            Manifest(None, len(message.token_ids), offer),
            message.first_token_deadline_s,
            message.gateway.instance_id,
        )
        self.actor.send(message.decode, offer)

    @performs(Do.WITHDRAW_OFFER)
    def withdraw_offer(self, request: Request, event: Event) -> None:
        if (outgoing := self.find(request)) is not None:
            failure = Failure(FailureKind.WITHDRAWN, "prefill ended the request")
            self._rooms.post(outgoing, SourceFailed(failure))

    @performs(Do.PUSH_KV)
    def push_kv(self, request: Request, event: Event) -> None:
        self._push(request, event if isinstance(event, LayersComputed) else None)

    def _push(self, request: Request, layers: LayersComputed | None = None) -> None:
        """Let decode have what is final now, if it has room for it already."""
        outgoing = self.find(request)
        if outgoing is None or outgoing.grant is None:
            return
        num_groups = 0
        num_tokens = request.num_computed if layers is None else layers.start
        num_full = self._num_full(outgoing, request, num_tokens)
        if layers is not None:
            num_groups = layers.num_layers // self._layout.layers_per_slot
            num_said = self._num_held(outgoing) + outgoing.ready_nbytes // self._whole.block_nbytes
            record = self._requests.record(request)
            if record.num_whole is None:  # computed again, it may begin before what was sent
                record.num_whole = max(num_full, num_said)
        order = self._order(outgoing, self._text_of(outgoing, request), num_full)
        if num_ready := order.num_ready(num_groups):
            self._rooms.post(outgoing, PartReady(num_ready * self._whole.slot_nbytes))

    @performs(Do.HAND_OVER_KV)
    def hand_over_kv(self, request: Request, event: Event) -> None:
        outgoing = self.find(request)
        assert outgoing is not None  # opened when the first chunk was scheduled
        num_blocks = len(self._requests.moved(len(request.prompt)))
        num_whole = self._requests.record(request).num_whole
        state = KvState(
            num_tokens=len(request.prompt),
            first_token=request.output[0],
            rope_delta=request.rope_delta,
            num_layers=self._layout.num_layers,
            num_blocks=num_blocks,
            num_whole=num_blocks if num_whole is None else num_whole,
            num_cached=request.num_cached or 0,
        )
        nbytes = (num_blocks + self._num_state_blocks(outgoing)) * self._whole.block_nbytes
        self._rooms.post(outgoing, BytesReady(nbytes, KvSource(request.block_table, state)))

    @performs(Do.MOVE_KV)
    def move_kv(self, request: Request, event: Event) -> None:
        """All is there already: the blocks wait for their grant in the room."""
        self.offer_kv(request, event)
        self.hand_over_kv(request, event)

    # --- the order of sending ---------------------------------------------------------------------

    def _num_held(self, outgoing: Outgoing) -> int:
        """Blocks that decode has already."""
        assert outgoing.grant is not None  # or nothing would be sent yet
        return outgoing.grant.num_held // self._layout.slots_per_block

    def _text_of(self, outgoing: Outgoing, request: Request) -> _Text:
        """Its blocks are the room's from the hand-over on."""
        num_tokens, num_whole = len(request.prompt), self._requests.record(request).num_whole
        return self._text_with(outgoing, num_tokens, request.block_table, num_whole)

    def _text_with(
        self, outgoing: Outgoing, num_tokens: int, blocks: tuple[int, ...], num_whole: int | None
    ) -> _Text:
        order, table = self._in_order(outgoing, num_tokens), self._by_place(blocks)
        if self._layout.rows.windowed:  # a prompt may have fewer places than decode needs, so far
            table = tuple([table[at] if at < len(table) else PASSED for at in order])
        return _Text(len(order), table, num_whole)

    def _in_order(self, outgoing: Outgoing, num_tokens: int) -> Sequence[int]:
        """Of the blocks that decode needs, their places in a table."""
        held = outgoing.grant.held if outgoing.grant is not None else ()
        return held_first(self._requests.moved(num_tokens), held)

    def _num_full(self, outgoing: Outgoing, request: Request, num_tokens: int) -> int:
        """Of them, in their order, those that so many tokens fill, and that are here."""
        num_owned = len(request.block_table) if request.has_blocks else 0
        num_full = min(self._layout.rows.num_full(num_tokens), num_owned)
        order = self._in_order(outgoing, len(request.prompt))
        return bisect_left(order, num_full, self._num_held(outgoing))

    def _text(self, outgoing: Outgoing) -> _Text | None:
        """None: its request has ended before the room had its KV."""
        if (kv := outgoing.kv) is not None:
            return self._text_with(outgoing, kv.state.num_tokens, kv.blocks, kv.state.num_whole)
        request = self._requests.get(outgoing.owner)
        return self._text_of(outgoing, request) if request is not None else None

    def _order(self, outgoing: Outgoing, text: _Text, num_full: int) -> KvOrder:
        """`num_full`: blocks that can be sent whole so far."""
        num_held = self._num_held(outgoing)
        num_blocks = text.num_blocks
        num_whole = num_full if text.num_whole is None else text.num_whole
        num_whole = min(max(num_whole, num_held), num_blocks)
        size, num_state_blocks = self._layout.slots_per_block, self._num_state_blocks(outgoing)
        return KvOrder(num_held, num_whole, num_blocks, size, num_state_blocks)

    def _num_state_blocks(self, outgoing: Outgoing) -> int:
        """Blocks that decode has for a state: other ones than here, where ranks share otherwise."""
        grant, info = outgoing.grant, self.actor.peer_info(outgoing.peer)
        granted = grant.layout if grant is not None else None
        theirs = granted or (info.kv_layout if info is not None else None)
        return (theirs or self._layout).num_state_blocks

    def _by_place(self, block_table: tuple[int, ...]) -> tuple[int, ...]:
        """Blocks as they are counted here: those of its state last."""
        first = self._layout.num_state_blocks
        return block_table[first:] + block_table[:first]

    def _places(self, outgoing: Outgoing, text: _Text, start: int, stop: int) -> list[int]:
        """What is sent as these bytes; all that is sent whole is in the order of places anyway."""
        order = self._order(outgoing, text, text.num_blocks)
        size = self._whole.slot_nbytes
        return order.places(start // size, stop // size)

    def _of_rows(self, text: _Text, places: Sequence[int]) -> list[int]:
        """Without those of its state, which are the last."""
        last = text.num_blocks * self._layout.slots_per_block
        return [place for place in places if place < last]

    def _indices(self, text: _Text, places: Sequence[int]) -> list[int]:
        """Of its blocks as they are counted here; a state is sent as one, whatever blocks decode
        has for it."""
        rows, size = self._of_rows(text, places), self._layout.slots_per_block
        found = list(dict.fromkeys([place // size for place in rows]))
        if len(rows) < len(places):
            found += range(text.num_blocks, text.num_blocks + self._layout.num_state_blocks)
        return found

    # --- producer of KV ---------------------------------------------------------------------------

    def granted(self, outgoing: Outgoing) -> None:
        """What was computed before the grant came need not wait for the next chunk."""
        request = self._requests.get(outgoing.owner)
        if request is not None:
            self._push(request)

    def hold_part(self, outgoing: Outgoing) -> None:
        """Own what is ready and has not landed, whatever the request does with its blocks."""
        text = self._text(outgoing)
        held = self._held.setdefault(outgoing.key, {})
        if text is None:  # what is ready was held when it became so
            return
        places = self._places(outgoing, text, outgoing.written_nbytes, outgoing.ready_nbytes)
        wanted = dict.fromkeys(self._indices(text, places))
        landed = [held.pop(index) for index in list(held) if index not in wanted]
        new = {i: text.table[i] for i in wanted if i not in held}
        self._requests.pool.share(new.values())
        held.update(new)
        self._requests.return_blocks(tuple(landed))

    def lease(self, outgoing: Outgoing) -> bool:
        """It is written from the pool, or from memory of the engine's own."""
        return False

    def release_slots(self, outgoing: Outgoing) -> None:
        """There are none."""

    async def stage(self, outgoing: Outgoing, grant: Grant) -> Staged | Spread | None:
        """The part's bytes: views of the pool on a CPU; of a device's where they lie, for a
        transport that reads it, or a copy in host memory.  Of groups what each rank has of them."""
        start = outgoing.written_nbytes
        if (text := self._text(outgoing)) is None:
            return None
        places = self._places(outgoing, text, start, start + outgoing.part_nbytes)
        size, held = self._layout.slots_per_block, self._held.get(outgoing.key, {})
        table = {**dict(enumerate(text.table)), **held}
        target = [grant.slots[place - grant.num_held] for place in places]
        if self._layout.ranks or (grant.layout is not None and grant.layout.ranks):
            num_slots = len(self._of_rows(text, places))
            source = [table[place // size] * size + place % size for place in places[:num_slots]]
            state = [table[i] for i in self._indices(text, places[num_slots:])]
            sent = Sent(source, target[:num_slots], state, target[num_slots:])
            return Spread(self._requests.kv.writes(sent, grant))
        source = [table[place // size] * size + place % size for place in places]
        in_place = self.actor.ports.transfers.takes_references(grant.region)
        return Staged(await self._requests.engine.fetch_kv(source, in_place=in_place), target)

    def release_source(self, outgoing: Outgoing) -> None:
        held = self._held.pop(outgoing.key, None)
        if held:
            self._requests.return_blocks(tuple(held.values()))
        if outgoing.kv is not None:
            self._requests.return_blocks(owned(outgoing.kv.blocks))

    def concluded(self, outgoing: Outgoing, failure: Failure | None) -> None:
        request = self._requests.get(outgoing.owner)
        if request is None:
            return
        if failure is None:
            self._requests.post(request, KvDelivered())
        else:
            self._requests.post(request, KvFailed(failure.of(outgoing.peer.instance_id)))
