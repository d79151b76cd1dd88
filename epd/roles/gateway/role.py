"""The gateway role: GENERATION machines between the API and the instances.

The API admits a request here first (a place, or a refusal at once), prepares it, and starts it.  A
`Dispatcher` sends the attempt to its instances; tokens come back numbered, straight from decode.
An attempt that fails for a reason another instance may not have is placed again with what the
client already has; everything else ends in one clear error.

Messages may be lost, also those that cancel an attempt. So instances report now and then what they
still hold. If an instance reports an attempt that is over, the gateway aborts it there again. So
the open requests of instances are bounded by those of the gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from functools import cache

from epd.config import Limits, Timing
from epd.failure import Failure, FailureKind
from epd.frontend import (
    AdapterDesk,
    GenerationStream,
    GenerationUpdate,
    Leave,
    Metric,
    Readiness,
    TimeLimits,
)
from epd.frontend import Generation as Prepared
from epd.fsm import generation as generation_fsm
from epd.fsm.generation import Do, FinalTokensArrived, Generation, TokensArrived
from epd.fsm.kernel import Event
from epd.keys import RoomKey
from epd.later import later
from epd.messages import (
    AbortEncode,
    AbortRequest,
    Address,
    EncodeAccepted,
    EncodeRejected,
    RequestAborted,
    RequestAccepted,
    RequestFailed,
    RowsKept,
    Span,
    StageReport,
    TokenChunk,
    Tokens,
)
from epd.roles.base import Actor, Component, performs, receives
from epd.roles.gateway.admission import AdmissionControl
from epd.roles.gateway.clocks import GatewayTimers
from epd.roles.gateway.dispatch import Dispatcher
from epd.roles.gateway.drains import Drains
from epd.roles.gateway.elsewhere import Elsewhere
from epd.roles.gateway.failures import FailureLog, error_of, is_mistake
from epd.roles.gateway.losses import Losses
from epd.roles.gateway.registry import Registry
from epd.roles.gateway.stream import Stream
from epd.roles.unsent import fail_at_gateway
from epd.roles.watching.gateway_metrics import (
    instance_metrics,
    own_metrics,
    pair_metrics,
    queue_metrics,
    readiness,
)
from epd.roles.watching.observers import Observatory
from epd.roles.watching.timeline import Timelines
from epd.scheduling.placement import Unplaceable
from epd.transport.base import Received

make_profiles = later("epd.roles.watching.profiling:Profiles")
WHEN_LEFT = {
    Leave.ENOUGH: generation_fsm.StopRequested,
    Leave.GONE: generation_fsm.CancelRequested,
    Leave.REFUSED: generation_fsm.Refused,
    Leave.FAULT: generation_fsm.Abandoned,
}


class GatewayRole(Component[Generation]):
    """Every open request of this gateway; implements `epd.frontend.Frontend`."""

    fires = Generation

    def __init__(
        self,
        actor: Actor,
        registry: Registry,
        limits: Limits,
        timing: Timing,
        dispatcher: Dispatcher,
        max_running: int,
    ) -> None:
        super().__init__(actor)
        self._registry, self._timing = registry, timing
        self._time_limits = TimeLimits.of(timing)
        self._dispatcher, self._offers = dispatcher, dispatcher.offers
        self._offers.on_answer = self._rows_are_kept
        self._open: dict[str, Generation] = {}
        self.admission = AdmissionControl(actor, self, self._open, dispatcher, limits, max_running)
        self.extend(self.admission)
        registry.heartbeat_listeners += (lambda instance: self.admission.go_on(),)
        self._timelines, self._failures = Timelines(actor), FailureLog(actor)
        self._elsewhere = Elsewhere(actor, self, dispatcher, timing, limits)
        self.extend(self._elsewhere)
        self.extend(GatewayTimers(actor, self, dispatcher, timing))
        fail_at_gateway(actor, self)
        profiles = cache(lambda: make_profiles(actor, registry))
        self.profile = lambda *, starts: profiles().ask(starts=starts)
        self.extend(drains := Drains(actor, self, registry, dispatcher))
        self.drain = drains.ask
        self.observe = Observatory(actor, registry, dispatcher.loads).ask
        self._serial = self.num_tokens = 0
        self.outcomes: Counter[str] = Counter()
        self._losses = Losses(actor, self, registry, dispatcher, self._elsewhere)
        self.adapters: AdapterDesk | None = None

    def live(self) -> dict[str, int]:
        books, timelines = self._dispatcher.books.num_assigned, len(self._timelines)
        own = {"generations": len(self._open), "assigned": books, "timelines": timelines}
        return own | {"queued": self.admission.num_queued} | self._offers.live()

    # --- the API's side ---------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self.admission.is_full

    def admit(self, limits: TimeLimits | None = None, who: str = "") -> Stream:
        """A place for one choice, before any work; raises Refused at once when there is none."""
        limits = limits or self._time_limits
        self._serial += 1
        key = self.actor.ports.random.integer("request", self.actor.address.epoch, self._serial)
        request_id = f"{self.actor.address.instance_id}-{key:016x}"  # that nobody can foresee
        stream = Stream(
            request_id,
            lambda why, reason: self.post(machine, WHEN_LEFT[why](reason)),
            lambda: self._dispatcher.transfer_params(machine),
            lambda: self._timelines.of(machine),
        )
        max_attempts, journal = self._timing.max_attempts, self.actor.journal
        machine = Generation(request_id, max_attempts, limits, stream, journal, who)
        if (refusal := self.admission.refusal(who, limits)) is not None:
            self.post(machine, generation_fsm.Refused(refusal.message))
            self.outcomes["rejected"] += 1
            raise refusal
        self._open[request_id] = machine
        self.post(machine, generation_fsm.Admitted())
        return stream

    def start_generation(self, stream: GenerationStream, prepared: Prepared) -> None:
        """The prompt is ready: place the first attempt."""
        machine = self._open.get(stream.request_id)
        if machine is None:
            return  # its deadline passed while it was prepared; the stream says so
        self.post(machine, generation_fsm.Prepared(prepared))

    def submit(self, prepared: Prepared, limits: TimeLimits | None = None) -> Stream:
        """Admit and start in one call."""
        self.start_generation(stream := self.admit(limits, prepared.scope), prepared)
        return stream

    def ready(self) -> Readiness:
        needs_encoder = any(i.info.row_contract is not None for i in self._registry.instances)
        reason = self._dispatcher.lacking(with_images=needs_encoder)
        return readiness(reason, self._registry, self._dispatcher, self.clock.now_s())

    def metrics(self) -> list[Metric]:
        """Samples of this process and, by their heartbeats, of every instance."""
        own = own_metrics(self.outcomes, self.num_tokens, len(self._open), self.actor)
        known = self._registry.instances
        each = (sample for one in known for sample in instance_metrics(one))
        queues = queue_metrics(known, self._dispatcher.loads())
        return [*own, *queues, *pair_metrics(self._registry), *each]

    # --- placement --------------------------------------------------------------------------------

    def _place(self, machine: Generation) -> None:
        if (poison := self._dispatcher.suspects.poison_of(machine)) is not None:
            self.post(machine, generation_fsm.PoisonFound(poison))
            return
        chosen = self._dispatcher.choose(machine)
        if isinstance(chosen, Unplaceable):
            may_come = self._dispatcher.may_come(machine)
            lacks = generation_fsm.NoTopology if may_come else generation_fsm.TopologyUnknown
            self.post(machine, lacks(chosen.reason))
        else:
            self.post(machine, generation_fsm.Placed(chosen))

    @performs(Do.PLACE)
    def place_again(self, machine: Generation, event: Event) -> None:
        """Elsewhere at once, then after growing pauses: what fails everywhere within milliseconds
        (an instance drains and its message is slow, an image that nobody can encode) needs time."""
        pause_s = self._timing.retry_interval_s * (machine.attempt - 1)
        if pause_s:
            self.arm(machine, pause_s, generation_fsm.PlacementDue())
        else:
            self._place(machine)

    @performs(Do.AWAIT_TOPOLOGY)
    def await_topology(self, machine: Generation, event: Event) -> None:
        """An instance that is restarted is back within seconds, and those of a gateway that was
        restarted join it within seconds: requests need not be lost."""
        self.arm(machine, self._timing.retry_interval_s, generation_fsm.PlacementDue())

    @performs(Do.CHOOSE)
    def choose(self, machine: Generation, event: Event) -> None:
        self._place(machine)

    @performs(Do.DISPATCH)
    def dispatch(self, machine: Generation, event: Event) -> None:
        self._elsewhere.sent(machine)
        if not self._dispatcher.send(machine):
            name = machine.placement.prefill.instance_id
            reason = f"instance {name} takes no messages"
            self.attempt_failed(machine, {name}, Failure(FailureKind.BUSY, reason))

    # --- messages ---------------------------------------------------------------------------------

    @receives(Tokens)
    def on_tokens(self, received: Received) -> None:
        for chunk in received.message.chunks:
            machine = self.current(chunk.request_id, chunk.attempt)
            if machine is not None and (machine.has_attempt or chunk.finish_reason):
                self._take(machine, chunk)
            elif not chunk.finish_reason:
                self.over(received.source, chunk.request_id, chunk.attempt)

    def _take(self, machine: Generation, chunk: TokenChunk) -> None:
        """Numbered tokens: new ones are delivered once, copies dropped, a hole is an outcome.

        An attempt sends each token in one chunk, so a chunk is new or a copy as a whole.
        """
        have = len(machine.token_ids)
        if chunk.start > have:
            self.fire(
                machine, generation_fsm.TokensMissed(f"tokens {have} to {chunk.start} were lost")
            )
        elif chunk.start == have:
            if not machine.token_ids_of_attempt and machine.has_attempt:
                self._dispatcher.began(machine)
                self.admission.go_on()
            arrived = FinalTokensArrived if chunk.finish_reason else TokensArrived
            self.fire(machine, arrived(chunk))

    @receives(RequestAccepted)
    def on_accepted(self, received: Received) -> None:
        message: RequestAccepted = received.message
        machine = self.at_work(message.request_id, message.attempt)
        if machine is not None:
            self.fire(machine, generation_fsm.Accepted())
        else:
            self.over(received.source, message.request_id, message.attempt)

    def over(self, source: str, request_id: str, attempt: int) -> None:
        """`source` works on an attempt that is over: the former abort was lost, or crossed this."""
        self.actor.send(source, AbortRequest(request_id=request_id, attempt=attempt))

    @receives(EncodeAccepted)
    def on_encode_accepted(self, received: Received) -> None:
        room: str = received.message.room
        key = RoomKey.of(room)
        machine = self.current(key.request_id, received.message.attempt) if key else None
        if machine is not None and self._offers.wants(machine, room):
            self._offers.taken(machine, room)
            if machine.prompt.stage == "encode":
                self.fire(machine, generation_fsm.Accepted())
        else:
            self.actor.send(received.source, AbortEncode(room=room))

    @receives(RowsKept)
    def on_rows_kept(self, received: Received) -> None:
        message: RowsKept = received.message
        machine = self.current(message.request_id, message.attempt)
        if machine is not None:
            self._offers.kept(machine, message.room)

    def _rows_are_kept(self, request_id: str) -> None:
        """The answer to a request for rows alone."""
        machine = self._open[request_id]
        key, attempt = machine.key, machine.attempt
        chunk = TokenChunk(
            request_id=key, attempt=attempt, start=0, token_ids=(), finish_reason="length"
        )
        self.post(machine, FinalTokensArrived(chunk))

    @receives(EncodeRejected, RequestFailed)
    def on_failed(self, received: Received) -> None:
        message: EncodeRejected | RequestFailed = received.message
        failure, culprit = message.failure, message.failure.culprit or received.source
        machine = self.current(message.request_id, message.attempt)
        sender = Address(received.source, received.epoch, "")
        if machine is None or self.actor.is_lost(sender):  # of the lost, its loss says all
            return
        if isinstance(message, RequestFailed):
            self._report(received.source, machine.key, message.spans)
        blamed = {culprit}
        if failure.kind is FailureKind.DEADLINE:
            self.fire(machine, generation_fsm.DeadlinePassed())
            return
        if failure.kind is FailureKind.ABSENT:  # nobody's fault
            blamed = set()
        elif failure.kind is FailureKind.TRANSFER:
            blamed.add(received.source)  # either end of it
        self.attempt_failed(machine, blamed, failure)

    @receives(RequestAborted)
    def on_aborted(self, received: Received) -> None:
        message: RequestAborted = received.message
        machine = self.current(message.request_id, message.attempt)
        if machine is not None:
            self.fire(machine, generation_fsm.AbortConfirmed(received.source))

    @receives(StageReport)
    def on_report(self, received: Received) -> None:
        message: StageReport = received.message
        self._report(received.source, message.request_id, message.spans)

    def _report(self, source: str, request_id: str, spans: tuple[Span, ...]) -> None:
        if request_id in self._open:
            self._timelines.add(source, request_id, spans)

    def current(self, request_id: str, attempt: int) -> Generation | None:
        """The open generation, if the message is of its present attempt, or of one that moves."""
        machine = self._open.get(request_id)
        return machine if machine is not None and machine.reads(attempt) else None

    def at_work(self, request_id: str, attempt: int) -> Generation | None:
        """The same, unless it was given up: the abort was lost then, and is sent again."""
        machine = self.current(request_id, attempt)
        return machine if machine is not None and machine.has_attempt else None

    def attempt_failed(
        self, machine: Generation, blamed: AbstractSet[str], failure: Failure
    ) -> None:
        refused, failed = generation_fsm.AttemptRefused, generation_fsm.AttemptFailed
        self.post(machine, refused(failure) if is_mistake(failure) else failed(failure, blamed))

    def open_ones(self) -> list[Generation]:
        return list(self._open.values())

    def ended(self, machine: Generation) -> None:
        self.actor.times.note_answer(machine)

    # --- effects ----------------------------------------------------------------------------------

    @performs(Do.DELIVER)
    def deliver(self, machine: Generation, event: TokensArrived) -> None:
        self._push(machine, event.chunk)

    @performs(Do.DELIVER_FINAL)
    def deliver_final(self, machine: Generation, event: FinalTokensArrived) -> None:
        self._losses.answered(machine)
        self._push(machine, event.chunk)

    def _push(self, machine: Generation, chunk: TokenChunk) -> None:
        self.num_tokens += len(chunk.token_ids)
        self.actor.times.note_token(machine)
        update = GenerationUpdate(
            chunk.token_ids,
            chunk.logprobs,
            chunk.finish_reason,
            num_accepted=chunk.num_accepted,
            num_rejected=chunk.num_rejected,
            num_cached=chunk.num_cached,
        )
        machine.stream.push(update)

    @performs(Do.DELIVER_CUT)
    def deliver_cut(self, machine: Generation, event: Event) -> None:
        machine.stream.push(GenerationUpdate(finish_reason=machine.finish_reason))

    @performs(Do.ANSWER_ERROR)
    def answer_error(self, machine: Generation, event: Event) -> None:
        machine.stream.push(GenerationUpdate(error=error_of(machine)))

    @performs(Do.LOG_FAILURE)
    def log_failure(self, machine: Generation, event: Event) -> None:
        self._failures.tell(machine)

    @performs(Do.ABORT_ATTEMPT)
    def abort_attempt(self, machine: Generation, event: Event) -> None:
        placement = machine.placement
        self._dispatcher.withdraw(machine)
        targets = {a.instance_id: a for a in (placement.prefill, placement.decode)}
        for address in targets.values():
            self.actor.send(address, AbortRequest(request_id=machine.key, attempt=machine.attempt))

    @performs(Do.CLOSE)
    def close(self, machine: Generation, event: Event) -> None:
        self._dispatcher.forget(machine)
        self._open.pop(machine.key, None)
        self.admission.freed(machine)
        self.actor.times.note_stages(machine)
        self.outcomes[machine.state.name.lower()] += 1
        machine.stream.conclude()
        self._timelines.drop(machine.key)
