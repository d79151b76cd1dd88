"""Both ends of one room and all that may happen between them, searched exhaustively.

Two real TRANSFER machines (producer, consumer) are joined by a network that keeps every word ever
sent and may deliver it at any later moment, any number of times, or never: loss, delay, reordering
and duplicates in one rule.  The writer runs on its own: it may end late, and an outcome that the
engine calls unknown leaves a *zombie*, a write that may still touch source and slots.  Timers fire
at any moment after they were armed.  Peers are declared lost at any moment, rightly or not; only a
process that is dead can be fenced, and only a fence ends a zombie.

`explore` walks breadth first over all interleavings, so a broken law comes with a shortest path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

from epd.fsm import transfer as t
from epd.fsm.kernel import Event, Table
from epd.fsm.transfer import Do, Manifest, S, Side, Transfer
from epd.fsm.transfer_table import TABLE

TERMINAL = TABLE.terminal
MAY_WRITE = frozenset({S.WRITING, S.CANCEL_PENDING, S.EXPIRE_PENDING, S.QUARANTINED})
PEER = SimpleNamespace(instance_id="peer")
NBYTES = 64

WORDS: dict[str, Callable[[], Event]] = {
    "Commit": lambda: t.CommitReceived(NBYTES, 1),
    "ShortCommit": lambda: t.CommitReceived(NBYTES - 1, 1),
    "CommitAck": t.CommitAcked,
    "CancelTransfer": t.CancelReceived,
    "CancelAck": t.CancelAcked,
    "TransferAborted": lambda: t.AbortReceived("transfer", "aborted", True),
}
SAYS = {
    Do.SEND_GRANT: "Grant",
    Do.SEND_COMMIT: "Commit",
    Do.SEND_COMMIT_ACK: "CommitAck",
    Do.SEND_CANCEL: "CancelTransfer",
    Do.SEND_CANCEL_ACK: "CancelAck",
    Do.SEND_ABORT: "TransferAborted",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What both ends were told before the first event."""

    rows_granted: int = 4  # the producer makes 4
    offers: bool = False
    commit_is_short: bool = False
    engine_is_certain: bool = True  # False: a write may end as unknown and go on as a zombie
    may_die: bool = True
    may_be_declared_lost: bool = True
    forgetful: bool = False  # words may be lost for good: only retries can bring them back

    @property
    def grant(self) -> SimpleNamespace:
        return SimpleNamespace(
            slots=(0,),
            region=SimpleNamespace(slot_nbytes=NBYTES),
            contract=None,
            num_rows=self.rows_granted,
        )


@dataclass(frozen=True, slots=True)
class End:
    """One end: its machine's state and what its process still has to do."""

    state: S = S.PENDING
    alive: bool = True
    retry: bool = False  # armed
    grace: bool = False
    deadline: bool = True
    fencing: bool = False
    concluded: int = 0
    memory: str = "none"  # none, owned, released, published
    started: bool = False  # producer: bytes were ready; consumer: slots were leased
    granted: bool = False  # producer: has read a grant
    cancelled: bool = False  # the owner has called it off
    publishing: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    producer: End
    consumer: End
    write: str = "none"  # none, running, over, zombie
    network: frozenset[str] = frozenset()


class Violation(AssertionError):
    pass


class PairModel:
    """The transition relation over `Pair`; a step that breaks a law raises `Violation`."""

    def __init__(self, scenario: Scenario, table: Table = TABLE) -> None:
        self.scenario = scenario
        self.table = table

        class Under(Transfer):
            __slots__ = ()

        Under.table = table
        self._class = Under

    def initial(self) -> Pair:
        return Pair(End(retry=self.scenario.offers), End())

    # --- one machine, one event -------------------------------------------------------------------

    def _machine(self, end: End, side: Side) -> Transfer:
        machine = self._class("room", side, 1, PEER, "owner")
        machine._state = end.state
        machine.nbytes = NBYTES
        machine.meta = Manifest(None, 4, offers=self.scenario.offers)
        machine.grant = self.scenario.grant if end.granted else None
        return machine

    def fire(self, pair: Pair, side: Side, event: Event, **changes: object) -> Pair:
        """Fire at one end and perform its effects on the model's world."""
        name = side.value
        end: End = replace(getattr(pair, name), **changes)  # type: ignore[arg-type]
        machine = self._machine(end, side)
        effects = machine.fire(event)
        pair = replace(pair, **{name: replace(end, state=machine.state)})
        for effect in effects:
            pair = self._perform(pair, side, effect)
        end = getattr(pair, name)
        if end.state in TERMINAL:  # the role disarms the timers of an ended machine
            end = replace(end, retry=False, grace=False, deadline=False, fencing=False)
            pair = replace(pair, **{name: end})
        check(pair)
        return pair

    def _perform(self, pair: Pair, side: Side, effect: Do) -> Pair:
        name = side.value
        end: End = getattr(pair, name)
        if effect in SAYS:
            word = SAYS[effect]
            if word == "Commit" and self.scenario.commit_is_short:
                word = "ShortCommit"
            return replace(pair, network=pair.network | {word})
        if effect is Do.START_WRITE:
            require(pair.write == "none", "a room is written once")
            require(self.scenario.rows_granted == 4, "a write starts against its contract (F11)")
            return replace(pair, write="running")
        if effect in (Do.RELEASE_SOURCE, Do.RELEASE_SLOTS):
            own = Side.PRODUCER if effect is Do.RELEASE_SOURCE else Side.CONSUMER
            require(side is own, f"{name} performs {effect.name}")
            require(end.memory == "owned", f"{effect.name} of memory that is {end.memory}")
            end = replace(end, memory="released")
        elif effect in (Do.CONCLUDE_FAILED, Do.CONCLUDE_DELIVERED):
            end = replace(end, concluded=end.concluded + 1)
            if effect is Do.CONCLUDE_DELIVERED and side is Side.CONSUMER:
                require(end.memory == "owned", f"published memory that is {end.memory}")
                end = replace(end, memory="published")
        else:
            changes = {
                Do.ARM_RETRY: {"retry": True},
                Do.ARM_GRACE: {"grace": True},
                Do.START_FENCE: {"fencing": True},
                Do.PUBLISH: {"publishing": True},
            }
            end = replace(end, **changes.get(effect, {}))  # type: ignore[arg-type]
        return replace(pair, **{name: end})

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self, pair: Pair) -> Iterator[tuple[str, Callable[[], Pair]]]:
        yield from self._network(pair)
        yield from self._writer(pair)
        for side in Side:
            if getattr(pair, side.value).alive:
                yield from self._time(pair, side)
                yield from self._faults(pair, side)
        if pair.producer.alive:
            yield from self._producer(pair)
        if pair.consumer.alive:
            yield from self._consumer(pair)

    def _network(self, pair: Pair) -> Iterator[tuple[str, Callable[[], Pair]]]:
        for word in sorted(pair.network):
            if self.scenario.forgetful:
                rest = replace(pair, network=pair.network - {word})
                yield f"{word} is lost", lambda rest=rest: rest
            to_producer = word in ("Grant", "CancelTransfer", "CommitAck")
            side = Side.PRODUCER if to_producer else Side.CONSUMER
            if not getattr(pair, side.value).alive:
                continue
            if word == "Grant":
                event: Event = t.GrantReceived(self.scenario.grant)
                reads = {"granted": True}
            else:
                event, reads = WORDS[word](), {}
            yield (
                f"{word} reaches the {side.value}",
                lambda side=side, event=event, reads=reads: self.fire(pair, side, event, **reads),
            )

    def _writer(self, pair: Pair) -> Iterator[tuple[str, Callable[[], Pair]]]:
        if pair.write != "running":
            return
        alive = pair.producer.alive
        over = replace(pair, write="over")

        def end(outcome: Event, after: Pair) -> Pair:
            return self.fire(after, Side.PRODUCER, outcome) if alive else after

        yield "the write succeeds", lambda: end(t.WriteSucceeded(1), over)
        yield "the write is refused", lambda: end(t.WriteRefused("no"), over)
        if not self.scenario.engine_is_certain:
            zombie = replace(pair, write="zombie")
            yield "the write's outcome is unknown", lambda: end(t.WriteOutcomeUnknown("?"), zombie)

    def _time(self, pair: Pair, side: Side) -> Iterator[tuple[str, Callable[[], Pair]]]:
        end: End = getattr(pair, side.value)
        timers = (
            ("retry", t.RetryDue),
            ("grace", t.GraceEnded),
            ("deadline", t.DeadlinePassed),
        )
        for name, event in timers:
            if getattr(end, name):
                yield (
                    f"{event.__name__} at the {side.value}",
                    lambda name=name, event=event: self.fire(pair, side, event(), **{name: False}),
                )

    def _faults(self, pair: Pair, side: Side) -> Iterator[tuple[str, Callable[[], Pair]]]:
        end: End = getattr(pair, side.value)
        other: End = pair.consumer if side is Side.PRODUCER else pair.producer
        if end.fencing and other.alive:
            again = replace(end, fencing=False, retry=True)
            yield f"the {side.value} cannot fence", lambda: replace(pair, **{side.value: again})
        if end.fencing and not other.alive:
            quiet = (
                pair  # a fence ends what the dead one could do, and zombies; not one's own write
            )
            if side is Side.CONSUMER or pair.write == "zombie":
                quiet = replace(pair, write="over" if pair.write != "none" else "none")
            yield (
                f"the {side.value} fences its peer",
                lambda: self.fire(quiet, side, t.PeerFenced(), fencing=False),
            )
        may_be_lost = self.scenario.may_be_declared_lost or not other.alive
        if may_be_lost and end.state not in TERMINAL:
            yield f"PeerLost at the {side.value}", lambda: self.fire(pair, side, t.PeerLost())
        if self.scenario.may_die and other.alive:  # one of the two: a dead pair proves nothing
            dead = replace(end, alive=False)
            yield f"kill -9 of the {side.value}", lambda: replace(pair, **{side.value: dead})

    def _producer(self, pair: Pair) -> Iterator[tuple[str, Callable[[], Pair]]]:
        end = pair.producer
        if not end.started and not end.cancelled:
            ready = t.BytesReady("source", NBYTES)
            yield (
                "bytes are ready",
                lambda: self.fire(pair, Side.PRODUCER, ready, started=True, memory="owned"),
            )
        if not end.cancelled:
            gone = t.SourceFailed("engine", "failed", True)
            yield (
                "the source fails or is withdrawn",
                lambda: self.fire(pair, Side.PRODUCER, gone, cancelled=True),
            )

    def _consumer(self, pair: Pair) -> Iterator[tuple[str, Callable[[], Pair]]]:
        end = pair.consumer
        if not end.started:
            leased = t.SlotsLeased((0,))
            yield (
                "slots are leased",
                lambda: self.fire(pair, Side.CONSUMER, leased, started=True, memory="owned"),
            )
        if not end.cancelled:
            yield (
                "the consumer's owner cancels",
                lambda: self.fire(pair, Side.CONSUMER, t.CancelRequested(), cancelled=True),
            )
        if end.publishing:
            for event in (t.Published(), t.PublishFailed("checksum")):
                yield (
                    type(event).__name__,
                    lambda event=event: self.fire(pair, Side.CONSUMER, event, publishing=False),
                )


def require(holds: bool, law: str) -> None:
    if not holds:
        raise Violation(law)


def check(pair: Pair) -> None:
    """The laws of every reachable pair (invariants 3 and 4; faults F6 to F8)."""
    producer, consumer = pair.producer, pair.consumer
    writable = pair.write in ("running", "zombie")
    if consumer.memory in ("released", "published"):
        require(not writable, f"slots are {consumer.memory} while a write may touch them")
        if producer.alive and consumer.alive:
            require(
                producer.state not in MAY_WRITE,
                f"slots are {consumer.memory} while the producer is {producer.state.name}",
            )
    if producer.memory == "released":
        require(not writable, "the source is released while a write may read it")
    for name, end in (("producer", producer), ("consumer", consumer)):
        require(end.concluded <= 1, f"the {name}'s owner is told {end.concluded} outcomes")
        if end.state in TERMINAL:
            require(end.memory != "owned", f"the {name} ends as {end.state.name} owning memory")
            withdrew = name == "producer" and end.cancelled  # its owner ended it and needs no word
            require(withdrew or end.concluded == 1, f"the {name} ends and its owner is not told")


def quiescent(pair: Pair) -> bool:
    """Nothing is left to do at whoever is alive."""
    return all(not end.alive or end.state in TERMINAL for end in (pair.producer, pair.consumer))


@dataclass(slots=True)
class Space:
    """All reachable pairs, with the step that first led to each."""

    parents: dict[Pair, tuple[Pair, str] | None]
    edges: dict[Pair, list[Pair]]

    def path(self, pair: Pair) -> list[str]:
        steps: list[str] = []
        while (parent := self.parents[pair]) is not None:
            pair, step = parent
            steps.append(step)
        return steps[::-1]

    def stuck(self) -> list[Pair]:
        """Pairs from which no continuation at all ends in quiescence."""
        back: dict[Pair, list[Pair]] = {}
        for source, targets in self.edges.items():
            for target in targets:
                back.setdefault(target, []).append(source)
        frontier = [pair for pair in self.parents if quiescent(pair)]
        good = set(frontier)
        while frontier:
            for source in back.get(frontier.pop(), ()):
                if source not in good:
                    good.add(source)
                    frontier.append(source)
        return [pair for pair in self.parents if pair not in good]


def explore(model: PairModel, limit: int = 200_000) -> Space:
    """Breadth first over all interleavings; a broken law raises with the shortest way to it."""
    start = model.initial()
    space = Space({start: None}, {})
    frontier = deque([start])
    while frontier:
        pair = frontier.popleft()
        reached = space.edges.setdefault(pair, [])
        for name, step in model.steps(pair):
            try:
                after = step()
            except Exception as error:
                story = [*space.path(pair), name]
                lines = "\n  ".join(f"{i}. {line}" for i, line in enumerate(story, 1))
                raise Violation(f"{error}\nafter\n  {lines}\n{pair}") from error
            reached.append(after)
            if after not in space.parents:
                space.parents[after] = (pair, name)
                frontier.append(after)
        if len(space.parents) > limit:
            raise AssertionError(f"more than {limit} pairs: the model grew, look why")
    return space
