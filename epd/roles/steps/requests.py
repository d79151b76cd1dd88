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

from collections.abc import Callable, Sequence
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
from epd.roles.base import Actor, performs
from epd.roles.steps.attempts import Attempts
from epd.roles.steps.blame import blaming
from epd.roles.steps.bounds import bounds_of, too_many
from epd.roles.steps.contents import Contents
from epd.roles.steps.moves import Moves
from epd.roles.steps.outcomes import Outcomes
from epd.roles.steps.prompt_scores import PromptScores, is_scored
from epd.roles.steps.speculation import Speculation
from epd.roles.steps.step import sequence_of, uncut
from epd.roles.steps.step_loop import Part, Plan, StepLoop
from epd.scheduling.batching import BatchScheduler
from epd.scheduling.block_pool import BlockPool, Key
from epd.scheduling.kv_order import moved
from epd.scheduling.step_cost import StepCost

Reserved = Callable[[Request, BlocksLeased], None]
MAX_TOMBSTONES = 4096


class Requests(Attempts):
    """Owns the batch and the blocks; `Batch` for the step loop."""

    def __init__(
        self,
        actor: Actor,
        engine: LanguageEngine,
        config: EngineConfig,
        timing: Timing,
        max_running: int,
        ranks: OtherRanks | None = None,
    ) -> None:
        pool = BlockPool(engine.num_blocks)
        super().__init__(actor, engine, timing, pool, engine.kv_layout.block_size)
        self.kv = KvRanks(engine, actor.ports.transfers, ranks)
        actor.ports.transfers.guard(self.kv.own.region)
        self._rows = engine.kv_layout.rows
        self.cost = StepCost(
            actor.clock.now_s,
            config.max_itl_impact,
            config.max_quantum_ms / 1e3,
            config.min_step_tokens,
        )
        made = config.speculative, self.totals, self._records, actor.clock.now_s
        self._speculation = Speculation(*made)
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
        self.loop = StepLoop(actor, engine, self, self.cost, runs_ahead=config.async_scheduling)
        self.on_reserved: Reserved = lambda request, leased: None
        self.caching = config.prefix_caching
        self._has_states = bool(engine.kv_layout.tensors)
        self._scores, self._contents = PromptScores(), Contents(self, engine.kv_layout)
        self._outcomes = Outcomes(self._scores, self._contents, self._speculation)
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

    def waits(self, key: str) -> bool:
        return self._scheduler.waits(key)

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
            record.num_published, record.unproven, record.is_followed = 0, [], True
            record.states = [found, *kept.values()]
            if reserves:
                num_held = len(held) if self._rows.windowed else self._rows.count(num_cached)
                self.on_reserved(request, BlocksLeased(blocks, num_held, held, ahead))
            else:
                self.fire(request, request_fsm.Scheduled(blocks, num_cached, found, kept, ahead))

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
        if self._scheduler.num_waiting:
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
        record.is_followed &= self._speculation.is_kept
        wanted = self._speculation.wanted(request, record)
        drafts = record.drafts[: count - 1] if decoding else ()
        return sequence_of(request, record, count - len(drafts), drafts, wanted)

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

    def ended(self, machine: Request) -> None:
        super().ended(machine)
        self._scores.forget(machine.key)
