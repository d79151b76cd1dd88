"""A request of one client over its attempts: GENERATION at the gateway, a REQUEST per attempt.

All attempts run at one instance, the next while the last may still hold memory there.  Messages on
the way are kept for ever: each may arrive late, several times, out of order, or never.  A late
message of an attempt that was given up is the point.

All failures are of one kind, because attempts are counted by kind: so there are few.  Refusals of
who takes no work are not counted and so not here.

Laws: one terminal answer, and the place given back once (F39, F40); tokens without gap or repeat
(F20); what was called off before it began never begins (F42); what ends without its last token has
called its attempts off (F43); and those of REQUEST for each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from epd.failure import Failure, FailureKind
from epd.frontend import GenerationUpdate, TimeLimits
from epd.fsm import generation as g
from epd.fsm import request as r
from epd.fsm.kernel import Event
from epd.messages import Address, TokenChunk
from epd.scheduling.placement import Placement
from epd_lab.sim.model.laws import Step, require
from epd_lab.sim.model.request import MAX_TOKENS, RequestWorld
from epd_lab.sim.model.world import World

LIMITS = TimeLimits(1.0, 1.0, 1.0)
PLACEMENT = Placement((), Address("instance", 1, ""), Address("instance", 1, ""))


class _Client:
    """What is said is counted in the world, not here."""

    client_request_id = ""

    def push(self, update: GenerationUpdate) -> None: ...

    def conclude(self) -> None: ...


CLIENT = _Client()


class GenerationWorld(World):
    """The gateway's side, the attempts at the instance, and every message ever said."""

    def __init__(self, num_items: int, max_attempts: int) -> None:
        self.generation = g.Generation("id", max_attempts, LIMITS, CLIENT)
        self.num_items = num_items
        self.attempts: dict[int, RequestWorld] = {}
        self.sent: dict[int, int] = {}  # attempt to the tokens that it starts from
        self.called_off: set[int] = set()
        self.buried: set[int] = set()  # called off before they began
        self.answers = 0
        self.closed = 0
        self.admitted = False
        self.logged = 0
        self.placing = False
        self.pause = False  # before the next look
        self.cut = False  # its time was over before its instances said the end
        self.silent = False  # the client left, or the API has answered

    # --- GENERATION, as its role performs it ------------------------------------------------------

    def fire(self, event: Event) -> None:
        generation = self.generation
        self.admitted |= isinstance(event, g.Admitted)
        self.perform(generation, generation.fire(event), event)
        generation.failure, generation.cause = None, ""  # messages: no guard reads them
        generation.lacking = ""
        if generation.terminal:
            generation.failures = {}  # nobody counts them any more

    def place(self, generation: g.Generation, event: Event) -> None:
        self.pause = True

    def await_topology(self, generation: g.Generation, event: Event) -> None:
        self.pause = True

    def choose(self, generation: g.Generation, event: Event) -> None:
        self.placing = True

    def dispatch(self, generation: g.Generation, event: Event) -> None:
        require(generation.attempt <= generation.max_attempts, "too many attempts")
        require(generation.attempt not in self.sent, "an attempt is sent once")
        self.sent[generation.attempt] = len(generation.token_ids)

    def abort_attempt(self, generation: g.Generation, event: Event) -> None:
        self.called_off.add(generation.attempt)

    def deliver(self, generation: g.Generation, event: Event) -> None:
        require(not self.answers and not self.silent, "tokens after the end")

    def deliver_final(self, generation: g.Generation, event: Event) -> None:
        whole = len(generation.token_ids) == MAX_TOKENS
        require(whole or generation.finish_reason == "length", "an answer that is cut short")
        self.answers += 1

    def deliver_cut(self, generation: g.Generation, event: Event) -> None:
        require(bool(generation.token_ids), "nothing is taken for an answer")
        require(generation.finish_reason == "length", "a cut that does not say so")
        self.answers += 1
        self.cut = True

    def answer_error(self, generation: g.Generation, event: Event) -> None:
        require(generation.failure is not None, "an error that says nothing")
        self.answers += 1

    def log_failure(self, generation: g.Generation, event: Event) -> None:
        self.logged += 1

    def close(self, generation: g.Generation, event: Event) -> None:
        self.closed += 1

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self) -> Iterator[Step[GenerationWorld]]:
        generation = self.generation
        if generation.state is g.S.RECEIVED:
            yield self._event(g.Admitted(), "work")
            yield self._event(g.Refused("full"), "fault")
        if generation.state is g.S.RECEIVED or generation.terminal:
            return  # how an attempt ends that nobody reads is REQUEST's own model
        yield from self._gateway()
        for number in self.sent:
            yield from self._instance(number)
        for number, attempt in self.attempts.items():
            for step in attempt.steps():
                yield self._inside(number, step)
            if number == generation.attempt:
                for word in attempt.words:
                    read = partial(_read, number=number, word=word)
                    kind = "message" if self._in_order(word) else "fault"
                    yield self.act(f"{word} of attempt {number} arrives", kind, read)

    def _in_order(self, word: str) -> bool:
        """The bus keeps the order of a peer's messages, or loses some."""
        kind, *numbers = word.split()
        return kind != "tokens" or int(numbers[0]) <= len(self.generation.token_ids)

    def _gateway(self) -> Iterator[Step[GenerationWorld]]:
        generation = self.generation
        if generation.state is g.S.PREPARING:
            yield self.act("it is placed", "work", _place)
            yield self._event(g.NoTopology("nobody is there"), "fault")
        if generation.state in (g.S.MIGRATING, g.S.AWAITING_TOPOLOGY) and self.placing:
            yield self.act("it is placed again", "work", _place)
            yield self._event(g.NoTopology("nobody is left"), "fault")
            yield self._event(g.TopologyUnknown("there never was one"), "fault")
        if self.pause:
            yield self.act("its pause is over", "work", _look)
        if generation.state is g.S.AWAITING_TOPOLOGY:
            yield self._event(g.PlacementTimedOut(), "time")
        if not self.silent:
            yield self._api(g.CancelRequested("the client hangs up"))
            yield self._api(g.Refused("the API finds it wrong"))
            yield self._api(g.Abandoned("the API fails"))
            if generation.token_ids:
                yield self._api(g.StopRequested("the client has enough"))
        if generation.state in (g.S.PLACED, g.S.STREAMING):
            yield self._event(g.AttemptFailed(Failure(FailureKind.LOST, "instance lost")), "fault")
            yield self._event(g.AttemptTimedOut("silence"), "time")
            yield self._event(g.AttemptRefused(Failure(FailureKind.MEDIA, "it is wrong")), "fault")
            yield self._event(g.PoisonFound(Failure(FailureKind.POISON, "two died of it")), "fault")
        if generation.state in (g.S.CANCELLING, g.S.STOPPING):
            yield self._event(g.AbortTimedOut(), "time")
        yield self._event(g.TokenTimedOut("no token"), "time")
        yield self._event(g.DeadlinePassed(), "time")

    def _instance(self, number: int) -> Iterator[Step[GenerationWorld]]:
        if number not in self.attempts and number not in self.buried:
            yield self.act(f"attempt {number} arrives", "message", partial(_arrive, number=number))
        if number in self.called_off and number not in self.buried:
            called_off = partial(_call_off, number=number)
            yield self.act(f"attempt {number} is called off", "message", called_off)

    def _inside(self, number: int, step: Step[RequestWorld]) -> Step[GenerationWorld]:
        def do(world: GenerationWorld) -> None:
            world.attempts[number] = step.run()

        return self.act(f"attempt {number}: {step.name}", step.kind, do)

    def _event(self, event: Event, kind: str) -> Step[GenerationWorld]:
        return self.act(type(event).__name__, kind, lambda w: w.fire(event))

    def _api(self, event: Any) -> Step[GenerationWorld]:
        """The API reads no more; it has answered, or there is nobody to answer."""

        def do(world: GenerationWorld) -> None:
            world.silent = True
            world.fire(event)

        return self.act(event.reason, "fault", do)

    # --- laws and ends ----------------------------------------------------------------------------

    def check(self) -> None:
        generation = self.generation
        tokens = generation.token_ids
        require(tokens == list(range(len(tokens))), f"a gap or a repeat: {tokens} (F20)")
        require(self.answers <= 1, f"{self.answers} answers")
        if generation.terminal:
            turned_away = generation.state is g.S.REJECTED and not self.admitted
            wanted = 0 if self.silent or turned_away else 1
            require(self.answers == wanted, f"it ends with {self.answers} answers")
            require(self.closed == (0 if turned_away else 1), "the place is given back once")
            logged = generation.state is g.S.FAILED
            require(self.logged == logged, "each failure of ours, and nothing else, is logged")
            at_work = self.sent.keys() - self.called_off
            if not generation.finish_reason or self.cut:
                require(not at_work, f"attempts {sorted(at_work)} go on for nobody (F43)")

    def quiescent(self) -> bool:
        return self.generation.terminal

    def succeeded(self) -> bool:
        done = self.generation.state is g.S.FINISHED and not self.silent
        return done and self.generation.token_ids == list(range(MAX_TOKENS))


def _look(world: GenerationWorld) -> None:
    world.pause = False
    world.fire(g.PlacementDue())


def _place(world: GenerationWorld) -> None:
    world.placing = False
    world.fire(g.Placed(PLACEMENT))


def _arrive(world: GenerationWorld, number: int) -> None:
    started = RequestWorld(world.num_items, num_emitted=world.sent[number], brief=True)
    world.attempts[number] = started


def _call_off(world: GenerationWorld, number: int) -> None:
    attempt = world.attempts.get(number)
    if attempt is None:
        world.buried.add(number)
        if number == world.generation.attempt:
            world.fire(g.AbortConfirmed("instance"))
    elif attempt.begun:
        world.attempts[number] = after = attempt.fork()
        after.fire(r.AbortReceived())


def _read(world: GenerationWorld, number: int, word: str) -> None:
    """What the gateway makes of a message of the present attempt."""
    if word == "failed":
        failure = world.attempts[number].request.failure
        assert failure is not None  # it is told
        kind = FailureKind.LOST if failure.retryable else FailureKind.MEDIA
        world.fire(g.AttemptFailed(Failure(kind, failure.reason)))
    elif word == "aborted":
        world.fire(g.AbortConfirmed("instance"))
    else:
        _read_tokens(world, number, word)


def _read_tokens(world: GenerationWorld, number: int, word: str) -> None:
    """Numbered tokens: new ones are delivered once, copies dropped, a hole is an outcome."""
    _, first, count, *final = word.split()
    start, have = int(first), len(world.generation.token_ids)
    stop = start + int(count)
    if start > have:
        world.fire(g.TokensMissed(f"tokens {have} to {start} were lost"))
    elif stop > have:
        require(start == have, "a chunk is new or a copy as a whole")
        reason = final[1] if final else ""
        chunk = TokenChunk(
            request_id="id",
            attempt=number,
            start=start,
            token_ids=tuple(range(start, stop)),
            finish_reason=reason,
        )
        arrived = g.FinalTokensArrived if final else g.TokensArrived
        world.fire(arrived(chunk))
