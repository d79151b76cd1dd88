"""The REQUEST machines of one instance and the step loop that moves them.

Prefill and decode are two ways into the same batch: a prompt to be computed, or KV that arrived.
So an instance has one `Requests`, whatever its roles; the prefill and decode roles bring requests
in, and perform the effects that only they know.

The step loop is one coroutine: admit what fits (blocks reserved for all that a request can need),
plan a step, run it on the engine, turn each outcome into its own event.  Receiving anything never
waits for it and it never waits for anything received (fault F27).  Tokens of one step leave in one
message per gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from epd.config import EngineConfig, Timing
from epd.engine.base import LanguageEngine, RowSpan, StepFailure, StepSequence
from epd.fsm import request as fsm
from epd.fsm.kernel import Event, Machine
from epd.fsm.request import Do, Request
from epd.messages import (
    AbortRequest,
    Address,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    StageReport,
    TokenChunk,
    TokenLogprobs,
    Tokens,
)
from epd.roles.base import Actor, Role, performs, receives
from epd.scheduling.batching import BatchScheduler, Entry
from epd.scheduling.pool import Lease, LeaseQueue, Pool
from epd.transport.base import Received

MAX_TOMBSTONES = 4096


class Requests(Role[Request]):
    """Owns the batch, the blocks and the step loop."""

    def __init__(
        self,
        actor: Actor,
        engine: LanguageEngine,
        config: EngineConfig,
        timing: Timing,
        max_running: int,
    ) -> None:
        super().__init__(actor)
        self.engine = engine
        self.pool = Pool(engine.num_blocks)
        self.leases = LeaseQueue(self.pool, engine.num_blocks)
        self.region = actor.ports.transfers.allocate(
            "kv", engine.num_blocks, engine.kv_layout.block_nbytes
        )
        engine.attach_kv(self.region.buffer)
        self._timing = timing
        self._scheduler = BatchScheduler(
            config.max_step_tokens, config.max_chunk_tokens, max_running
        )
        self._requests: dict[str, Request] = {}
        self._ended: dict[str, None] = {}  # tombstones, oldest first
        self._outbox: dict[str, list[TokenChunk]] = {}
        self._work = asyncio.Event()
        self._on_leased: dict[str, Any] = {}
        self.num_steps = 0
        self.related: list[Callable[[Request], list[Machine | None]]] = []  # for the timeline

    def start(self) -> None:
        self.actor.spawn("step loop", self._run())

    def live(self) -> dict[str, int]:
        return {
            "requests": len(self._requests),
            "kv_blocks": self.pool.num_leased,
            "block_line": len(self.leases),
            "batch": self._scheduler.num_running + self._scheduler.num_waiting,
        }

    # --- for prefill and decode -------------------------------------------------------------------

    def get(self, key: str) -> Request | None:
        return self._requests.get(key)

    def __len__(self) -> int:
        return len(self._requests)

    def has_ended(self, key: str) -> bool:
        """A late copy of an ended request, or one whose abort came first and wins (fault F42)."""
        return key in self._ended

    def _bury(self, key: str) -> None:
        self._ended[key] = None
        if len(self._ended) > MAX_TOMBSTONES:
            del self._ended[next(iter(self._ended))]

    def open(self, request: Request) -> None:
        self._requests[request.key] = request
        self.actor.arm(
            f"request/{request.key}/deadline",
            self.actor.until(request.deadline_s),
            lambda: self.fire(request, fsm.DeadlinePassed()),
        )
        self._arm_alive(request)

    def _arm_alive(self, request: Request) -> None:
        """While it has sent nothing, the gateway hears now and then that it is still here: a queue
        is not silent, and silence means that the answer was lost."""
        delay_s = self._timing.stall_timeout_s / 3
        name = f"request/{request.key}/alive"
        self.actor.arm(name, delay_s, lambda: self._tell_alive(request))

    def _tell_alive(self, request: Request) -> None:
        if not request.num_sent and not request.ended_for_client:
            alive = RequestAccepted(request.request_id, request.attempt)
            self.actor.send(request.gateway, alive)
            self._arm_alive(request)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.engine.kv_layout.block_size)

    def lease_blocks(self, room: str, count: int, peer: str, granted: Any) -> None:
        """Call `granted(blocks)` when `count` blocks are leased for a room."""
        self._on_leased[room] = granted
        self.leases.join(Lease(room, count, peer))
        self.pump()

    def leave_line(self, room: str) -> None:
        self._on_leased.pop(room, None)
        self.leases.leave(room)

    def return_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.give_back(blocks)
        self.pump()

    def pump(self) -> None:
        """Something may fit now: rooms first (their prompt is computed already), then the line."""
        for lease, blocks in self.leases.grants():
            self.leases.settled(lease.key)
            self._on_leased.pop(lease.key)(blocks)
        self._work.set()

    # --- messages ---------------------------------------------------------------------------------

    @receives(AbortRequest)
    def on_abort(self, received: Received) -> None:
        message: AbortRequest = received.message
        key = f"{message.request_id}/{message.attempt}"
        request = self._requests.get(key)
        if request is not None:
            self.fire(request, fsm.AbortReceived())
            return
        self._bury(key)
        self.actor.send(received.source, RequestAborted(message.request_id, message.attempt))

    # --- the step loop ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self.actor.closing:
            self._admit()
            plan = self._scheduler.plan()
            if not plan:
                self._work.clear()
                await self._work.wait()
                continue
            await self._step(plan)
            self._flush()

    def _admit(self) -> None:
        while (entry := self._scheduler.next_admission()) is not None:
            blocks = self.pool.take(entry.num_blocks)
            if blocks is None:
                return
            self._scheduler.admit(entry)
            self.fire(self._requests[entry.key], fsm.Scheduled(blocks))

    async def _step(self, plan: list[tuple[Entry, int]]) -> None:
        requests = [self._requests[entry.key] for entry, _ in plan]
        batch = [self._sequence(r, n) for r, (_, n) in zip(requests, plan, strict=True)]
        for request in requests:
            request.in_flight = True
        self.num_steps += 1
        outcomes: list[TokenLogprobs | StepFailure | None]
        try:
            outcomes = (await self.engine.step(batch)).outcomes
        except Exception as error:
            self.actor.fault("step", error)
            outcomes = [StepFailure(f"the step failed: {error}") for _ in batch]
        for request, (entry, count), outcome in zip(requests, plan, outcomes, strict=True):
            request.in_flight = False
            self._settle(request, entry, count, outcome)

    def _settle(
        self,
        request: Request,
        entry: Entry,
        count: int,
        outcome: TokenLogprobs | StepFailure | None,
    ) -> None:
        """One sequence's outcome as its own event; a request that ended meanwhile only lets go."""
        if request.ended_for_client:
            self.fire(request, fsm.StepReturned())
            return
        entry.num_computed += count
        if isinstance(outcome, StepFailure):
            self.fire(request, fsm.StepFailed("engine", outcome.reason, True))
        elif outcome is None:
            self.fire(request, fsm.ChunkComputed(count))
        else:
            self.fire(request, self._token_event(request, count, outcome, entry.decoding))

    def _token_event(
        self, request: Request, count: int, token: TokenLogprobs, decoding: bool
    ) -> Event:
        sampling = request.sampling
        total = request.num_emitted + len(request.output) + 1
        if token.token_id in sampling.stop_token_ids and total > sampling.min_tokens:
            return fsm.LastTokenSampled(token, "stop")
        if total >= sampling.max_tokens:
            return fsm.LastTokenSampled(token, "length")
        return fsm.TokenSampled(token) if decoding else fsm.FirstTokenSampled(count, token)

    def _sequence(self, request: Request, count: int) -> StepSequence:
        """The request's part of a step: its next `count` tokens."""
        start = request.num_computed
        num_prompt = len(request.prompt)
        total = num_prompt + len(request.output)
        if start >= num_prompt:
            chunk = [t.token_id for t in request.output[start - num_prompt :][:count]]
            positions = None
        else:
            chunk = list(request.prompt[start : start + count])
            known = request.rope.positions if request.rope is not None else None
            positions = None if known is None else [axis[start : start + count] for axis in known]
        sampling = request.sampling
        reads_text = (
            sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.repetition_penalty != 1.0
        )
        first_output = num_prompt - request.num_emitted
        return StepSequence(
            request_id=request.key,
            token_ids=chunk,
            start=start,
            block_table=request.block_table,
            positions=positions,
            rope_delta=request.rope_delta,
            spans=_spans(request, start, count),
            sample=sampling if start + len(chunk) == total else None,
            output_index=request.num_emitted + len(request.output),
            prompt_ids=request.prompt[:first_output] if reads_text else (),
            output_ids=(
                [*request.prompt[first_output:], *(t.token_id for t in request.output)]
                if reads_text
                else ()
            ),
        )

    # --- effects of REQUEST -----------------------------------------------------------------------

    @performs(Do.ENQUEUE)
    def enqueue(self, request: Request, event: Event) -> None:
        num_tokens = len(request.prompt)
        if request.decode_here:
            num_tokens += request.sampling.max_tokens - request.num_emitted
        blocks = self.num_blocks_for(num_tokens)
        self._scheduler.add(Entry(request.key, len(request.prompt), blocks))
        self._work.set()

    @performs(Do.DEQUEUE)
    def dequeue(self, request: Request, event: Event) -> None:
        self._scheduler.remove(request.key)

    @performs(Do.START_DECODING)
    def start_decoding(self, request: Request, event: Event) -> None:
        self._scheduler.add_decoding(Entry(request.key, len(request.prompt), 0))
        self._work.set()

    @performs(Do.RELEASE_BLOCKS)
    def release_blocks(self, request: Request, event: Event) -> None:
        self.return_blocks(request.block_table)

    @performs(Do.EMIT_TOKENS)
    def emit_tokens(self, request: Request, event: Event) -> None:
        new = request.output[request.num_sent :]
        chunk = TokenChunk(
            request.request_id,
            request.attempt,
            request.num_emitted + request.num_sent,
            tuple(token.token_id for token in new),
            request.finish_reason,
            tuple(new) if request.sampling.num_logprobs >= 0 else (),
        )
        request.num_sent = len(request.output)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.setdefault(request.gateway.instance_id, []).append(chunk)

    def _flush(self) -> None:
        for gateway, chunks in self._outbox.items():
            self.actor.send(gateway, Tokens(tuple(chunks)))
        self._outbox.clear()

    @performs(Do.SEND_FAILURE)
    def send_failure(self, request: Request, event: Event) -> None:
        kind, reason, retryable = request.failure
        self.actor.send(
            request.gateway,
            RequestFailed(
                request.request_id,
                request.attempt,
                kind,
                reason,
                retryable,
                self.actor.spans(request),
            ),
        )

    @performs(Do.SEND_ABORTED)
    def send_aborted(self, request: Request, event: Event) -> None:
        self.actor.send(request.gateway, RequestAborted(request.request_id, request.attempt))

    @performs(Do.REPORT_SPANS)
    def report_spans(self, request: Request, event: Event) -> None:
        machines = [machine for related in self.related for machine in related(request)]
        spans = self.actor.spans(request, *machines)
        report = StageReport(request.request_id, request.attempt, spans)
        self.actor.send(request.gateway, report)

    @performs(Do.RELEASE_EMBEDDINGS, Do.WITHDRAW_OFFER)
    def nothing_to_release(self, request: Request, event: Event) -> None:
        """An instance without the prefill role holds neither (the prefill role takes this over)."""

    @performs(Do.ARM_GRACE)
    def arm_grace(self, request: Request, event: Event) -> None:
        self.actor.arm(
            f"request/{request.key}/grace",
            self._timing.abort_timeout_s,
            lambda: self.fire(request, fsm.GraceEnded()),
        )

    @performs(Do.REPORT_HANG)
    def report_hang(self, request: Request, event: Event) -> None:
        self.actor.counters["device_hangs"] += 1
        self.actor.log.warning("an aborted request still waits for its step", request=request.key)

    def ended(self, machine: Request) -> None:
        if self._requests.pop(machine.key, None) is not None:
            self._bury(machine.key)
            self.actor.disarm(f"request/{machine.key}/deadline")
            self.actor.disarm(f"request/{machine.key}/grace")
            self.actor.disarm(f"request/{machine.key}/alive")

    def peer_lost(self, peer: Address) -> None:
        """A gateway that is gone has left its requests behind."""
        for request in list(self._requests.values()):
            gateway = request.gateway
            if (gateway.instance_id, gateway.epoch) == (peer.instance_id, peer.epoch):
                self.fire(request, fsm.AbortReceived())


def _spans(request: Request, start: int, count: int) -> list[RowSpan]:
    """Which rows replace placeholders of the chunk `[start, start + count)`."""
    spans = []
    for item in getattr(request.message, "items", ()):
        first = max(start, item.offset)
        last = min(start + count, item.offset + item.num_rows)
        if first < last:
            rows = request.rows[item.room]
            spans.append(RowSpan(first - start, first - item.offset, last - first, rows))
    return spans
