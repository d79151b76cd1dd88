"""Both ends of one room and all that may happen between them, searched exhaustively.

Two real TRANSFER machines (producer, consumer) are joined by a network that keeps every word ever
sent and may deliver it at any later moment, any number of times, or never: loss, delay, reordering
and duplicates in one rule.  The writer runs on its own: it may end late, and an outcome that the
engine calls unknown leaves a *zombie*, a write that may still touch source and slots.  Timers fire
at any moment after they were armed.  Peers are declared lost at any moment, rightly or not; only a
process that is dead can be fenced.  A zombie ends by itself in the end, and its engine says so; or
by a fence.

`epd_lab.sim.model.explore` walks over all interleavings of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

from epd.fsm import transfer as t
from epd.fsm.kernel import Effect, Event, Table
from epd.fsm.transfer import Do, Manifest, S, Side, Transfer
from epd.fsm.transfer_table import TABLE
from epd_lab.sim.model.laws import Step, require

TERMINAL = TABLE.terminal
MAY_WRITE = frozenset({S.STREAMING, S.WRITING, S.CANCEL_PENDING, S.EXPIRE_PENDING, S.QUARANTINED})
PEER = SimpleNamespace(instance_id="peer")
NBYTES = 64

WORDS: dict[str, Callable[[], Event]] = {
    "Commit": lambda: t.CommitReceived(NBYTES, 1),
    "ShortCommit": lambda: t.CommitReceived(NBYTES - 1, 1),
    "CommitAck": t.CommitAcked,
    "CancelTransfer": t.CancelReceived,
    "CancelAck": t.CancelAcked,
    "TransferAborted": lambda: t.AbortReceived("transfer", "aborted", True),
    "TransferInDoubt": lambda: t.DoubtReceived("transfer", "in doubt", True),
}
SAYS = {
    Do.SEND_GRANT: "Grant",
    Do.SEND_COMMIT: "Commit",
    Do.SEND_COMMIT_ACK: "CommitAck",
    Do.SEND_CANCEL: "CancelTransfer",
    Do.SEND_CANCEL_ACK: "CancelAck",
    Do.SEND_ABORT: "TransferAborted",
    Do.SEND_DOUBT: "TransferInDoubt",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """What both ends were told before the first event."""

    rows_granted: int = 4  # the producer makes 4
    offers: bool = False
    commit_is_short: bool = False
    engine_is_certain: bool = True  # False: a write may end as unknown and go on as a zombie
    engine_settles: bool = True  # False: it never knows of the end of a zombie
    may_die: bool = True
    may_be_declared_lost: bool = True
    forgetful: bool = False  # words may be lost for good: only retries can bring them back
    max_lost: int = 0  # how many, at most; 0: any number
    in_parts: bool = False  # half of the bytes may be ready, and be sent, before the rest

    @property
    def grant(self) -> SimpleNamespace:
        return SimpleNamespace(
            slots=(0,),
            region=SimpleNamespace(slot_nbytes=NBYTES),
            contract=None,
            num_rows=self.rows_granted,
            num_held=0,
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
    settling: bool = False
    concluded: int = 0
    memory: str = "none"  # none, owned, released, published
    started: bool = False  # producer: bytes were ready; consumer: slots were leased
    granted: bool = False  # producer: has read a grant
    cancelled: bool = False  # the owner has called it off
    publishing: bool = False
    ready_nbytes: int = 0  # producer: as its machine counts
    part_nbytes: int = 0
    written_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    producer: End
    consumer: End
    write: str = "none"  # none, running, over, zombie
    landed_nbytes: int = 0
    network: frozenset[str] = frozenset()
    num_lost: int = 0  # words; counted only where their number is bounded


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

    def quiescent(self, pair: Pair) -> bool:
        """Nothing is left to do at whoever is alive."""
        return all(not end.alive or end.state in TERMINAL for end in (pair.producer, pair.consumer))

    def succeeded(self, pair: Pair) -> bool:
        """The bytes are published, the source is free, and nobody has anything left to do."""
        memories = (pair.producer.memory, pair.consumer.memory)
        return self.quiescent(pair) and memories == ("released", "published")

    # --- one machine, one event -------------------------------------------------------------------

    def _machine(self, end: End, side: Side) -> Transfer:
        machine = self._class("room", side, 1, PEER, "owner")
        machine._state = end.state
        machine.nbytes = NBYTES
        machine.meta = Manifest(None, 4, offers=self.scenario.offers)
        machine.grant = self.scenario.grant if end.granted else None
        machine.ready_nbytes, machine.part_nbytes = end.ready_nbytes, end.part_nbytes
        machine.written_nbytes = end.written_nbytes
        return machine

    def fire(self, pair: Pair, side: Side, event: Event, **changes: object) -> Pair:
        """Fire at one end and perform its effects on the model's world."""
        name = side.value
        end: End = replace(getattr(pair, name), **changes)
        machine = self._machine(end, side)
        effects = machine.fire(event)
        end = replace(
            end,
            state=machine.state,
            ready_nbytes=machine.ready_nbytes,
            part_nbytes=machine.part_nbytes,
            written_nbytes=machine.written_nbytes,
        )
        pair = _with(pair, side, end)
        for effect in effects:
            pair = self._perform(pair, side, effect)
        end = getattr(pair, name)
        if end.state in TERMINAL:  # the role disarms the timers of an ended machine
            end = replace(end, retry=False, grace=False, deadline=False, fencing=False)
            end = replace(end, settling=False, ready_nbytes=0, part_nbytes=0, written_nbytes=0)
            pair = _with(pair, side, end)
        check(pair)
        return pair

    def _perform(self, pair: Pair, side: Side, effect: Effect) -> Pair:
        name = side.value
        end: End = getattr(pair, name)
        if effect in SAYS:
            word = SAYS[effect]
            if word == "Commit" and self.scenario.commit_is_short:
                word = "ShortCommit"
            return replace(pair, network=pair.network | {word})
        if effect is Do.START_WRITE:
            require(pair.write not in ("running", "zombie"), "one write at a time")
            require(pair.landed_nbytes < NBYTES, "a room is written once")
            require(self.scenario.rows_granted == 4, "a write starts against its contract (F11)")
            return replace(pair, write="running")
        if effect is Do.HOLD_PART:
            end = replace(end, memory="owned")
        elif effect in (Do.RELEASE_SOURCE, Do.RELEASE_SLOTS):
            own = Side.PRODUCER if effect is Do.RELEASE_SOURCE else Side.CONSUMER
            require(side is own, f"{name} performs {effect.name}")
            require(end.memory == "owned", f"{effect.name} of memory that is {end.memory}")
            end = replace(end, memory="released")
        elif effect in (Do.CONCLUDE_FAILED, Do.CONCLUDE_DELIVERED):
            end = replace(end, concluded=end.concluded + 1)
            if effect is Do.CONCLUDE_DELIVERED and side is Side.CONSUMER:
                require(end.memory == "owned", f"published memory that is {end.memory}")
                require(pair.landed_nbytes == NBYTES, "what was published has not landed (F28)")
                end = replace(end, memory="published")
        else:
            changes: dict[Effect, dict[str, bool]] = {
                Do.ARM_RETRY: {"retry": True},
                Do.ARM_GRACE: {"grace": True},
                Do.START_FENCE: {"fencing": True},
                Do.SETTLE_WRITE: {"settling": True},
                Do.PUBLISH: {"publishing": True},
            }
            end = replace(end, **changes.get(effect, {}))  # type: ignore[arg-type]
        return _with(pair, side, end)

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self, pair: Pair) -> Iterator[Step[Pair]]:
        yield from self._network(pair)
        yield from self._writer(pair)
        for side in Side:
            if getattr(pair, side.value).alive:
                yield from self._time(pair, side)
                yield from self._faults(pair, side)
        if pair.producer.alive:
            yield from self._producer(pair)
            yield from self._settling(pair)
        if pair.consumer.alive:
            yield from self._consumer(pair)

    def _network(self, pair: Pair) -> Iterator[Step[Pair]]:
        for word in sorted(pair.network):
            limit = self.scenario.max_lost
            if self.scenario.forgetful and (not limit or pair.num_lost < limit):
                num_lost = pair.num_lost + (limit > 0)
                rest = replace(pair, network=pair.network - {word}, num_lost=num_lost)
                yield Step(f"{word} is lost", "loss", partial(_same, rest))
            to_producer = word in ("Grant", "CancelTransfer", "CommitAck")
            side = Side.PRODUCER if to_producer else Side.CONSUMER
            if not getattr(pair, side.value).alive:
                continue
            if word == "Grant":
                event: Event = t.GrantReceived(self.scenario.grant)
                reads = {"granted": True}
            else:
                event, reads = WORDS[word](), {}
            yield Step(
                f"{word} reaches the {side.value}",
                "word",
                partial(self.fire, pair, side, event, **reads),
            )

    def _writer(self, pair: Pair) -> Iterator[Step[Pair]]:
        if pair.write != "running":
            return
        alive = pair.producer.alive
        over = replace(pair, write="over")

        def end(outcome: Event, after: Pair) -> Pair:
            return self.fire(after, Side.PRODUCER, outcome) if alive else after

        landed = replace(over, landed_nbytes=pair.landed_nbytes + pair.producer.part_nbytes)
        yield Step("the write succeeds", "work", lambda: end(t.WriteSucceeded(1), landed))
        yield Step("the write is refused", "fault", lambda: end(t.WriteRefused("no"), over))
        if not self.scenario.engine_is_certain:
            zombie = replace(pair, write="zombie")
            unknown = t.WriteOutcomeUnknown("?")
            yield Step("the write's outcome is unknown", "fault", lambda: end(unknown, zombie))

    def _settling(self, pair: Pair) -> Iterator[Step[Pair]]:
        """The producer's engine is asked about its zombie, or a lost consumer is fenced."""
        end = pair.producer
        if not end.settling:
            return
        if self.scenario.engine_settles:
            over = replace(pair, write="over")
            yield Step(
                "the zombie has ended",
                "work",
                lambda: self.fire(over, Side.PRODUCER, t.WriteSettled(), settling=False),
            )
        again = _with(pair, Side.PRODUCER, replace(end, settling=False, retry=True))
        yield Step("the producer's engine cannot tell", "fault", lambda: again)
        if not pair.consumer.alive:
            fencing = _with(pair, Side.PRODUCER, replace(end, settling=False, fencing=True))
            yield Step("the producer knows that its peer is lost", "fault", lambda: fencing)

    def _time(self, pair: Pair, side: Side) -> Iterator[Step[Pair]]:
        end: End = getattr(pair, side.value)
        timers = (
            ("retry", t.RetryDue),
            ("grace", t.GraceEnded),
            ("deadline", t.DeadlinePassed),
        )
        for name, event in timers:
            if getattr(end, name):
                yield Step(
                    f"{event.__name__} at the {side.value}",
                    "retry" if name == "retry" else "time",
                    partial(self.fire, pair, side, event(), **{name: False}),
                )

    def _faults(self, pair: Pair, side: Side) -> Iterator[Step[Pair]]:
        end: End = getattr(pair, side.value)
        other: End = pair.consumer if side is Side.PRODUCER else pair.producer
        if end.fencing and other.alive:
            again = replace(end, fencing=False, retry=True)
            after = _with(pair, side, again)
            yield Step(f"the {side.value} cannot fence", "fault", lambda: after)
        if end.fencing and not other.alive:
            quiet = (
                pair  # a fence ends what the dead one could do, and zombies; not one's own write
            )
            if side is Side.CONSUMER or pair.write == "zombie":
                quiet = replace(pair, write="over" if pair.write != "none" else "none")
            yield Step(
                f"the {side.value} fences its peer",
                "fault",
                lambda: self.fire(quiet, side, t.PeerFenced(), fencing=False),
            )
        may_be_lost = self.scenario.may_be_declared_lost or not other.alive
        if may_be_lost and end.state not in TERMINAL:
            lost = t.PeerLost()
            yield Step(
                f"PeerLost at the {side.value}", "fault", lambda: self.fire(pair, side, lost)
            )
        if self.scenario.may_die and other.alive:  # one of the two: a dead pair proves nothing
            dead = replace(end, alive=False)
            killed = _with(pair, side, dead)
            yield Step(f"kill -9 of the {side.value}", "fault", lambda: killed)

    def _producer(self, pair: Pair) -> Iterator[Step[Pair]]:
        end = pair.producer
        if self.scenario.in_parts and end.granted and not (end.started or end.cancelled):
            part = t.PartReady(NBYTES // 2)
            yield Step("half is ready", "work", lambda: self.fire(pair, Side.PRODUCER, part))
        if not end.started and not end.cancelled:
            ready = t.BytesReady("source", NBYTES)
            yield Step(
                "bytes are ready",
                "work",
                lambda: self.fire(pair, Side.PRODUCER, ready, started=True, memory="owned"),
            )
        if not end.cancelled:
            gone = t.SourceFailed("engine", "failed", True)
            yield Step(
                "the source fails or is withdrawn",
                "fault",
                lambda: self.fire(pair, Side.PRODUCER, gone, cancelled=True),
            )

    def _consumer(self, pair: Pair) -> Iterator[Step[Pair]]:
        end = pair.consumer
        if not end.started:
            leased = t.SlotsLeased((0,))
            yield Step(
                "slots are leased",
                "work",
                lambda: self.fire(pair, Side.CONSUMER, leased, started=True, memory="owned"),
            )
        if not end.cancelled:
            yield Step(
                "the consumer's owner cancels",
                "fault",
                lambda: self.fire(pair, Side.CONSUMER, t.CancelRequested(), cancelled=True),
            )
        if end.publishing:
            for event in (t.Published(), t.PublishFailed("checksum")):
                yield Step(
                    type(event).__name__,
                    "work" if isinstance(event, t.Published) else "fault",
                    partial(self.fire, pair, Side.CONSUMER, event, publishing=False),
                )


def _same(pair: Pair) -> Pair:
    return pair


def _with(pair: Pair, side: Side, end: End) -> Pair:
    """The pair with another end at `side`."""
    if side is Side.PRODUCER:
        return replace(pair, producer=end)
    return replace(pair, consumer=end)


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
