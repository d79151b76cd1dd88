"""A world: one loop, two planes, processes that come and go, and one trace of it all.

The trace is what happened, in order, with times: transitions of every machine, arrivals of
messages, landings of bytes, faults.  Its digest is the proof of determinism, its lines are what a
failure prints.  Nothing in it depends on object addresses, hash seeds or real time.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.core.clock import SimClock
from epd_lab.sim.core.loop import SimLoop
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.core.rand import KeyedRandom
from epd_lab.sim.planes.network import Conditions, Network
from epd_lab.sim.planes.transfer import DataConditions, Fabric
from epd_lab.sim.poison import Poison

MAX_VIOLATIONS = 20  # that are kept of a run
TRACE_LENGTH = 200_000
CLOCK_SPREAD_S = 100_000.0
DIGESTED_AT_ONCE = 512


Entry = tuple[float, str, tuple[object, ...]]  # when, what kind of thing, what


class Edge:
    """One way from state to state, spelled once for all transitions that take it."""

    __slots__ = ("event", "source", "table", "target", "text")

    def __init__(self, table: str, source: str, event: str, target: str) -> None:
        self.table, self.source, self.event, self.target = table, source, event, target
        self.text = f"{table} {source} {event} {target}"


class Watcher(Protocol):
    """Sees every transition of every machine in the world (checkers, faults at protocol points)."""

    def __call__(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None: ...


def _nothing(kind: str, *fields: object) -> None:
    """What a world that records nothing does with a trace."""


class WorldJournal:
    """The `Journal` of one process: times are its own monotonic clock's."""

    def __init__(self, world: World, process: SimProcess, clock: SimClock) -> None:
        self.now_s = clock.now_s
        self.observe = partial(world.observe, process)

    def opened(self, machine: Machine) -> None:
        """A machine exists; its first transition is what counts here."""

    def unmoved(self, machine: Machine, event: Event) -> None:
        """Nothing has changed; an illegal event is counted by its actor."""


class World:
    """See the module's docstring."""

    def __init__(
        self,
        seed: int,
        *,
        network: Conditions | None = None,
        data: DataConditions | None = None,
        max_steps: int = 2_000_000,
        keep_trace: bool = True,
        records: bool = True,
    ) -> None:
        """`records`: note what happens, for `digest` and `happened`; `keep_trace`: for `lines`."""
        self.seed = seed
        self.records = records
        if not records:
            self.trace = _nothing  # type: ignore[method-assign]
        self.loop = SimLoop(max_steps=max_steps)
        self.random = KeyedRandom(seed)
        self.network = Network(
            self.loop, self.random.stream("net"), self.trace, network or Conditions()
        )
        self.fabric = Fabric(
            self.loop, self.random.stream("data"), self.trace, data or DataConditions()
        )
        self.fabric.witnesses.is_cut = lambda one, other: (one, other) in self.network.blocked
        self.processes: dict[str, SimProcess] = {}  # the latest life of each
        self.watchers: list[Watcher] = []  # of every transition
        self._watchers_of: dict[type[Event], list[Watcher]] = {}
        self.poison = Poison()
        self.on_ask: list[Callable[[str, str, object], None]] = []  # leader, rank, and what
        self.violations: list[str] = []
        self.events: deque[Entry] = deque(maxlen=TRACE_LENGTH)
        self.fired: Counter[str] = Counter()  # faults that really happened
        self._edges: dict[tuple[type[Event], State, State], Edge] = {}  # that were taken
        self.on_death: list[Callable[[SimProcess], None]] = []
        self._keep_trace = keep_trace
        self._digest = hashlib.blake2b(digest_size=16)
        self._undigested: list[Entry] = []
        self._next_pid = 1000
        self.epochs: Counter[str] = Counter()
        self.set_s: defaultdict[str, float] = defaultdict(float)  # by how much clocks were set

    # --- processes --------------------------------------------------------------------------------

    def spawn(
        self, instance_id: str, main: Callable[[SimProcess], None], *, is_stranger: bool = False
    ) -> SimProcess:
        """Start a process: `main(process)` runs in its context at the loop's next turn.  A stranger
        is beside the one that has its name."""
        self.epochs[instance_id] += 1
        self._next_pid += 1
        epoch = self.epochs[instance_id]
        process = SimProcess(instance_id, epoch, self._next_pid, is_stranger=is_stranger)
        offset = self.random.uniform("clock", process.name)
        process.clock_offset_s = CLOCK_SPREAD_S * offset
        process.wall_skew_s = self.set_s[instance_id]
        if not is_stranger:
            self.processes[instance_id] = process
        self.trace("spawn", process.name)
        self.loop.call_soon(main, process, context=process.context)
        return process

    def clock(self, process: SimProcess) -> SimClock:
        return SimClock(self.loop, process)

    def journal(self, process: SimProcess) -> WorldJournal:
        return WorldJournal(self, process, self.clock(process))

    def set_clock(self, process: SimProcess, by_s: float) -> None:
        """The wall clock of its host: of later lives, too."""
        self.set_s[process.instance_id] += by_s
        self.processes[process.instance_id].wall_skew_s += by_s

    def drift(self, process: SimProcess, rate: float) -> bool:
        process.clock_offset_s += self.loop.now_s * (process.clock_rate - rate)
        process.clock_rate = rate
        return True

    def kill(self, instance_id: str) -> bool:
        """`kill -9`; False if it is dead already."""
        process = self.processes[instance_id]
        if not process.alive:
            return False
        self.trace("kill", process.name)
        self._end(process)
        return True

    def exit(self, process: SimProcess) -> None:
        """The process ends by itself, after closing what it had open."""
        if process.alive:
            self.trace("exit", process.name)
            process.exited = True
            self._end(process)

    def renew(self, process: SimProcess, main: Callable[[SimProcess], None]) -> SimProcess:
        """The process goes on as the next epoch, which attests that this one has ended."""
        if self.fabric.writes_of(process):
            self.violate(f"[lives] {process.name} has writes under way where its next epoch begins")
        self.fired["renewed"] += 1
        self.exit(process)
        life = self.spawn(process.instance_id, main)
        life.pid, life.slowness = process.pid, process.slowness
        life.clock_offset_s, life.clock_rate = process.clock_offset_s, process.clock_rate
        return life

    def _end(self, process: SimProcess) -> None:
        self.loop.kill(process)
        self.network.process_died(process)
        self.fabric.process_died(process)
        for callback in self.on_death:
            callback(process)

    def stall(self, instance_id: str) -> bool:
        process = self.processes[instance_id]
        if not process.alive or process.stalled:
            return False
        self.trace("stall", process.name)
        process.stalled_s = self.loop.now_s
        self.loop.stall(process)
        return True

    def resume(self, process: SimProcess) -> None:
        if process.alive and process.stalled:
            self.trace("resume", process.name)
            process.resumed_s = self.loop.now_s
            self.loop.resume(process)

    # --- what happened ----------------------------------------------------------------------------

    def trace(self, kind: str, *fields: object) -> None:
        """Note what happened: names and numbers, text where the kind has no better."""
        entry, undigested = (self.loop.now_s, kind, fields), self._undigested
        undigested.append(entry)
        if len(undigested) >= DIGESTED_AT_ONCE:
            self._digest_entries()
        if self._keep_trace:
            self.events.append(entry)

    def watch(self, watcher: Watcher, *events: type[Event]) -> None:
        """Show it the transitions by these events; `watchers` see all."""
        for event in events:
            self._watchers_of.setdefault(event, []).append(watcher)

    def observe(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        kind = type(event)
        if self.records:
            edge = self._edges.get((kind, source, target))
            if edge is None:
                edge = Edge(machine.table.name, source._name_, kind.__name__, target._name_)
                self._edges[kind, source, target] = edge
            undigested = self._undigested
            undigested.append((self.loop.now_s, edge.text, (process.name, machine.key)))
            if len(undigested) >= DIGESTED_AT_ONCE:
                self._digest_entries()
            if self._keep_trace:
                what = (process.name, machine.key, edge.source, edge.event, edge.target)
                self.events.append((self.loop.now_s, edge.table, what))
        if kind in self._watchers_of:
            for watch in self._watchers_of[kind]:
                watch(process, machine, event, source, target)
        for watch in self.watchers:
            watch(process, machine, event, source, target)

    def happened(self) -> frozenset[str]:
        """Kinds of faults, transitions `MACHINE:FROM>TO` and events `MACHINE:EVENT` so far."""
        counted = self.fired + self.network.counters + self.fabric.counters
        taken = self._edges.values()
        return frozenset(counted).union(
            [f"{edge.table}:{edge.source}>{edge.target}" for edge in taken],
            [f"{edge.table}:{edge.event}" for edge in taken],
        )

    def violate(self, text: str) -> None:
        """A checker found something; the run goes on, the first violation is the one to read."""
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(f"{self.loop.now_s:.4f} s: {text}")
        self.trace("violation", text)

    def digest(self) -> str:
        self._digest_entries()
        return self._digest.hexdigest()

    def _digest_entries(self) -> None:
        """Packed, not printed: times count to the last bit, and it costs a tenth."""
        self._digest.update(msgspec.msgpack.encode(self._undigested, enc_hook=str))
        self._undigested.clear()

    def lines(self, last: int = 0) -> list[str]:
        """The trace as text, the last `last` lines (0: all)."""
        chosen = list(self.events)[-last:] if last else list(self.events)
        return [f"{at:10.4f} {kind:12} {' '.join(map(str, what))}" for at, kind, what in chosen]

    def close(self) -> None:
        self.loop.freeze()
