"""The history of machines: counted as it happens, and reported afterwards.

Theory of operation
-------------------
Every machine is made with a journal, and every transition passes through it. `RecordingJournal` is
the one observer of a process. It gives stories their times (the clock is injected, so that virtual
time works), counts transitions for metrics, keeps how many machines are in each state, and forwards
to other observers (a trace, a log). A machine that is opened and dropped without reaching a
terminal state stays in `live`: that is a leak (invariant 4), and the gauge shows it.

A timeline is made from stories only: `changes` reads one machine's moments of change, `timeline`
merges those of several machines, of one process or (as `Span`s over the wire) of many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from epd.fsm.kernel import Event, Machine, State


class Transition(NamedTuple):
    """The label of a counter: one edge of one table."""

    machine: str
    source: str
    event: str
    target: str


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
        self._seen: Counter[tuple[str, State, type[Event], State]] = Counter()
        self._live: Counter[tuple[str, State]] = Counter()

    def opened(self, machine: Machine) -> None:
        self._live[machine.table.name, machine.state] += 1

    def observe(self, machine: Machine, event: Event, source: State, target: State) -> None:
        name = machine.table.name
        self._seen[name, source, type(event), target] += 1
        if source is not target:
            self._live[name, source] -= 1
            if target not in machine.table.terminal:
                self._live[name, target] += 1
        for see in self.observers:
            see(machine, event, source, target)

    @property
    def live(self) -> dict[tuple[str, str], int]:
        """`(machine, state)` to how many are in it now; terminal states are not counted."""
        return {(name, state.name): count for (name, state), count in self._live.items() if count}

    @property
    def transitions(self) -> Counter[Transition]:
        """How often each edge was taken."""
        return Counter(
            {
                Transition(name, source.name, event.__name__, target.name): count
                for (name, source, event, target), count in self._seen.items()
            }
        )


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
