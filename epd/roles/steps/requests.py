"""The REQUEST machines of one instance and the step loop that moves them.

Prefill and decode are two ways into the same batch: a prompt to be computed, or KV that arrived. So
an instance has one `Requests`, whatever its roles; the prefill and decode roles bring requests in,
and perform the effects that are theirs alone.

The step loop (`roles/steps/step_loop.py`) asks it for the next step: let the youngest give way if
blocks ran out, give blocks to those that need more, admit what fits, plan.  It reports the result
of a step: each outcome is an event of its own.  What enters when, and what gives way, is policy
(`scheduling/batching.py`).  Tokens of one step leave in one message per gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from epd.config import EngineConfig, Timing
from epd.engine.base import LanguageEngine, Outcome, StepSequence
from epd.failure import Failure, FailureKind
from epd.fsm import request as request_fsm
from epd.fsm.incoming import BlocksLeased
from epd.fsm.kernel import Event
from epd.fsm.request import Do, Request
from epd.groups.asks import OtherRanks
from epd.groups.kv import KvRanks
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
from epd.roles.steps.blame import blaming
from epd.roles.steps.bounds import bounds_of, too_many
from epd.roles.steps.contents import Contents
from epd.roles.steps.moves import Moves
from epd.roles.steps.outcomes import Outcomes
from epd.roles.steps.prompt_scores import PromptScores, is_scored
from epd.roles.steps.record import Positions, Record
from epd.roles.steps.reports import Reports
from epd.roles.steps.signs_of_life import SignsOfLife
from epd.roles.steps.speculation import Speculation
from epd.roles.steps.step import sequence_of, uncut
from epd.roles.steps.step_loop import Part, Plan, StepLoop
from epd.roles.steps.token_outbox import TokenOutbox
from epd.scheduling.batching import BatchScheduler
from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.kv_order import moved
from epd.scheduling.prefix_keys import PrefixKeys
from epd.scheduling.step_cost import StepCost
from epd.transport.base import Received

Reserved = Callable[[Request, BlocksLeased], None]
MAX_TOMBSTONES = 4096


class Requests(Component[Request]):
    """Owns the batch and the blocks; `Batch` for the step loop."""

    fires = Request

    def __init__(
        self,
        actor: Actor,
        engine: LanguageEngine,
        config: EngineConfig,
        timing: Timing,
        max_running: int,
        ranks: OtherRanks | None = None,
    ) -> None:
        super().__init__(actor)
        self.engine = engine
        self.pool = BlockPool(engine.num_blocks)
        self.kv = KvRanks(engine, actor.ports.transfers, ranks)
        actor.ports.transfers.guard(self.kv.own.region)
        self._timing, self._rows = timing, engine.kv_layout.rows
        self._alive = SignsOfLife(actor, timing, self._tell_alive)
        self.cost = StepCost(
            actor.clock.now_s,
            config.max_itl_impact,
            config.max_quantum_ms / 1e3,
            config.min_step_tokens,
        )
        self.totals = Counter[str]()  # since the start, for metrics
        self._requests: dict[str, Request] = {}
        self._records: dict[str, Record] = {}  # of them
        self._speculation = Speculation(config.speculative, self.totals, self._records)
        self._bounds = bounds_of(config, engine.row_contract, max_running)
        self._scheduler = BatchScheduler[Request](
            self.pool,
            engine.kv_layout.rows,
            self._bounds,
            self.cost,
            engine.kv_layout.num_state_blocks,
            self._speculation.drafts_of if self._speculation.is_on else None,
            uncut if self._bounds.max_uncut_tokens else None,
        )
        self.num_held = 0  # of them, answered: their blocks wait for who goes on (`held_prompts`)
        self._ended: dict[str, bool] = {}  # tombstones, oldest first; False: at decode it goes on
        self._outbox = TokenOutbox(actor)
        self._suspects: dict[str, Request] = {}  # of them, those that an instance died of
        self.loop = StepLoop(actor, engine, self, self.cost, runs_ahead=config.async_scheduling)
        self.on_reserved: Reserved = lambda request, leased: None
        self.caching = config.prefix_caching
        self._has_states = bool(engine.kv_layout.tensors)
        self._scores, self._contents = PromptScores(), Contents(self, engine.kv_layout)
        self._outcomes = Outcomes(self._scores, self._contents, self._speculation)
        self.reports = Reports(actor)
        self.extend(self.reports)
        self.extend(Moves(actor, self, self._contents, self._outbox))

    def live(self) -> dict[str, int]:
        return {
            "requests": len(self),
            "kv_blocks": self.pool.num_leased,
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "prompt_scores": len(self._scores),
        }

    # --- for prefill and decode -------------------------------------------------------------------

    @property
    def can_hold(self) -> bool:
        """Whether KV is kept for who goes on: not without the state behind it, which may not be
        there."""
        return self.caching and not self._has_states

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
        message, block_size = request.message, self.engine.kv_layout.block_size
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
        elif not num_sent or self._scheduler.waits(request.key):
            here = RequestAccepted(request_id=request.request_id, attempt=request.attempt)
            self.actor.send(request.gateway, here)

    def moved(self, num_tokens: int) -> Sequence[int]:
        """Blocks of a prompt that go to who decodes it, by their place, without its state."""
        return moved(self._rows, num_tokens)

    def objection(self, num_tokens: int, where: str = "the instance") -> Failure | None:
        """Why so many tokens never fit here; None if they do."""
        reach = self._bounds.reach
        return too_many(num_tokens, self.engine.kv_layout, self.pool.size, where, reach)

    def reserve(self, request: Request) -> None:
        """Wait for blocks for its KV, which will be received; `on_reserved` gets them when they are
        leased.  The last of the prompt is never filled already."""
        if (keys := self._keys(request)) is not None:
            self._scheduler.reserve(request, keys)
        self.actor.mailbox.look("batch", self.pump)

    def leave_queue(self, key: str) -> None:
        """A request leaves queues and batch; the one behind it may enter now."""
        if self._scheduler.remove(key):
            self.actor.mailbox.look("batch", self.pump)

    def return_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.give_back(blocks)
        self.actor.mailbox.look("batch", self.pump)

    def pump(self) -> None:
        """Something may fit now."""
        blaming(self._admit, self._scheduler, self.unplannable)
        if self._scheduler.num_running:
            self.loop.wake()

    def _admit(self) -> None:
        entering = self._scheduler.admissions()
        for request, blocks, num_cached, reserves, found, kept, ahead, held in entering:
            self.totals["prefix_cache_queried_tokens"] += request.num_tokens
            self.totals["prefix_cache_hit_tokens"] += num_cached
            record = self._records[request.key]
            record.num_published, record.unproven = 0, []
            record.states = [found, *kept.values()]
            if reserves:
                num_held = len(held) if self._rows.windowed else self._rows.count(num_cached)
                self.on_reserved(request, BlocksLeased(blocks, num_held, held, ahead))
            else:
                self.fire(request, request_fsm.Scheduled(blocks, num_cached, found, kept, ahead))

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

    # --- the step loop ----------------------------------------------------------------------------

    def plan(self, *, alone: bool) -> Plan:
        """The next step; empty: nothing to compute, or who must give way is in a step."""
        return blaming(partial(self._plan, alone), self._scheduler, self.unplannable)

    def _keys(self, request: Request) -> Sequence[Key] | None:
        """Of all its tokens; None: they cannot be made, and it has failed."""
        try:
            return self._contents.keys(request, self._records[request.key], request.num_tokens)
        except Exception as error:
            self.post(request, self._plan_failed(request, error))
            return None

    def unplannable(self, request: Request, error: Exception) -> None:
        """It cannot be part of a step; the others can."""
        self.fire(request, self._plan_failed(request, error))

    def _plan_failed(self, request: Request, error: Exception) -> Event:
        self.actor.fault(f"plan {request.key}", error)
        why = f"a step cannot be planned with it: {error!r}"
        return request_fsm.PlanFailed(Failure(FailureKind.INTERNAL, why))

    def _plan(self, alone: bool) -> Plan:
        waiting = self._speculation.draft_all(self._scheduler)
        if not self._make_room() and not alone:
            return []
        self.pump()
        apart = self.actor.hands.passed_over(self._suspects)
        return self._scheduler.plan(apart + waiting)

    def _make_room(self) -> bool:
        """Blocks for the next token of everybody who decodes, from the youngest if need be; False:
        it is in a step, and cannot give way now."""
        for request, passed in self._scheduler.passing():
            self.fire(request, request_fsm.Slid(passed))
        could = True
        while could and (victim := self._scheduler.victim()) is not None:
            self.fire(victim, request_fsm.Preempted())
            could = self._scheduler.waits(victim.key)
            self.totals["preemptions"] += could
        for request, blocks in self._scheduler.growth():
            self.fire(request, request_fsm.Grown(blocks))
        return could

    def sequence(self, request: Request, count: int, *, decoding: bool) -> StepSequence:
        record = self._records[request.key]
        drafts = record.drafts[: count - 1] if decoding else ()
        return sequence_of(request, record, count - len(drafts), drafts)

    def launched(self, request: Request, count: int, *, ahead: bool) -> None:
        self.fire(request, request_fsm.StepLaunched(count, ahead))

    def begin_decoding(self, request: Request) -> None:
        self._scheduler.add_decoding(request)

    def layers_computed(self, request: Request, start: int, num_layers: int) -> None:
        self.fire(request, request_fsm.LayersComputed(start, num_layers))

    def settle(self, parts: list[tuple[Part, Outcome]], elapsed_s: float) -> None:
        """A step is over: each outcome is an event of its own; tokens leave together."""
        self._outbox.is_settling = True
        for part, outcome in parts:
            if not part.decoding:
                self.reports.note_chunk(part.request, elapsed_s, part.count)
            self.fire(part.request, self._end_of(part, outcome))
        self._outbox.is_settling = False
        self._outbox.send()

    def _end_of(self, part: Part, outcome: Outcome) -> Event:
        """One sequence's outcome as its own event; a request that ended meanwhile only lets go."""
        request = part.request
        if request.ended_for_client:
            return request_fsm.StepReturned()
        try:
            return self._outcomes.event_of(part, outcome, self._records[request.key])
        except Exception as error:
            self.actor.fault(f"settle {request.key}", error)
            why = f"what came of its step cannot be used: {error!r}"
            return request_fsm.StepFailed(Failure(FailureKind.INTERNAL, why))

    # --- effects of REQUEST -----------------------------------------------------------------------

    @performs(Do.ENQUEUE)
    def enqueue(self, request: Request, event: Event) -> None:
        keys = () if is_scored(request) else self._keys(request)
        if keys is not None:
            self._scheduler.add(request, keys)
        self.loop.wake()

    @performs(Do.EXTEND)
    def extend_ready(self, request: Request, event: Event) -> None:
        self.loop.wake()

    @performs(Do.DEQUEUE)
    def dequeue(self, request: Request, event: Event) -> None:
        self.leave_queue(request.key)

    @performs(Do.START_DECODING)
    def start_decoding(self, request: Request, event: Event) -> None:
        self._contents.publish(request, self._records[request.key], request.num_computed)
        self._scheduler.add_decoding(request)
        self.loop.wake()

    @performs(Do.RELEASE_BLOCKS)
    def release_blocks(self, request: Request, event: Event) -> None:
        if (record := self._records.get(request.key)) is not None:
            self._contents.let_go_of_states(record)
        elif isinstance(event, request_fsm.Scheduled):  # too late
            self._contents.let_go(event.states_found, *event.states_kept.values())
        self.return_blocks(request.blocks)

    @performs(Do.RETURN_PASSED)
    def return_passed(self, request: Request, event: request_fsm.Slid) -> None:
        self._contents.note_passed(request, self._records[request.key], event.passed)
        self.return_blocks(tuple(event.passed.values()))

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

    def ended(self, machine: Request) -> None:
        if self._requests.pop(machine.key, None) is not None:
            del self._records[machine.key]
            goes_on = not (machine.decode_here or machine.finish_reason or machine.failure)
            self._bury(machine.key, ended_here=not goes_on)
            self.actor.times.note_stages(machine)
            self.reports.forget(machine)
            self._scores.forget(machine.key)
            self._alive.closed(machine.key)
            self._suspects.pop(machine.key, None)

    def peer_lost(self, peer: Address) -> None:
        """A gateway that is gone has left its requests behind."""
        for request in self:
            if (its := request.gateway).instance_id == peer.instance_id and its.epoch == peer.epoch:
                self.post(request, request_fsm.AbortReceived())
