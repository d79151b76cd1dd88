"""The state machine kernel: tables are data, one function changes a state.

Two rules.  All that affects a transition lives in a table of rows; and a machine does not know what
is outside: it has no clock, no I/O, no log.  `fire(event)` looks up the row, lets the row's action
update the machine's own fields, sets the state, and returns the row's effects: orders that the
caller performs and whose results come back as further events.

A row says everything: `Row(source, event, target, effects=(...), do=action, when=guard, note=...)`.
`transitions` (github.com/pytransitions/transitions) is the source that we define into, validate and
draw from: each table becomes one `transitions.Machine` without models, whose events are then
compiled into a two-level dict for the hot path (8 us become a fraction of one).  A differential
test drives both with every state, event and guard value.

What the table must satisfy is checked at import, see `Table.__init__`:

- every (state, event) is a row, an `Ignore` with a written reason, or illegal;
- guards of one (state, event) are total and exclusive by construction: either no guard, or a
  predicate `when=p` and its complement `when=unless(p)`;
- no unreachable state, no trap (every state reaches a terminal one), no edge out of a terminal
  state (a row that stays, `target=None`, may still answer, e.g. a late message);
- every non-terminal state has an exit by time: an edge on an event with `by_time`; or it is `held`,
  with a written reason why time must not end it, and has a `by_time` row that tries again.

An illegal event raises `IllegalEvent` with the machine's story.  It fails that one object: the
caller turns it into the object's own fault, never into the death of the process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import transitions

from epd.fsm.entry import StoryEntry


class State(Enum):
    """Base of a machine's states; the value says what the object owns in that state."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is slow Python


class Effect(Enum):
    """Base of a machine's effects: orders to the outside; the value says what is ordered."""

    __hash__ = object.__hash__


class Event:
    """Base of events: what happened, in the past tense, one class per outcome."""

    __slots__ = ()
    by_time: ClassVar[bool] = False


Guard = Callable[[Any, Any], bool]
Action = Callable[[Any, Any], None]


class Unless:
    """The complement of a predicate, so that both halves read alike in row and picture."""

    __slots__ = ("__name__", "predicate")

    def __init__(self, predicate: Guard) -> None:
        self.predicate = predicate
        self.__name__ = f"not {predicate.__name__}"

    def __call__(self, machine: Any, event: Any) -> bool:
        return not self.predicate(machine, event)


def unless(predicate: Guard) -> Unless:
    return Unless(predicate)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One transition.  `source`: a state or several; `target=None` stays (an internal one)."""

    source: State | tuple[State, ...]
    event: type[Event]
    target: State | None
    effects: tuple[Effect, ...] = ()
    do: Action | None = None
    when: Guard | None = None
    note: str = ""

    @property
    def sources(self) -> tuple[State, ...]:
        return self.source if isinstance(self.source, tuple) else (self.source,)


@dataclass(frozen=True, slots=True)
class Ignore:
    """Events that change nothing in these states, and why that is right."""

    sources: tuple[State, ...]
    events: tuple[type[Event], ...]
    reason: str


class TableError(Exception):
    """A table breaks one of the kernel's laws; raised at import."""


class IllegalEvent(Exception):
    """An event that its machine's table does not allow in the present state."""

    def __init__(self, machine: Machine, event: Event) -> None:
        super().__init__(
            f"{machine.table.name} {machine.key}: {type(event).__name__} is illegal in "
            f"{machine.state.name}; story: {machine.tell_story()}"
        )


class Journal(Protocol):
    """Sees the birth and every transition of the machines made with it; gives stories their times."""

    def now_s(self) -> float: ...

    def opened(self, machine: Machine) -> None: ...

    def observe(self, machine: Machine, event: Event, source: State, target: State) -> None: ...


class _NullJournal:
    def now_s(self) -> float:
        return 0.0

    def opened(self, machine: Machine) -> None:
        pass

    def observe(self, machine: Machine, event: Event, source: State, target: State) -> None:
        pass


NULL_JOURNAL: Journal = _NullJournal()


class RowCall:
    """A row as `transitions` sees it: its `before` callback, from which the row is read back."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.__name__ = ", ".join(e.name for e in row.effects) or "-"

    def __call__(self, event_data: transitions.EventData) -> None:
        model, (event,) = event_data.model, event_data.args
        if self.row.do is not None:
            self.row.do(model, event)
        model.effects = self.row.effects


class GuardCall:
    """A guard as `transitions` sees it: a condition on the event data."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.__name__ = guard.__name__

    def __call__(self, event_data: transitions.EventData) -> bool:
        (event,) = event_data.args
        return self.guard(event_data.model, event)


Compiled = dict[
    type[Event], tuple[tuple[Guard | None, Action | None, tuple[Effect, ...], Any], ...]
]
_IGNORED: tuple[tuple[Guard | None, Action | None, tuple[Effect, ...], Any], ...] = ()


class Table:
    """A validated, compiled set of rows."""

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
    ) -> None:
        self.name = name
        self.theory = theory
        self.states = tuple(states)
        self.initial = initial
        self.terminal = frozenset(terminal)
        self.rows = tuple(rows)
        self.ignores = tuple(ignores)
        self.held = dict(held or {})
        self.events = tuple(dict.fromkeys(row.event for row in self.rows))
        self.effects = tuple(dict.fromkeys(e for row in self.rows for e in row.effects))
        self.machine = self._define()
        self.dispatch = self._compile()
        self._validate()

    def _define(self) -> transitions.Machine:
        """The table as a `transitions.Machine`: the definition that everything else is read from."""
        machine = transitions.Machine(
            model=None,
            states=list(self.states),
            initial=self.initial,
            auto_transitions=False,
            send_event=True,
        )
        for row in self.rows:
            conditions = [GuardCall(row.when)] if row.when is not None else []
            for source in row.sources:
                machine.add_transition(
                    row.event.__name__, source, row.target, conditions, before=[RowCall(row)]
                )
        return machine

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

    def _edge(self, edge: transitions.Transition) -> Any:
        guards = [condition.func.guard for condition in edge.conditions]
        (call,) = edge.before
        row: Row = call.row
        target = None if edge.dest is None else self.state(edge.dest)
        return (guards[0] if guards else None, row.do, row.effects, target)

    def state(self, name: str) -> State:
        return self.states[0].__class__[name]

    def rows_of(self, state: State, event: type[Event]) -> list[Row]:
        return [row for row in self.rows if row.event is event and state in row.sources]

    def ignore_of(self, state: State, event: type[Event]) -> Ignore | None:
        return next((i for i in self.ignores if state in i.sources and event in i.events), None)

    # --- the laws ---------------------------------------------------------------------------------

    def _validate(self) -> None:
        for check in (self._guards, self._terminals, self._reachability, self._exits_by_time):
            problem = check()
            if problem:
                raise TableError(f"{self.name}: {problem}")

    def _guards(self) -> str:
        for state in self.states:
            for event in self.events:
                guards = [row.when for row in self.rows_of(state, event)]
                if guards in ([], [None]):
                    continue
                where = f"{state.name} x {event.__name__}"
                if len(guards) != 2 or any(g is None for g in guards):
                    return f"{where}: guards are not a predicate and its complement"
                first, second = guards
                if not (isinstance(second, Unless) and second.predicate is first):
                    return f"{where}: write the predicate first, then unless(the same predicate)"
        return ""

    def _terminals(self) -> str:
        for row in self.rows:
            for source in row.sources:
                if source in self.terminal and row.target is not None:
                    return f"an edge leaves the terminal state {source.name}"
        return ""

    def _edges(self) -> list[tuple[State, State]]:
        return [(s, row.target) for row in self.rows for s in row.sources if row.target is not None]

    def _reachability(self) -> str:
        edges = self._edges()
        forward = _closure([self.initial], edges)
        unreachable = [s.name for s in self.states if s not in forward]
        if unreachable:
            return f"unreachable: {', '.join(unreachable)}"
        back = _closure(filter(self.terminal.__contains__, self.states), [(b, a) for a, b in edges])
        traps = [s.name for s in self.states if s not in back]
        return f"no way to a terminal state from {', '.join(traps)}" if traps else ""

    def _exits_by_time(self) -> str:
        timed = {
            source
            for row in self.rows
            for source in row.sources
            if row.event.by_time and row.target not in (None, source)
        }
        retried = {s for row in self.rows for s in row.sources if row.event.by_time and row.effects}
        stuck = [
            s.name
            for s in self.states
            if s not in self.terminal and s not in timed and not (s in self.held and s in retried)
        ]
        return f"no exit by time (fault F15): {', '.join(stuck)}" if stuck else ""


def _closure(start: Iterable[State], edges: list[tuple[State, State]]) -> set[State]:
    frontier = list(start)
    seen = set(frontier)
    while frontier:
        here = frontier.pop()
        for source, target in edges:
            if source is here and target not in seen:
                seen.add(target)
                frontier.append(target)
    return seen


STORY_LENGTH = 48


class Machine:
    """An object with a table: subclasses add slotted context fields that guards and actions read."""

    __slots__ = ("_journal", "_state", "_story", "key")
    table: ClassVar[Table]

    def __init__(self, key: str, journal: Journal = NULL_JOURNAL) -> None:
        self.key = key
        self._journal = journal
        self._state = self.table.initial
        self._story: deque[list[Any]] = deque(maxlen=STORY_LENGTH)  # the fields of StoryEntry
        journal.opened(self)

    @property
    def state(self) -> Any:
        return self._state

    @property
    def terminal(self) -> bool:
        return self._state in self.table.terminal

    @property
    def held(self) -> bool:
        """Whether time alone must not end the present state."""
        return self._state in self.table.held

    def fire(self, event: Event) -> tuple[Effect, ...]:
        """Apply an event; the only writer of the state.  Returns the effects to perform, in order."""
        source, kind = self._state, type(event)
        edges = self.table.dispatch[source].get(kind)
        if edges is None:
            raise IllegalEvent(self, event)
        for guard, action, effects, target in edges:
            if guard is not None and not guard(self, event):
                continue
            if action is not None:
                action(self, event)
            if target is None:
                target = source
            self._state = target
            journal, story = self._journal, self._story
            # what repeats (tokens, retries) must not push out what happened
            if target is source and story and (last := story[-1])[2] is kind and last[1] is source:
                last[4] += 1
            else:
                story.append([journal.now_s(), source, kind, target, 1])
            journal.observe(self, event, source, target)
            return effects
        return ()

    @property
    def story(self) -> tuple[StoryEntry, ...]:
        return tuple(
            StoryEntry(at_s, source.name, kind.__name__, target.name, times)
            for at_s, source, kind, target, times in self._story
        )

    def tell_story(self) -> str:
        """The story on one line: `RESERVED -RowsReady@1.204-> WRITING; ...`."""
        return "; ".join(map(str, self.story)) or "(nothing happened yet)"

    def __repr__(self) -> str:
        return f"<{self.table.name} {self.key} {self._state.name}>"
