"""The gateway role: GENERATION machines between the API and the instances.

The API admits a request here first (a place, or a refusal at once), prepares it, and starts it.  A
placement is chosen by policy over the registry; the attempt's pictures go to their encoders and its
prompt to prefill; tokens come back numbered, straight from decode.  An attempt that fails for a
reason another instance may not have is placed again with what the client already has; everything
else ends in one clear error.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from epd.api.port import Generation as Prepared
from epd.api.port import GenerationError, GenerationUpdate, Metric, Readiness, Refused
from epd.config import Limits, Timing
from epd.fsm import generation as fsm
from epd.fsm.generation import Do, Generation
from epd.fsm.kernel import Event
from epd.messages import (
    AbortRequest,
    Address,
    EncodeAccepted,
    EncodeRejected,
    EncodeRequest,
    MediaItem,
    PrefillRequest,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    Span,
    StageReport,
    TokenChunk,
    Tokens,
)
from epd.roles.base import Actor, Role, performs, receives
from epd.roles.registry import Registry
from epd.roles.stream import Stream
from epd.scheduling.placement import Candidate, Placement, Unplaceable, place
from epd.transport.base import Received

# What the API answers, by kind of failure.
STATUS = {
    "busy": 503,
    "unavailable": 503,
    "lost": 503,
    "media": 400,
    "capacity": 400,
    "contract": 500,
    "engine": 500,
    "transfer": 503,
    "deadline": 504,
}


class GatewayRole(Role[Generation]):
    """Every open request of this gateway; implements `epd.api.port.Frontend`."""

    def __init__(self, actor: Actor, registry: Registry, limits: Limits, timing: Timing) -> None:
        super().__init__(actor)
        self._registry = registry
        self._limits = limits
        self._timing = timing
        self._open: dict[str, Generation] = {}
        self._assigned: Counter[str] = Counter()
        self._booked: dict[str, tuple[str, ...]] = {}
        self._avoid: dict[str, set[str]] = {}
        self._unaccepted: dict[str, dict[str, tuple[Address, EncodeRequest, bytes]]] = {}
        self._reports: dict[str, dict[tuple[str, Span], None]] = {}
        self._serial = 0
        self.outcomes: Counter[str] = Counter()
        self.num_tokens = 0
        registry.on_lost = self._instance_lost

    def live(self) -> dict[str, int]:
        return {"generations": len(self._open), "assigned": sum(self._assigned.values())}

    # --- the API's side ---------------------------------------------------------------------------

    def admit(self) -> Stream:
        """A place for one choice, before any work; raises Refused at once when there is none."""
        self._serial += 1
        request_id = f"{self.actor.address.instance_id}-{self.actor.address.epoch:x}-{self._serial}"
        machine = Generation(request_id, self._timing.max_attempts, self.actor.journal)
        status, reason = self._refusal()
        if reason:
            self.fire(machine, fsm.Refused(reason))
            self.outcomes["rejected"] += 1
            raise Refused(status, self._limits.retry_after_s, reason)
        machine.stream = Stream(request_id, lambda why: self._cancel(machine, why))
        self._open[request_id] = machine
        self.actor.arm(
            f"generation/{request_id}/deadline",
            self._timing.request_timeout_s,
            lambda: self.fire(machine, fsm.DeadlinePassed()),
        )
        self.fire(machine, fsm.Admitted())
        return machine.stream

    def _refusal(self) -> tuple[int, str]:
        limit = self._limits.max_open_requests
        if len(self._open) >= limit:
            return 429, f"the gateway has {limit} requests open, its limit; try again later"
        chosen = place(self._candidates(), [])
        return 503, chosen.reason if isinstance(chosen, Unplaceable) else ""

    def start_generation(self, stream: Stream, prepared: Prepared) -> None:
        """The prompt is ready: place the first attempt."""
        machine = self._open.get(stream.request_id)
        if machine is None:
            return  # its deadline passed while it was prepared; the stream says so
        machine.prompt = prepared
        self._place(machine)

    def preparation_failed(self, stream: Stream) -> None:
        """The API answered with its own error; the place is free again."""
        machine = self._open.get(stream.request_id)
        if machine is not None:
            self.fire(machine, fsm.PreparationFailed())

    def submit(self, prepared: Prepared) -> Stream:
        """Admit and start in one call."""
        stream = self.admit()
        self.start_generation(stream, prepared)
        return stream

    def ready(self) -> Readiness:
        candidates = self._candidates()
        needs_encoder = any(i.info.row_contract is not None for i in self._registry.instances)
        chosen = place(candidates, ["any"] if needs_encoder else [])
        reason = chosen.reason if isinstance(chosen, Unplaceable) else ""
        instances = [
            {
                "instance": i.info.address.instance_id,
                "epoch": i.info.address.epoch,
                "pid": i.info.pid,
                "roles": list(i.info.roles),
                "state": i.state.name,
                "assigned": self._assigned[i.info.address.instance_id],
            }
            for i in self._registry.instances
        ]
        return Readiness(not reason, reason, instances)

    def metrics(self) -> list[Metric]:
        """Samples of this process and, by their heartbeats, of every instance."""
        samples = [
            Metric(
                "epd_requests_total", count, (("outcome", outcome),), "counter", "ended requests"
            )
            for outcome, count in sorted(self.outcomes.items())
        ]
        samples.append(Metric("epd_output_tokens_total", self.num_tokens, (), "counter", "tokens"))
        samples.append(Metric("epd_open_requests", len(self._open), (), "gauge", "open requests"))
        for kind, count in sorted(self.actor.counters.items()):
            labels = (("kind", kind),)
            samples.append(Metric("epd_gateway_events_total", count, labels, "counter", "oddities"))
        for instance in self._registry.instances:
            name = instance.info.address.instance_id
            up = (("instance", name), ("state", instance.state.name))
            samples.append(Metric("epd_instance_info", 1, up, "gauge", "registry"))
            if not instance.present:
                continue
            for kind, count in instance.load.live:
                labels = (("instance", name), ("kind", kind))
                text = "memory and work in use by kind; zero when idle"
                samples.append(Metric("epd_in_use", count, labels, "gauge", text))
        return samples

    def _cancel(self, machine: Generation, reason: str) -> None:
        self.fire(machine, fsm.CancelRequested(reason))

    # --- placement --------------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(i.info, i.load, self._assigned[i.info.address.instance_id])
            for i in self._registry.instances
            if i.takes_work
        ]

    def _place(self, machine: Generation) -> None:
        avoid = self._avoid.get(machine.key, set())
        hashes = [item.mm_hash for item in machine.prompt.items]
        chosen = place(self._candidates(), hashes, avoid)
        if isinstance(chosen, Unplaceable):
            self.fire(machine, fsm.NoTopology(chosen.reason))
        else:
            self.fire(machine, fsm.Placed(chosen))

    @performs(Do.PLACE)
    def place_again(self, machine: Generation, event: Event) -> None:
        self._place(machine)

    @performs(Do.DISPATCH)
    def dispatch(self, machine: Generation, event: Event) -> None:
        placement: Placement = machine.placement
        self._book(machine, placement)
        deadline_s = self._deadline_s(machine)
        items = self._send_encodes(machine, placement, deadline_s)
        prompt: Prepared = machine.prompt
        message = PrefillRequest(
            machine.key,
            machine.attempt,
            (*prompt.token_ids, *machine.token_ids),
            len(machine.token_ids),
            items,
            prompt.sampling,
            placement.decode,
            self.actor.address,
            deadline_s,
        )
        if not self.actor.send(placement.prefill, message):
            reason = f"instance {placement.prefill.instance_id} takes no messages"
            self._attempt_failed(machine, placement.prefill.instance_id, "busy", reason, True)

    def _deadline_s(self, machine: Generation) -> float:
        """Absolute, counted from the admission."""
        age_s = self.clock.now_s() - machine.story[0].at_s
        return self.clock.wall_s() + self._timing.request_timeout_s - age_s

    def _send_encodes(
        self, machine: Generation, placement: Placement, deadline_s: float
    ) -> tuple[MediaItem, ...]:
        items = []
        unaccepted = self._unaccepted[machine.key] = {}
        pairs = zip(machine.prompt.items, placement.encoders, strict=True)
        for index, (item, encoder) in enumerate(pairs):
            room = f"{machine.key}/{machine.attempt}/{index}"
            request = EncodeRequest(
                machine.key,
                machine.attempt,
                room,
                item.mm_hash,
                item.num_rows,
                item.grid_thw,
                placement.prefill,
                deadline_s,
            )
            unaccepted[room] = (encoder, request, item.image)
            items.append(
                MediaItem(
                    index, item.mm_hash, item.offset, item.num_rows, item.grid_thw, room, encoder
                )
            )
        self._offer_encodes(machine)
        return tuple(items)

    def _offer_encodes(self, machine: Generation) -> None:
        """Send, and again until accepted: the bus may lose it, and a repeat does no harm."""
        unaccepted = self._unaccepted.get(machine.key)
        if not unaccepted:
            return
        for encoder, request, image in unaccepted.values():
            self.actor.send(encoder, request, (image,))
        self.actor.arm(
            f"generation/{machine.key}/encode",
            self._timing.accept_timeout_s / 2,
            lambda: self._offer_encodes(machine),
        )

    def _book(self, machine: Generation, placement: Placement) -> None:
        self._unbook(machine)
        names = tuple(sorted(placement.instances()))
        self._booked[machine.key] = names
        self._assigned.update(names)

    def _unbook(self, machine: Generation) -> None:
        for name in self._booked.pop(machine.key, ()):
            self._assigned[name] -= 1

    # --- messages ---------------------------------------------------------------------------------

    @receives(Tokens)
    def on_tokens(self, received: Received) -> None:
        for chunk in received.message.chunks:
            machine = self._current(chunk.request_id, chunk.attempt)
            if machine is not None:
                self._take(machine, chunk)

    def _take(self, machine: Generation, chunk: TokenChunk) -> None:
        """Numbered tokens: new ones are delivered once, repeats dropped, a hole is an outcome."""
        have = len(machine.token_ids)
        if chunk.start > have:
            self.fire(machine, fsm.TokensMissed(f"tokens {have} to {chunk.start} were lost"))
            return
        repeated = have - chunk.start
        if repeated:
            if repeated >= len(chunk.token_ids):
                return
            chunk = TokenChunk(
                chunk.request_id,
                chunk.attempt,
                have,
                chunk.token_ids[repeated:],
                chunk.finish_reason,
                chunk.logprobs[repeated:],
            )
        arrived = fsm.FinalTokensArrived if chunk.finish_reason else fsm.TokensArrived
        self.fire(machine, arrived(chunk))

    @receives(RequestAccepted)
    def on_accepted(self, received: Received) -> None:
        message: RequestAccepted = received.message
        machine = self._current(message.request_id, message.attempt)
        if machine is not None:
            self.fire(machine, fsm.Accepted())

    @receives(EncodeAccepted)
    def on_encode_accepted(self, received: Received) -> None:
        request_id = received.message.room.rsplit("/", 2)[0]
        self._unaccepted.get(request_id, {}).pop(received.message.room, None)

    @receives(EncodeRejected, RequestFailed)
    def on_failed(self, received: Received) -> None:
        message: Any = received.message
        machine = self._current(message.request_id, message.attempt)
        if machine is None:
            return
        if isinstance(message, EncodeRejected):
            self._attempt_failed(machine, received.source, "busy", message.reason, True)
            return
        self._report(received.source, machine.key, message.spans)
        kind, retryable = message.kind, message.retryable
        self._attempt_failed(machine, received.source, kind, message.reason, retryable)

    @receives(RequestAborted)
    def on_aborted(self, received: Received) -> None:
        message: RequestAborted = received.message
        machine = self._current(message.request_id, message.attempt)
        if machine is None:
            return
        machine.pending_aborts.discard(received.source)
        if not machine.pending_aborts:
            self.fire(machine, fsm.AbortConfirmed())

    @receives(StageReport)
    def on_report(self, received: Received) -> None:
        message: StageReport = received.message
        self._report(received.source, message.request_id, message.spans)

    def _report(self, source: str, request_id: str, spans: tuple[Span, ...]) -> None:
        if request_id in self._open:
            report = self._reports.setdefault(request_id, {})
            report.update(dict.fromkeys((source, span) for span in spans))  # repeats change nothing

    def _current(self, request_id: str, attempt: int) -> Generation | None:
        """The open generation, if the message is of its present attempt."""
        machine = self._open.get(request_id)
        return machine if machine is not None and machine.attempt == attempt else None

    def _attempt_failed(
        self, machine: Generation, source: str, kind: str, reason: str, retryable: bool
    ) -> None:
        self._avoid.setdefault(machine.key, set()).add(source)
        self.fire(machine, fsm.AttemptFailed(kind, reason, retryable))

    def _instance_lost(self, lost: Address) -> None:
        """Fail the attempts that still need it; an encoder's loss is prefill's to tell."""
        for machine in list(self._open.values()):
            placement: Placement | None = machine.placement
            if placement is None or lost not in (placement.prefill, placement.decode):
                continue
            if lost == placement.decode or not machine.token_ids_of_attempt:
                reason = f"instance {lost.instance_id} was lost"
                self._attempt_failed(machine, lost.instance_id, "lost", reason, True)

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.DELIVER)
    def deliver(self, machine: Generation, event: fsm.TokensArrived) -> None:
        self.num_tokens += len(event.chunk.token_ids)
        machine.stream.push(GenerationUpdate(event.chunk.token_ids, event.chunk.logprobs))

    @performs(Do.DELIVER_FINAL)
    def deliver_final(self, machine: Generation, event: fsm.FinalTokensArrived) -> None:
        chunk = event.chunk
        self.num_tokens += len(chunk.token_ids)
        machine.stream.push(
            GenerationUpdate(
                chunk.token_ids,
                chunk.logprobs,
                finish_reason=chunk.finish_reason,
                timeline=self.timeline(machine),
            )
        )

    @performs(Do.ANSWER_ERROR)
    def answer_error(self, machine: Generation, event: Event) -> None:
        kind, reason = machine.error
        status = STATUS.get(kind, 500)
        error = GenerationError(kind, reason, status, status in (429, 503))
        machine.stream.push(GenerationUpdate(error=error, timeline=self.timeline(machine)))

    @performs(Do.ABORT_ATTEMPT)
    def abort_attempt(self, machine: Generation, event: Event) -> None:
        placement: Placement = machine.placement
        self._unaccepted.pop(machine.key, None)
        self._unbook(machine)
        targets = {a.instance_id: a for a in (placement.prefill, placement.decode)}
        machine.pending_aborts = set(targets)
        for address in targets.values():
            self.actor.send(address, AbortRequest(machine.key, machine.attempt))

    @performs(Do.ARM_ATTEMPT)
    def arm_attempt(self, machine: Generation, event: Event) -> None:
        """Silence has a bound before acceptance and between tokens, but not in the queue."""
        name = f"generation/{machine.key}/attempt"
        if machine.token_ids_of_attempt:
            self.actor.arm(name, self._timing.stall_timeout_s, lambda: self._stalled(machine))
        elif machine.accepted:
            self.actor.disarm(name)
        else:
            self.actor.arm(name, self._timing.accept_timeout_s, lambda: self._ignored(machine))

    def _stalled(self, machine: Generation) -> None:
        reason = f"no token arrived for {self._timing.stall_timeout_s:g} s"
        self.fire(machine, fsm.AttemptTimedOut(reason))

    def _ignored(self, machine: Generation) -> None:
        prefill = machine.placement.prefill.instance_id
        self.fire(machine, fsm.AttemptTimedOut(f"instance {prefill} did not accept the request"))

    @performs(Do.ARM_ABORT)
    def arm_abort(self, machine: Generation, event: Event) -> None:
        self.actor.arm(
            f"generation/{machine.key}/attempt",
            self._timing.abort_timeout_s,
            lambda: self.fire(machine, fsm.AbortTimedOut()),
        )

    @performs(Do.CLOSE)
    def close(self, machine: Generation, event: Event) -> None:
        self._unbook(machine)
        self._open.pop(machine.key, None)
        for book in (self._avoid, self._unaccepted, self._reports):
            book.pop(machine.key, None)
        for what in ("deadline", "attempt", "encode"):
            self.actor.disarm(f"generation/{machine.key}/{what}")
        self.outcomes[machine.state.name.lower()] += 1
        machine.stream.close()

    def timeline(self, machine: Generation) -> list[tuple[str, str, float]]:
        """All stages of the request so far, `(machine, state, milliseconds since admission)`."""
        own = [(self.actor.address.instance_id, span) for span in self.actor.spans(machine)]
        spans = sorted([*own, *self._reports.get(machine.key, ())], key=lambda pair: pair[1].at_s)
        start_s = own[0][1].at_s
        return [
            (f"{span.machine}@{source}", span.state, round((span.at_s - start_s) * 1e3, 3))
            for source, span in spans
            if span.at_s >= start_s  # rows cached earlier have a longer story than this request
        ]
