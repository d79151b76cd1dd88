"""The REQUEST machines of one instance, whoever computes them: its own batch, or another server.

Attempts are opened, found, answered and remembered here.  Those that have ended stay as tombstones,
so that a late copy is answered and not begun.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator

from epd.config import Timing
from epd.engine.base import LanguageEngine
from epd.failure import Failure, FailureKind
from epd.fsm import request as request_fsm
from epd.fsm.kernel import Event
from epd.fsm.request import Do, Request
from epd.keys import attempt_key
from epd.messages import (
    AbortRequest,
    Address,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    RequestInquiry,
)
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.steps.record import Positions, Record
from epd.roles.steps.reports import Reports
from epd.roles.steps.signs_of_life import SignsOfLife
from epd.roles.steps.token_outbox import TokenOutbox
from epd.scheduling.block_pool import BlockPool
from epd.scheduling.prefix_keys import PrefixKeys
from epd.transport.base import Received

MAX_TOMBSTONES = 4096


class Attempts(Component[Request]):
    """What prefill and decode bring requests to."""

    fires = Request

    def __init__(
        self, actor: Actor, engine: LanguageEngine, timing: Timing, pool: BlockPool, block_size: int
    ) -> None:
        super().__init__(actor)
        self.engine, self.pool = engine, pool
        self._timing, self._block_size = timing, block_size
        self._alive = SignsOfLife(actor, timing, self._tell_alive)
        self.totals = Counter[str]()  # since the start, for metrics
        self._requests: dict[str, Request] = {}
        self._records: dict[str, Record] = {}  # of them
        self.num_held = 0  # of them, answered: their blocks wait for who goes on (`held_prompts`)
        self._ended: dict[str, bool] = {}  # tombstones, oldest first; False: at decode it goes on
        self._outbox = TokenOutbox(actor)
        self._suspects: dict[str, Request] = {}  # of them, those that an instance died of
        self.reports = Reports(actor)
        self.extend(self.reports)

    @property
    @abstractmethod
    def can_hold(self) -> bool:
        """Whether KV is kept for who goes on."""

    @abstractmethod
    def objection(self, num_tokens: int, where: str = "the instance") -> Failure | None:
        """Why so many tokens never fit here; None if they do."""

    @abstractmethod
    def waits(self, key: str) -> bool:
        """Whether it is in a queue, and yields nothing."""

    def get(self, key: str) -> Request | None:
        return self._requests.get(key)

    def __len__(self) -> int:
        """Those that are at work; the held ones have a bound of their own."""
        return len(self._requests) - self.num_held

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests.values()))

    def has_ended(self, key: str) -> bool:
        """A late copy of an ended request, or one whose abort came first and wins (F42)."""
        return key in self._ended

    def _bury(self, key: str, *, ended_here: bool = True) -> None:
        self._ended[key] = ended_here
        if len(self._ended) > MAX_TOMBSTONES:
            del self._ended[next(iter(self._ended))]

    def record(self, request: Request) -> Record:
        """Of one that has not ended."""
        return self._records[request.key]

    def open(self, request: Request, positions: Positions = None) -> None:
        """`positions`: of its prompt's tokens, if not linear."""
        message, block_size = request.message, self._block_size
        self._requests[request.key] = request
        keys = PrefixKeys(block_size, message.items, message.scope, message.adapter)
        self._records[request.key] = Record(keys, positions)
        if message.is_suspect:
            self._suspects[request.key] = request
        left_s = self.actor.until(request.deadline_s, request.gateway.instance_id)
        self.arm(request, left_s, request_fsm.DeadlinePassed())
        self._alive.opened(request.key)

    def _tell_alive(self, key: str) -> None:
        request = self._requests[key]
        if request.ended_for_client:
            return
        num_sent = self._records[key].num_sent
        if request.decode_here and num_sent < len(request.output):
            self._tell_tokens(request)
        elif not num_sent or self.waits(request.key):
            here = RequestAccepted(request_id=request.request_id, attempt=request.attempt)
            self.actor.send(request.gateway, here)

    # --- messages ---------------------------------------------------------------------------------

    @receives(AbortRequest)
    def on_abort(self, received: Received) -> None:
        message: AbortRequest = received.message
        key = attempt_key(message.request_id, message.attempt)
        if (request := self._requests.get(key)) is not None:
            self.fire(request, request_fsm.AbortReceived())
            return
        self._bury(key)
        told = RequestAborted(request_id=message.request_id, attempt=message.attempt)
        self.actor.send(received.source, told)

    @receives(RequestInquiry)
    def on_inquiry(self, received: Received) -> None:
        request_id, attempt = received.message.request_id, received.message.attempt
        request = self._requests.get(key := attempt_key(request_id, attempt))
        has_ended = request.ended_for_client if request is not None else self._ended.get(key, False)
        if has_ended:
            self.actor.counters["last_message_lost"] += 1
            failure = Failure(FailureKind.LOST, "its last message was lost")
            told = RequestFailed(request_id=request_id, attempt=attempt, failure=failure)
            self.actor.send(received.source, told)
        elif request is not None:
            self._tell_alive(key)  # or what says so by itself was lost, again and again

    # --- effects of REQUEST -----------------------------------------------------------------------

    @performs(Do.EMIT_TOKENS)
    def emit_tokens(self, request: Request, event: Event) -> None:
        if not self._records[request.key].holds_tokens(request):
            self._tell_tokens(request)

    def _tell_tokens(self, request: Request) -> None:
        self._outbox.put(request, self._records[request.key])

    @performs(Do.ARM_GRACE)
    def arm_grace(self, request: Request, event: Event) -> None:
        self.arm(request, self._timing.abort_timeout_s, request_fsm.GraceEnded())

    @performs(Do.REPORT_HANG)
    def report_hang(self, request: Request, event: Event) -> None:
        self.actor.counters["device_hangs"] += 1
        self.actor.log.warning("an aborted request still waits for its step", request=request.key)

    def fired(self, machine: Request, event: Event) -> None:
        if machine.terminal:
            if machine.key in self._requests:
                self._bury(machine.key, ended_here=not isinstance(event, request_fsm.KvDelivered))
            self.ended(machine)

    def ended(self, machine: Request) -> None:
        if self._requests.pop(machine.key, None) is not None:
            del self._records[machine.key]
            self.actor.times.note_stages(machine)
            self.reports.forget(machine)
            self._alive.closed(machine.key)
            self._suspects.pop(machine.key, None)

    def peer_lost(self, peer: Address) -> None:
        """A gateway that is gone has left its requests behind."""
        for request in self:
            if (its := request.gateway).instance_id == peer.instance_id and its.epoch == peer.epoch:
                self.post(request, request_fsm.AbortReceived())
