"""A run over time, as a trace for https://ui.perfetto.dev: a process per lane, machines on tracks.

A machine's life is a slice with its states within.  A slot's slice lasts from its lease to the end
of the transfer that holds it, which is what F6 and F7 are about.  Lives of one table share as few
tracks as will do.  All is read from the run's trace, but for the numbers of slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from epd.fsm import incoming
from epd.fsm.kernel import Event, Machine, State
from epd.fsm.tables import TABLES
from epd.keys import is_kv
from epd_lab.sim.cluster import GATEWAY, Cluster
from epd_lab.sim.core.process import SimProcess
from epd_lab.sim.world import Entry, World
from epd_lab.trace_events import TraceEvent, document, moment, part, process, track

SHOWN = {
    table.name: {state.name for state in table.terminal}
    for table in TABLES
    if table.name in {"GENERATION", "ENCODING", "EMBEDDING", "REQUEST", "OUTGOING", "INCOMING"}
}
"""Names of tables, and of their terminal states."""
AT_REST = frozenset({"RESIDENT", "DEMOTED"})  # memory that waits for use: not shown as work
MARKS = (
    "fault", "kill", "exit", "spawn", "stall", "resume", "expelled", "device_lost", "lost",
    "violation",
)  # fmt: skip


@dataclass(slots=True)
class TrackSpan:
    """Of one machine, or of one lease of memory, at one process; seconds of virtual time."""

    lane: str  # instance id
    group: str  # the machine's table, "KV blocks" or "slot 3"
    label: str
    state: str
    since_s: float
    pieces: list[tuple[str, float, float]] = field(default_factory=list)  # states that are over
    ended: str = ""  # the terminal state; empty: it never ended

    @property
    def from_s(self) -> float:
        return self.pieces[0][1]

    @property
    def to_s(self) -> float:
        return self.pieces[-1][2]

    def move(self, state: str, at_s: float) -> None:
        if self.state not in AT_REST:
            self.pieces.append((self.state, self.since_s, at_s))
        self.state, self.since_s = state, at_s


class Tracks:
    """`watch_run` is a `prepare` of `run`."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self._slots: dict[tuple[str, str], tuple[int, ...]] = {}  # by process and room
        self._open: dict[tuple[str, str, str], list[TrackSpan]] = {}  # by process, table and key
        self._over: list[TrackSpan] = []

    def watch_run(self, world: World, cluster: Cluster) -> None:
        self.lanes = [GATEWAY, *cluster.instances]
        world.watch(self._leased, incoming.SlotsLeased)

    def _leased(
        self, process: SimProcess, machine: Machine, event: Event, source: State, target: State
    ) -> None:
        assert isinstance(machine, incoming.Incoming)
        self._slots[process.name, machine.key] = tuple(machine.slots)

    def draw(self, entries: Iterable[Entry], end_s: float) -> str:
        """The trace as JSON; `entries` are all of the run."""
        moments = []
        for at_s, kind, what in entries:
            if kind in SHOWN:
                self._moved(at_s, kind, *map(str, what))
            elif kind in MARKS:
                moments.append(self._moment(at_s, kind, what))
            if kind in {"kill", "exit"}:
                for key in [key for key in self._open if key[0] == what[0]]:
                    self._end(key, at_s, "")
        for key in list(self._open):
            self._end(key, end_s, "")
        return json.dumps(document([*self._slices(), *moments]))

    def _moved(
        self, at_s: float, table: str, process: str, key: str, source: str, event: str, target: str
    ) -> None:
        lane, of = process.partition(":")[0], (process, table, key)
        lives = self._open.setdefault(of, [])
        if not lives:
            lives.append(TrackSpan(lane, table, key, source, at_s))
        if (process, key) in self._slots and (table, event) == ("INCOMING", "SlotsLeased"):
            slots = self._slots.pop((process, key))
            if is_kv(key):
                lives.append(TrackSpan(lane, "KV blocks", f"{key}, {len(slots)}", "LEASED", at_s))
            else:
                lives += [TrackSpan(lane, f"slot {n}", key, "LEASED", at_s) for n in slots]
        if source != target:
            lives[0].move(target, at_s)
        if target in SHOWN[table]:
            self._end(of, at_s, target)

    def _end(self, of: tuple[str, str, str], at_s: float, state: str) -> None:
        for life in self._open.pop(of):
            life.move("", at_s)
            life.ended = state
            self._over += [life] if life.pieces else []

    def _moment(self, at_s: float, kind: str, what: tuple[object, ...]) -> TraceEvent:
        names = [str(one).partition(":")[0] for one in what[:2]]
        lane = next((name for name in names if name in self.lanes), "")
        scope, pid = ("p", self.lanes.index(lane) + 1) if lane else ("g", 1)
        return moment(pid, 0, " ".join([kind, *map(str, what)]), at_s, scope)

    def _slices(self) -> Iterator[TraceEvent]:
        for pid, lane in enumerate(self.lanes, 1):
            yield process(pid, lane)
            yield track(pid, 0, "faults")
            own = [life for life in self._over if life.lane == lane]
            groups = sorted({life.group for life in own})
            rows = [(group, row) for group in groups for row in _pack(own, group)]
            for tid, (group, row) in enumerate(rows, 1):
                yield track(pid, tid, group)
                for life in row:
                    name = f"{life.label}: {life.ended or 'never ended'}"
                    yield part(pid, tid, name, life.from_s, life.to_s)
                    for piece in life.pieces:
                        yield part(pid, tid, *piece)


def _pack(lives: list[TrackSpan], group: str) -> list[list[TrackSpan]]:
    """Those of a group in as few rows as will do: none of a row begins before another's end."""
    rows: list[list[TrackSpan]] = []
    chosen = [life for life in lives if life.group == group]
    for life in sorted(chosen, key=lambda one: (one.from_s, one.label)):
        row = next((r for r in rows if r[-1].to_s <= life.from_s), None)
        if row is None:
            rows.append(row := [])
        row.append(life)
    return rows
