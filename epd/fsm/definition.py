"""A table's rows, defined in `transitions` and compiled from there for the hot path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import transitions

from epd.fsm.rows import Effect, Event, Guard, Ignore, Owned, Row, State, Timers


class TableError(Exception):
    """A table breaks one of the kernel's laws; raised at import."""


class RowCall:
    """A transition of a row as `transitions` sees it: its `before` callback, from which all is read
    back."""

    def __init__(self, row: Row, source: State, event: type[Event]) -> None:
        self.row = row
        self.event = event
        self.effects = row.all_effects(source, event)
        self.__name__ = ", ".join(e.name for e in self.effects) or "-"

    def __call__(self, event_data: transitions.EventData) -> None:
        model, (event,) = event_data.model, event_data.args
        if self.row.do is not None:
            self.row.do(model, event)
        model.effects = self.effects


class GuardCall:
    """A guard as `transitions` sees it: a condition on the event data."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.__name__ = guard.__name__

    def __call__(self, event_data: transitions.EventData) -> bool:
        (event,) = event_data.args
        return self.guard(event_data.model, event)


When = Callable[[object, Event], bool]  # these two are of any machine and event, since the table
Do = Callable[[object, Event], None]  # is asked only for those of its own
Edge = tuple[When | None, Do | None, tuple[Effect, ...], State | None]
Compiled = dict[type[Event], tuple[Edge, ...]]
_IGNORED: tuple[Edge, ...] = ()


class Definition:
    """A compiled set of rows, of which nobody has asked yet whether they keep the laws."""

    def __init__(
        self,
        name: str,
        theory: str,
        states: type[State],
        initial: State,
        terminal: Iterable[State],
        rows: Iterable[Row],
        ignores: Iterable[Ignore] = (),
        held: Mapping[State, str] | None = None,
        timers: Timers | None = None,
    ) -> None:
        self.name = name
        self.theory = theory
        self.states = tuple(states)
        self.initial = initial
        self.terminal = frozenset(terminal)
        self.rows = tuple(rows)
        self.ignores = tuple(ignores)
        self.held = dict(held or {})
        self.timers = dict(timers or {})
        self.events = tuple(dict.fromkeys(event for row in self.rows for event in row.events))
        things = [t for s in self.states for t in s.owns]
        things += [t for event in self.events for t in event.brings]
        self.owned: tuple[Owned, ...] = tuple(type(things[0])) if things else ()
        self.effects = tuple(dict.fromkeys(e for _, call in self.cells() for e in call.effects))
        self.running = {  # of each state, the timers that run there
            state: frozenset(event for event in self.timers if self.rows_of(state, event))
            for state in self.states
        }
        self.ends_by = {  # of them, those that end it
            state: frozenset(event for event in running if self._ends(state, event))
            for state, running in self.running.items()
        }
        self.ignores += tuple(self._late())
        self.machine = self._define()
        self.dispatch = self._compile()
        self.check()

    def check(self) -> None:
        """Raises TableError where a law is broken; a `Table` does."""

    def _late(self) -> Iterator[Ignore]:
        """A timer does not run where there is no row for it, and changes nothing there."""
        for event in self.timers:
            rest = [s for s in self.states if event not in self.running[s]]
            if states := tuple(s for s in rest if self.ignore_of(s, event) is None):
                yield Ignore(states, (event,), "its timer does not run here")

    def _define(self) -> transitions.Machine:
        """The table as a `transitions.Machine`: the definition that everything else is read from."""
        machine = transitions.Machine(
            model=None,
            states=list(self.states),
            initial=self.initial,
            auto_transitions=False,
            send_event=True,
        )
        for source, call in self.cells():
            row = call.row
            conditions = [GuardCall(row.when)] if row.when is not None else []
            name = call.event.__name__
            machine.add_transition(name, source, row.target, conditions, before=[call])
        return machine

    def cells(self) -> Iterator[tuple[State, RowCall]]:
        """Every transition: its source, and what it is."""
        for row in self.rows:
            for source in row.sources:
                for event in row.events:
                    yield source, RowCall(row, source, event)

    def told_rows(self) -> Iterator[tuple[Row, tuple[Effect, ...]]]:
        """Rows as they are carried out: what gives back different things stands apart."""
        for row in self.rows:
            told: dict[tuple[tuple[State, ...], tuple[Effect, ...]], list[type[Event]]] = {}
            for event in row.events:
                apart: dict[tuple[Effect, ...], list[State]] = {}
                for source in row.sources:
                    apart.setdefault(row.all_effects(source, event), []).append(source)
                for effects, sources in apart.items():
                    told.setdefault((tuple(sources), effects), []).append(event)
            for (sources_, effects), events in told.items():
                yield replace(row, source=sources_, event=tuple(events)), effects

    def _compile(self) -> dict[State, Compiled]:
        by_name = {event.__name__: event for event in self.events}
        dispatch: dict[State, Compiled] = {state: {} for state in self.states}
        for name, event in self.machine.events.items():
            for source_name, edges in event.transitions.items():
                source = self.state(source_name)
                dispatch[source][by_name[name]] = tuple(self._edge(edge) for edge in edges)
        for ignore in self.ignores:
            for state in ignore.sources:
                for event_type in ignore.events:
                    if event_type in dispatch[state]:
                        raise TableError(
                            f"{self.name}: {state.name} x {event_type.__name__} is both a row and "
                            "ignored; remove one"
                        )
                    dispatch[state][event_type] = _IGNORED
        return dispatch

    def _edge(self, edge: transitions.Transition) -> Edge:
        guards = [condition.func.guard for condition in edge.conditions]
        (call,) = edge.before
        row: Row = call.row
        target = None if edge.dest is None else self.state(edge.dest)
        when = cast("When | None", guards[0] if guards else None)
        return when, cast("Do | None", row.do), call.effects, target

    def state(self, name: str) -> State:
        return self.states[0].__class__[name]

    def rows_of(self, state: State, event: type[Event]) -> list[Row]:
        return [row for row in self.rows if event in row.events and state in row.sources]

    def _ends(self, state: State, event: type[Event]) -> bool:
        return any(row.target not in (None, state) for row in self.rows_of(state, event))

    def ignore_of(self, state: State, event: type[Event]) -> Ignore | None:
        return next((i for i in self.ignores if state in i.sources and event in i.events), None)
