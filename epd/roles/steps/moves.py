"""What an instance that drains decodes goes on elsewhere, from the KV that is here.

The gateway has chosen where, and numbered another attempt for it. When the steps of the former one
have ended, that attempt inherits its blocks, and offers and hands them over as prefill does with a
prompt. So what decodes it then takes it as any KV: nothing is computed again. The last token goes
with the KV, so its client waits for the transfer before that token and for a step behind it.
"""

from __future__ import annotations

from typing import Protocol

from epd.engine.base import LanguageEngine
from epd.failure import Failure, FailureKind
from epd.fsm.kernel import Event
from epd.fsm.request import Do, KvInherited, MoveRequested, Request
from epd.keys import attempt_key
from epd.layouts import owned
from epd.messages import Address, MoveRequest, PrefillRequest, RequestFailed
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.steps.contents import Contents
from epd.roles.steps.record import Record
from epd.roles.steps.token_outbox import TokenOutbox
from epd.transport.base import Received


class AttemptsHere(Protocol):
    """Whose blocks they are."""

    engine: LanguageEngine

    def get(self, key: str) -> Request | None: ...

    def has_ended(self, key: str) -> bool: ...

    def record(self, request: Request) -> Record: ...

    def open(self, request: Request) -> None: ...

    def fire(self, machine: Request, event: Event) -> None: ...

    def post(self, machine: Request, event: Event) -> None: ...

    def return_blocks(self, blocks: tuple[int, ...]) -> None: ...


class Moves(Component[Request]):
    """A part of `Requests`."""

    def __init__(
        self, actor: Actor, requests: AttemptsHere, contents: Contents, outbox: TokenOutbox
    ) -> None:
        super().__init__(actor)
        self._requests = requests
        self._contents = contents
        self._outbox = outbox

    @receives(MoveRequest)
    def on_move_request(self, received: Received) -> None:
        move: MoveRequest = received.message
        key = attempt_key(move.request_id, move.attempt)
        is_known = self._requests.get(key) is not None or self._requests.has_ended(key)
        if is_known or self.actor.is_former(received):
            return  # repeated, or over
        former = self._requests.get(attempt_key(move.request_id, move.former))
        if former is not None:
            self._requests.fire(former, MoveRequested(move))
        else:
            self._refuse(received.source, move)

    @performs(Do.REFUSE_MOVE)
    def refuse_move(self, request: Request, event: MoveRequested) -> None:
        self._refuse(request.gateway, event.move)

    def _refuse(self, gateway: Address | str, move: MoveRequest) -> None:
        failure = Failure(FailureKind.AWAY, "it does not decode where it was to move from")
        failed = RequestFailed(request_id=move.request_id, attempt=move.attempt, failure=failure)
        self.actor.send(gateway, failed)

    @performs(Do.BEQUEATH)
    def bequeath(self, request: Request, event: Event) -> None:
        move, blocks = request.move, self._part_with(request)
        assert move is not None  # or it would not move
        key = attempt_key(move.request_id, move.attempt)
        if self._requests.has_ended(key):  # its abort was faster (F42)
            self._requests.return_blocks(owned(blocks))
            return
        former = request.message
        token_ids = tuple(request.tokens(0, request.num_computed))
        message = PrefillRequest(
            request_id=move.request_id,
            attempt=move.attempt,
            token_ids=token_ids,
            num_emitted=former.num_emitted + len(request.output) - 1,
            items=former.items,
            sampling=former.sampling,
            decode=move.decode,
            gateway=former.gateway,
            deadline_s=former.deadline_s,
            reports=former.reports,
            scope=former.scope,
            first_token_deadline_s=move.first_token_deadline_s,
            is_suspect=former.is_suspect,
            adapter=former.adapter,
        )
        further = Request(
            key, message, token_ids, self.actor.journal, rope_delta=request.rope_delta
        )
        self._requests.open(further)
        inherited = KvInherited(blocks, request.output[-1], request.num_cached or 0)
        self._requests.post(further, inherited)

    def _part_with(self, request: Request) -> tuple[int, ...]:
        """The blocks of all that it has computed; it needs no more, and all its tokens but the last
        are sent."""
        record, layout = self._requests.record(request), self._requests.engine.kv_layout
        if record.num_sent < len(request.output) - 1:
            self._outbox.put(request, record, but_last=1)
        self._contents.let_go_of_states(record)
        table = request.block_table
        num_kept = layout.num_state_blocks + layout.rows.count(request.num_computed)
        self._requests.return_blocks(owned(table[num_kept:]) + request.blocks_ahead)
        return table[:num_kept]
