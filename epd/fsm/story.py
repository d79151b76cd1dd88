"""The history of machines: counted as it happens, and reported afterwards.

Theory of operation
-------------------
Every machine is made with a journal, and every transition passes through it. `RecordingJournal` is
the one observer of a process. It gives stories their times (the clock is injected, so that virtual
time works), and counts transitions and the events that moved nothing.  It keeps each machine's
state and since when, and forwards to other observers (a trace, a log). A machine that is opened and
dropped without reaching a terminal state stays in `live`: that is a leak (invariant 4), and the
gauge shows it. Of the last machines that ended, the stories are kept.

A timeline is made from stories only: `changes` reads one machine's moments of change; `timeline`
merges those of several, of one process or (as `Span`s over the wire) of many.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import NamedTuple

from epd.fsm.kernel import Event, Machine, State, Table, Told

MAX_ENDED = 512
ILLEGAL = "illegal"


class Transition(NamedTuple):
    """The label of a counter: one edge of one table."""

    machine: str
    source: str
    event: str
    target: str


class Resident(NamedTuple):
    """A machine, the state that it is in, and since when, on its journal's clock."""

    table: Table
    key: str
    state: State
    since_s: float
    told: Told
    machine: Machine | None = None  # of one that is not over


class Change(NamedTuple):
    """A machine entered a state at `at_s`, on its journal's clock (or on one shifted to it)."""

    machine: str
    key: str
    state: str
    at_s: float


class Moment(NamedTuple):
    """A line of a timeline: milliseconds from its start."""

    machine: str
    key: str
    state: str
    t_ms: float


Observer = Callable[[Machine, Event, State, State], None]


class RecordingJournal:
    """A `Journal` that counts.  `observers` see every transition, source equal to target included."""

    def __init__(self, now_s: Callable[[], float], observers: Iterable[Observer] = ()) -> None:
        self.now_s = now_s
        self.observers = list(observers)
        self._seen: Counter[tuple[Table, State, type[Event], State]] = Counter()
        self._unmoved: Counter[tuple[Table, State, type[Event]]] = Counter()
        # in the order in which they entered: the first of a state is the oldest
        self._live: defaultdict[tuple[Table, State], dict[Machine, float]] = defaultdict(dict)
        self._ended: deque[Resident] = deque(maxlen=MAX_ENDED)

    def opened(self, machine: Machine) -> None:
        self._live[machine.table, machine.state][machine] = self.now_s()

    def observe(self, machine: Machine, event: Event, source: State, target: State) -> None:
        table = machine.table
        self._seen[table, source, type(event), target] += 1
        if source is not target:
            now_s = machine.told[-1][0]
            self._live[table, source].pop(machine, None)
            if target not in table.terminal:
                self._live[table, target][machine] = now_s
            else:
                self._ended.append(Resident(table, machine.key, target, now_s, machine.told))
        for see in self.observers:
            see(machine, event, source, target)

    def unmoved(self, machine: Machine, event: Event) -> None:
        self._unmoved[machine.table, machine.state, type(event)] += 1

    @property
    def live(self) -> dict[tuple[str, str], int]:
        """`(machine, state)` to how many are in it now; terminal states are not counted."""
        return {
            (table.name, state.name): len(machines)
            for (table, state), machines in self._live.items()
            if machines
        }

    def residents(self) -> Iterator[tuple[Table, State, dict[Machine, float]]]:
        """The machines of each state that is not terminal, since when they are in it; oldest
        first."""
        for (table, state), machines in self._live.items():
            if machines:
                yield table, state, machines

    def ended(self) -> Iterator[Resident]:
        """The last ones that ended, as they ended."""
        return iter(self._ended)

    @property
    def transitions(self) -> Counter[Transition]:
        """How often each edge was taken."""
        return Counter(
            {
                Transition(table.name, source.name, event.__name__, target.name): count
                for (table, source, event, target), count in self._seen.items()
            }
        )

    @property
    def unmoved_events(self) -> dict[Transition, tuple[int, str]]:
        """How often an event came that changed nothing, and why: the table's words, or ILLEGAL."""
        found = {}
        for (table, state, event), count in self._unmoved.items():
            ignore = table.ignore_of(state, event)
            edge = Transition(table.name, state.name, event.__name__, state.name)
            found[edge] = (count, ignore.reason if ignore is not None else ILLEGAL)
        return found


def outlived_its_clock(table: Table, state: str, backwards: Iterable[tuple[str, str, str]]) -> bool:
    """Whether a clock of a machine went off in its present state, which time must not end (`held`).
    `backwards`: source, event and target of the lines of its story, the last one first."""
    if table.state(state) not in table.held:
        return False
    clocks = {event.__name__ for event in table.timers}
    here = takewhile(lambda line: line[0] == line[2], backwards)
    return any(event in clocks for _, event, _ in here)


def changes(machine: Machine, offset_s: float = 0.0) -> list[Change]:
    """The moments at which a machine changed its state; `offset_s` shifts them to another clock."""
    return [
        Change(machine.table.name, machine.key, entry.target, entry.at_s + offset_s)
        for entry in machine.story
        if entry.source != entry.target
    ]


def timeline(parts: Iterable[Iterable[Change]], start_s: float) -> list[Moment]:
    """Merge stories by time; of simultaneous changes those of an earlier part come first."""
    merged = sorted((change for part in parts for change in part), key=lambda change: change.at_s)
    return [Moment(c.machine, c.key, c.state, (c.at_s - start_s) * 1000.0) for c in merged]
