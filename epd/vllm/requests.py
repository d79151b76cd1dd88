"""Attempts that a vLLM server computes: REQUEST over one HTTP answer each.

Theory of operation
-------------------
The table is that of every instance.  A request enters the "batch" when all its rows are here; from
then on a step of it is under way until the HTTP answer has ended, for as long does vLLM read what
belongs to it.  Each token ends a step and begins the next one.  So an abort in the middle of an
answer waits for the end of the answer, as it waits for a step on a device (F6): the connection is
closed, and its end is an event.

What decodes elsewhere is in `tickets.py`; without a NixlConnector `PrefillHere` refuses it, and
placement does not ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

from epd.config import Timing
from epd.engine.base import LanguageEngine
from epd.failure import Failure, FailureKind
from epd.frontend import JsonObject
from epd.fsm.embedding import Embedding
from epd.fsm.kernel import Event
from epd.fsm.request import (
    Do,
    FirstTokenSampled,
    LastTokenSampled,
    Request,
    Scheduled,
    StepFailed,
    StepLaunched,
    StepReturned,
    TokenSampled,
)
from epd.messages import MoveRequest, PrefillRequest, RequestFailed
from epd.roles.base import Actor, performs, receives
from epd.roles.prefill.embeddings import Embeddings
from epd.roles.prefill.role import PrefillRole
from epd.roles.steps.attempts import Attempts
from epd.roles.steps.step import token_event
from epd.scheduling.block_pool import BlockPool
from epd.transport.base import Received
from epd.vllm.server import EngineServer, ServerAnswer, ServerChoice, objection_to
from epd.vllm.shelf import Shelf

_GOES_ON = (FirstTokenSampled, TokenSampled)
NO_BLOCKS = 1  # a pool that nothing is taken from: blocks are vLLM's


class ServerRequests(Attempts):
    """Of one instance; `max_tokens`: of a prompt and its answer."""

    def __init__(
        self,
        actor: Actor,
        engine: LanguageEngine,
        timing: Timing,
        server: EngineServer,
        max_tokens: int,
    ) -> None:
        super().__init__(actor, engine, timing, BlockPool(NO_BLOCKS), 1)
        self._server = server
        self._max_tokens = max_tokens
        self._answers: dict[str, ServerAnswer] = {}

    def live(self) -> dict[str, int]:
        return {"requests": len(self), "answers": len(self._answers)}

    @property
    def can_hold(self) -> bool:
        return False

    def objection(self, num_tokens: int, where: str = "the instance") -> Failure | None:
        if num_tokens <= self._max_tokens:
            return None
        limit = f"{where} takes {self._max_tokens} (--max-model-len of vLLM)"
        return Failure(FailureKind.CAPACITY, f"{num_tokens} tokens are asked for, and {limit}")

    def waits(self, key: str) -> bool:
        """vLLM tells of no queue: what has yielded nothing for long may be in one."""
        return key in self._answers

    @receives(MoveRequest)
    def on_move_request(self, received: Received) -> None:
        move: MoveRequest = received.message
        failure = Failure(FailureKind.AWAY, "KV of a vLLM server does not move")
        failed = RequestFailed(request_id=move.request_id, attempt=move.attempt, failure=failure)
        self.actor.send(received.source, failed)

    def refusal(self, message: PrefillRequest) -> Failure | None:
        is_apart, where = not self.actor.is_self(message.decode), message.decode.instance_id
        if is_apart and self.engine.kv_layout is None:
            return Failure(FailureKind.AWAY, f"KV of this vLLM server does not go to {where}")
        guides = self._server.guides
        if reason := objection_to(message.sampling, message.items, guides=guides):
            return Failure(FailureKind.CAPACITY, reason)
        if is_apart and self._server.again(message):
            reason = "an answer with a grammar begins at two vLLM servers, and goes on at one alone"
            return Failure(FailureKind.AWAY, reason)
        return None

    # --- the answer -------------------------------------------------------------------------------

    @performs(Do.ENQUEUE)
    def enqueue(self, request: Request, event: Event) -> None:
        again = self._server.again(request.message)
        self.ask(request, self.body_of(request), again)
        self.post(request, Scheduled(()))
        self.post(request, StepLaunched(len(request.prompt), ahead=False))

    def body_of(self, request: Request) -> JsonObject:
        return self._server.body_of(request.message)

    def ask(self, request: Request, body: JsonObject, again: Sequence[int]) -> None:
        """`again`: tokens that the client has, with which the server's answer must begin."""
        put = partial(self.actor.mailbox.put, request.key, self._take, request, list(again))
        answer = self._answers[request.key] = self._server.answer(body, put)
        self._note_hands()
        self.actor.spawn(f"answer {request.key}", answer.read(), partial(self._over, request))

    def answer_of(self, request: Request) -> ServerAnswer:
        return self._answers[request.key]

    def first_failure(self, request: Request, event: Event) -> Failure | None:
        """Why its first token is of no use, if so."""
        return None

    def _take(self, request: Request, again: list[int], chunk: ServerChoice) -> None:
        tokens, is_first = chunk.tokens(), not request.has_yielded
        for number, token in enumerate(tokens, 1):
            if request.ended_for_client:
                return
            event: Event
            if again:
                if token.token_id == again.pop(0):
                    continue
                event = StepFailed(Failure(FailureKind.ENGINE, "the vLLM server says otherwise"))
            else:
                event = token_event(request, [token], decoding=bool(request.output))
            is_last = number == len(tokens) and chunk.finish_reason == "length"
            if is_last and request.decode_here and isinstance(event, _GOES_ON):
                event = LastTokenSampled(token, "length")  # as much as the server takes
            elif failure := self.first_failure(request, event):
                event = StepFailed(failure)
            self.fire(request, event)
            if request.decode_here and not request.ended_for_client:
                self.fire(request, StepLaunched(1, ahead=False))
        if is_first:
            self._note_hands()

    def _note_hands(self) -> None:
        """vLLM computes these and has yielded nothing of them: its death counts against them."""
        begun = (one for one in self if one.key in self._answers and not one.has_yielded)
        self.actor.hands.hold(tuple(one.request_id for one in begun))

    def _over(self, request: Request, failure: Failure) -> None:
        is_gone = self._answers.pop(request.key).is_refused
        self._note_hands()
        if is_gone:  # its API server alone may have died; whoever is placed here fails
            self.actor.mailbox.post("server gone", self.actor.on_device_lost, failure.reason)
        if request.steps:
            ended = request.ended_for_client
            self.fire(request, StepReturned() if ended else StepFailed(failure))

    def fired(self, machine: Request, event: Event) -> None:
        super().fired(machine, event)
        if machine.ended_for_client and (answer := self._answers.get(machine.key)) is not None:
            answer.close()

    # --- effects without work ---------------------------------------------------------------------

    @performs(Do.EXTEND, Do.DEQUEUE, Do.START_DECODING, Do.RELEASE_BLOCKS)
    def leave_to_server(self, request: Request, event: Event) -> None:
        """Its queue, its batch and its blocks are vLLM's."""

    @performs(Do.BEQUEATH, Do.REFUSE_MOVE, Do.RETURN_PASSED)
    def refuse_move(self, request: Request, event: Event) -> None:
        raise AssertionError(f"{request.key}: KV of a vLLM server does not move")


class PrefillHere(PrefillRole):
    """Takes prompts that the server can be asked for."""

    def _refusal(self, message: PrefillRequest) -> Failure | None:
        own = cast("ServerRequests", self._requests)
        return super()._refusal(message) or own.refusal(message)


class ShelvedRows(Embeddings):
    """Rows that are here are on the shelf, for as long as EMBEDDING keeps them."""

    shelf: Shelf

    def fired(self, machine: Embedding, event: Event) -> None:
        super().fired(machine, event)
        is_settled = machine.at_rest or machine.terminal
        (self.shelf.settle if is_settled else self.shelf.expect)(machine.key)

    def keep_rows(self, embedding: Embedding, event: Event) -> None:
        super().keep_rows(embedding, event)
        self.shelf.put(embedding.key, cast("list[memoryview]", embedding.rows))

    def release_rows(self, embedding: Embedding, event: Event) -> None:
        self.shelf.drop(embedding.key)
        super().release_rows(embedding, event)
