"""Both ends of one room and all that may happen between them, searched exhaustively.

OUTGOING (the producer) and INCOMING (the consumer), real machines, are joined by a network that
keeps every message ever sent and may deliver it at any later moment, any number of times, or never.
The writer runs on its own: it may end late, and an outcome that the engine calls unknown leaves a
*zombie*, a write that may still touch source and slots.  Timers fire at any moment after they were
armed.  Peers are declared lost at any moment, rightly or not; only a process that is dead can be
fenced.  A zombie ends by itself in the end, and its engine says so; or by a fence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from epd.failure import Failure, FailureKind
from epd.fsm import incoming as i
from epd.fsm import outgoing as o
from epd.fsm import room as r
from epd.fsm.kernel import NULL_JOURNAL, Effect, Event, State, Table
from epd_lab.sim.model.ends import End, Pair, Scenario
from epd_lab.sim.model.laws import Step, require
from epd_lab.sim.model.told import NBYTES, OFFER, PEER

PRODUCER, CONSUMER = "producer", "consumer"
TERMINAL = o.TABLE.terminal | i.TABLE.terminal
WRITES = "AWAITING_SLOTS STREAMING WRITING CANCEL_PENDING EXPIRE_PENDING QUARANTINED".split()
MAY_WRITE = frozenset(o.S[name] for name in WRITES)
_COUNTS = ("ready_nbytes", "part_nbytes", "written_nbytes")
TIMERS = {"retry": r.RetryDue, "grace": r.GraceEnded, "deadline": r.DeadlinePassed}
_OVER: dict[str, Any] = {
    **dict.fromkeys(("fencing", "settling"), False),
    **dict.fromkeys(_COUNTS, 0),
}
_FAILURE = Failure(FailureKind.TRANSFER, "aborted or in doubt")

MESSAGES: dict[str, Callable[[], Event]] = {
    "Commit": lambda: i.CommitReceived(NBYTES, ((NBYTES, 1),)),
    "ShortCommit": lambda: i.CommitReceived(NBYTES - 1, ((NBYTES, 1),)),
    "CommitAck": o.CommitAcked,
    "CancelTransfer": o.CancelReceived,
    "CancelAck": i.CancelAcked,
    "TransferAborted": lambda: i.AbortReceived(_FAILURE),
    "TransferInDoubt": lambda: i.DoubtReceived(_FAILURE),
}
SAYS: dict[Effect, str] = {
    i.Do.SEND_GRANT: "Grant",
    o.Do.SEND_COMMIT: "Commit",
    i.Do.SEND_COMMIT_ACK: "CommitAck",
    i.Do.SEND_CANCEL: "CancelTransfer",
    o.Do.SEND_CANCEL_ACK: "CancelAck",
    o.Do.SEND_ABORT: "TransferAborted",
    o.Do.SEND_DOUBT: "TransferInDoubt",
}
BEGINS: dict[Effect, str] = {  # what the owner's process has to do then
    o.Do.ARM_RETRY: "retry",
    i.Do.ARM_RETRY: "retry",
    o.Do.ARM_GRACE: "grace",
    i.Do.ARM_GRACE: "grace",
    i.Do.START_FENCE: "fencing",
    o.Do.SETTLE_WRITE: "settling",
    i.Do.PUBLISH: "publishing",
}


class PairModel:
    """The transition relation over `Pair`; a step that breaks a law raises `Violation`."""

    def __init__(
        self, scenario: Scenario, outgoing: Table = o.TABLE, incoming: Table = i.TABLE
    ) -> None:
        self.scenario = scenario

        class Producer(o.Outgoing):
            __slots__ = ()
            table = outgoing

        class Consumer(i.Incoming):
            __slots__ = ()
            table = incoming

        self._outgoing, self._incoming = Producer, Consumer

    def initial(self) -> Pair:
        return Pair(End(o.S.PENDING, retry=self.scenario.offers), End(i.S.PENDING))

    def quiescent(self, pair: Pair) -> bool:
        """Nothing is left to do at whoever is alive."""
        return all(not end.alive or end.state in TERMINAL for end in (pair.producer, pair.consumer))

    def succeeded(self, pair: Pair) -> bool:
        """The bytes are published, the source is free, and nobody has anything left to do."""
        memories = (pair.producer.memory, pair.consumer.memory)
        return self.quiescent(pair) and memories == ("released", "published")

    # --- one machine, one event -------------------------------------------------------------------

    def _machine(self, end: End, side: str) -> Any:
        if side == CONSUMER:
            consumer = self._incoming("room", 1, PEER, "owner", 4, 0.0, NULL_JOURNAL)
            consumer._state, consumer.nbytes = end.state, NBYTES
            return consumer
        producer = self._outgoing("room", 1, PEER, NULL_JOURNAL)
        producer._state, producer.nbytes = end.state, NBYTES
        producer.manifest = o.Manifest(None, 4, OFFER if self.scenario.offers else None)
        producer.grant = self.scenario.grant if end.granted else None
        for name in _COUNTS:
            setattr(producer, name, getattr(end, name))
        return producer

    def fire(self, pair: Pair, side: str, event: Event, **changes: object) -> Pair:
        """Fire at one end and perform its effects on the model's world."""
        end: End = replace(getattr(pair, side), **changes)
        machine = self._machine(end, side)
        effects = machine.fire(event)
        counts = {name: getattr(machine, name) for name in _COUNTS} if side == PRODUCER else {}
        end = replace(end, state=machine.state, **counts)
        pair = _with(pair, side, end)
        for effect in effects:
            pair = self._perform(pair, side, effect)
        end = getattr(pair, side)
        over = _OVER if end.state in TERMINAL else {}
        pair = _with(pair, side, replace(end, **_stopped(machine.table, end.state), **over))
        check(pair)
        return pair

    def _perform(self, pair: Pair, side: str, effect: Effect) -> Pair:
        end: End = getattr(pair, side)
        if effect in SAYS:
            word = SAYS[effect]
            if word == "Commit" and self.scenario.commit_is_short:
                word = "ShortCommit"
            return replace(pair, network=pair.network | {word})
        writable = pair.write in ("running", "zombie")
        if effect is o.Do.START_WRITE:
            require(not writable, "one write at a time")
            require(pair.landed_nbytes < NBYTES, "a room is written once")
            require(self.scenario.rows_granted == 4, "a write starts against its contract (F11)")
            return replace(pair, write="running")
        if effect is o.Do.LEASE_SLOTS:
            require(end.slots == "none", f"leases slots and they are {end.slots}")
            end = replace(end, slots="awaited")
        elif effect is o.Do.RELEASE_SLOTS:
            require(not writable, "slots to write from are returned under the write (F3)")
            end = replace(end, slots="none")
        elif effect is o.Do.HOLD_PART:
            end = replace(end, memory="owned")
        elif effect in (o.Do.RELEASE_SOURCE, i.Do.RELEASE_SLOTS):
            require(end.memory == "owned", f"{effect.name} of memory that is {end.memory}")
            end = replace(end, memory="released")
        elif effect in (o.Do.CONCLUDE_FAILED, i.Do.CONCLUDE_FAILED, o.Do.CONCLUDE_DELIVERED):
            end = replace(end, concluded=end.concluded + 1)
        elif effect is i.Do.CONCLUDE_DELIVERED:
            require(end.memory == "owned", f"published memory that is {end.memory}")
            require(pair.landed_nbytes == NBYTES, "what was published has not landed (F28)")
            end = replace(end, concluded=end.concluded + 1, memory="published")
        elif effect in BEGINS:
            begun: dict[str, Any] = {BEGINS[effect]: True}
            end = replace(end, **begun)
        return _with(pair, side, end)

    # --- everything that may happen next ----------------------------------------------------------

    def steps(self, pair: Pair) -> Iterator[Step[Pair]]:
        yield from self._network(pair)
        yield from self._writer(pair)
        for side in (PRODUCER, CONSUMER):
            if getattr(pair, side).alive:
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
            side = PRODUCER if to_producer else CONSUMER
            if not getattr(pair, side).alive:
                continue
            if word == "Grant":
                event: Event = o.GrantReceived(self.scenario.grant)
                reads = {"granted": True}
            else:
                event, reads = MESSAGES[word](), {}
            yield Step(
                f"{word} reaches the {side}",
                "message",
                partial(self.fire, pair, side, event, **reads),
            )

    def _writer(self, pair: Pair) -> Iterator[Step[Pair]]:
        if pair.write != "running":
            return
        alive = pair.producer.alive
        over = replace(pair, write="over")

        def end(outcome: Event, after: Pair) -> Pair:
            return self.fire(after, PRODUCER, outcome) if alive else after

        landed = replace(over, landed_nbytes=pair.landed_nbytes + pair.producer.part_nbytes)
        yield Step("the write succeeds", "work", lambda: end(o.WriteSucceeded(1), landed))
        yield Step("the write is refused", "fault", lambda: end(o.WriteRefused("no"), over))
        if not self.scenario.engine_is_certain:
            zombie = replace(pair, write="zombie")
            unknown = o.WriteOutcomeUnknown("?")
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
                lambda: self.fire(over, PRODUCER, o.WriteSettled(), settling=False),
            )
        again = _with(pair, PRODUCER, replace(end, settling=False, retry=True))
        yield Step("the producer's engine cannot tell", "fault", lambda: again)
        if not pair.consumer.alive:
            fencing = _with(pair, PRODUCER, replace(end, settling=False, fencing=True))
            yield Step("the producer knows that its peer is lost", "fault", lambda: fencing)

    def _time(self, pair: Pair, side: str) -> Iterator[Step[Pair]]:
        end: End = getattr(pair, side)
        for name, event in TIMERS.items():
            if getattr(end, name):
                yield Step(
                    f"{event.__name__} at the {side}",
                    "retry" if name == "retry" else "time",
                    partial(self.fire, pair, side, event(), **{name: False}),
                )

    def _faults(self, pair: Pair, side: str) -> Iterator[Step[Pair]]:
        end: End = getattr(pair, side)
        other: End = pair.consumer if side == PRODUCER else pair.producer
        if end.fencing and other.alive:
            again = replace(end, fencing=False, retry=True)
            after = _with(pair, side, again)
            yield Step(f"the {side} cannot fence", "fault", lambda: after)
        if end.fencing and not other.alive:
            quiet = pair  # a fence ends what the dead one could do, and zombies; not an own write
            fenced = i.PeerFenced() if side == CONSUMER else o.PeerFenced()
            if side == CONSUMER or pair.write == "zombie":
                quiet = replace(pair, write="over" if pair.write != "none" else "none")
            yield Step(
                f"the {side} fences its peer",
                "fault",
                lambda: self.fire(quiet, side, fenced, fencing=False),
            )
        may_be_lost = self.scenario.may_be_declared_lost or not other.alive
        if may_be_lost and end.state not in TERMINAL:
            lost = r.PeerLost()
            yield Step(f"PeerLost at the {side}", "fault", lambda: self.fire(pair, side, lost))
        if self.scenario.may_die and other.alive:  # one of the two: a dead pair proves nothing
            dead = replace(end, alive=False)
            killed = _with(pair, side, dead)
            yield Step(f"kill -9 of the {side}", "fault", lambda: killed)

    def _producer(self, pair: Pair) -> Iterator[Step[Pair]]:
        end = pair.producer
        if self.scenario.in_parts and end.granted and not (end.started or end.cancelled):
            part = o.PartReady(NBYTES // 2)
            yield Step("half is ready", "work", lambda: self.fire(pair, PRODUCER, part))
        if not end.started and not end.cancelled:
            ready = o.BytesReady(NBYTES)
            yield Step(
                "bytes are ready",
                "work",
                lambda: self.fire(pair, PRODUCER, ready, started=True, memory="owned"),
            )
        if end.slots == "awaited":
            leased = o.SlotsLeased((0,))
            yield Step(
                "slots to write from are leased",
                "work",
                lambda: self.fire(pair, PRODUCER, leased, slots="owned"),
            )
        if not end.cancelled:
            gone = o.SourceFailed(_FAILURE)
            yield Step(
                "the source fails or is withdrawn",
                "fault",
                lambda: self.fire(pair, PRODUCER, gone, cancelled=True),
            )

    def _consumer(self, pair: Pair) -> Iterator[Step[Pair]]:
        end = pair.consumer
        if self.scenario.offers and not end.blocks:
            blocks = i.BlocksLeased((0,), 0)
            yield Step(
                "blocks are leased",
                "work",
                lambda: self.fire(pair, CONSUMER, blocks, blocks=True, memory="owned"),
            )
        elif not end.started:
            leased = i.SlotsLeased((0,), NBYTES)
            yield Step(
                "slots are leased",
                "work",
                lambda: self.fire(pair, CONSUMER, leased, started=True, memory="owned"),
            )
        if not end.cancelled:
            yield Step(
                "the consumer's owner cancels",
                "fault",
                lambda: self.fire(pair, CONSUMER, i.CancelRequested(), cancelled=True),
            )
        if end.publishing:
            for event in (i.Published(), i.PublishFailed("checksum")):
                yield Step(
                    type(event).__name__,
                    "work" if isinstance(event, i.Published) else "fault",
                    partial(self.fire, pair, CONSUMER, event, publishing=False),
                )


def _stopped(table: Table, state: State) -> dict[str, Any]:
    """Its timers that do not run in this state."""
    return {name: False for name, event in TIMERS.items() if event not in table.running[state]}


def _same(pair: Pair) -> Pair:
    return pair


def _with(pair: Pair, side: str, end: End) -> Pair:
    """The pair with another end at `side`."""
    if side == PRODUCER:
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
            require(end.slots == "none", f"the {name} ends and slots to write from are {end.slots}")
            withdrew = name == "producer" and end.cancelled  # its owner ended it
            require(withdrew or end.concluded == 1, f"the {name} ends and its owner is not told")
