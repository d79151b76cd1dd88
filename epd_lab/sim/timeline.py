"""What a run looked like over time: every machine's states as bars, slots, marks of faults.

A `Timeline` watches a run (`watch_run` is a `prepare` of `run`); `epd_lab.sim.tracks` draws it.
Bars are pieces of one machine's life in one state; a slot's bar lasts from its lease to the end of
the transfer that holds it, which is what F6 and F7 are about.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epd.fsm import incoming
from epd.fsm.kernel import Event, Machine, State
from epd_lab.sim.cluster import GATEWAY, Cluster
from epd_lab.sim.process import SimProcess
from epd_lab.sim.world import World

SHOWN = ("GENERATION", "ENCODING", "EMBEDDING", "REQUEST", "OUTGOING", "INCOMING")
AT_REST = frozenset({"RESIDENT", "DEMOTED"})  # memory that waits for use: not shown as work
MARKS = (
    "fault", "kill", "exit", "spawn", "stall", "resume", "expelled", "device_lost", "lost",
    "violation",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """A machine in one state; seconds of virtual time."""

    state: str
    from_s: float
    to_s: float


@dataclass(slots=True)
class Bar:
    """One machine's life, or one lease of memory, at one process."""

    lane: str  # instance id
    group: str  # the machine's table, "KV blocks" or "slot 3"
    label: str
    pieces: list[Piece] = field(default_factory=list)
    ended: str = ""  # the terminal state; empty: it never ended

    @property
    def from_s(self) -> float:
        return self.pieces[0].from_s

    @property
    def to_s(self) -> float:
        return self.pieces[-1].to_s


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a process, or to the run (`lane` empty)."""

    at_s: float
    lane: str
    kind: str
    text: str


class Timeline:
    """Collects bars while a run goes on; `marks` and `close` read its trace afterwards."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self.bars: list[Bar] = []
        self.marks: list[Mark] = []
        self._open: dict[tuple[str, str, str], tuple[Bar, str, float]] = {}
        self._leases: dict[tuple[str, str], list[tuple[Bar, float]]] = {}
        self._world: World | None = None

    def watch_run(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self.lanes = [GATEWAY, *cluster.instances]
        world.watchers.append(self._watch)
        world.on_death.append(self._died)

    def close(self) -> None:
        """Call after the run: ends what is open, reads the marks from the trace."""
        assert self._world is not None
        now_s = self._world.loop.now_s
        for key in list(self._open):
            self._end(key, now_s, "")
        for leased in list(self._leases):
            self._give_back(leased, now_s)
        self.bars = [bar for bar in self.bars if bar.pieces]
        for at_s, kind, what in self._world.events:
            if kind in MARKS:
                self.marks.append(_mark(at_s, kind, what))

    def _watch(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        table, now_s = machine.table.name, self._now_s()
        if table not in SHOWN:
            return
        key = (process.name, table, machine.key)
        if isinstance(event, incoming.SlotsLeased) and isinstance(machine, incoming.Incoming):
            self._lease(process, machine, now_s)
        if key not in self._open:
            bar = Bar(process.instance_id, table, machine.key)
            self.bars.append(bar)
            self._open[key] = (bar, source.name, now_s)
        if source is not target:
            self._step(key, target.name, now_s)
        if machine.terminal:
            self._end(key, now_s, target.name)
            self._give_back((process.name, machine.key), now_s)

    def _now_s(self) -> float:
        assert self._world is not None
        return self._world.loop.now_s

    def _step(self, key: tuple[str, str, str], state: str, now_s: float) -> None:
        bar, before, since_s = self._open[key]
        if before not in AT_REST:
            bar.pieces.append(Piece(before, since_s, now_s))
        self._open[key] = (bar, state, now_s)

    def _end(self, key: tuple[str, str, str], now_s: float, state: str) -> None:
        self._step(key, state, now_s)
        self._open.pop(key)[0].ended = state

    def _lease(self, process: SimProcess, machine: incoming.Incoming, now_s: float) -> None:
        lane, key = process.instance_id, machine.key
        if key.endswith("/kv"):
            bars = [Bar(lane, "KV blocks", f"{key}, {len(machine.slots)}")]
        else:
            bars = [Bar(lane, f"slot {slot}", key) for slot in machine.slots]
        self.bars += bars
        self._leases.setdefault((process.name, key), []).extend((bar, now_s) for bar in bars)

    def _give_back(self, leased: tuple[str, str], now_s: float) -> None:
        for bar, since_s in self._leases.pop(leased, ()):
            bar.pieces.append(Piece("LEASED", since_s, now_s))
            bar.ended = "DELIVERED"

    def _died(self, process: SimProcess) -> None:
        for key in [key for key in self._open if key[0] == process.name]:
            self._end(key, self._now_s(), "")
        for leased in [leased for leased in self._leases if leased[0] == process.name]:
            self._give_back(leased, self._now_s())


def _mark(at_s: float, kind: str, what: tuple[object, ...]) -> Mark:
    text = " ".join(map(str, what))
    if kind == "violation":
        return Mark(at_s, "", kind, text)
    if kind == "fault":
        return Mark(at_s, str(what[1]), kind, str(what[0]))
    if kind == "lost":
        return Mark(at_s, str(what[1]), kind, str(what[2]))
    return Mark(at_s, str(what[0]).split(":")[0], kind, text)
