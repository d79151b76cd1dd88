"""A table as an image sees it: edges merged per (source, target), each with its events.

Read back from `table.machine`, the `transitions.Machine` that everything else is compiled from, so
an image cannot show anything else than what runs.  A guard is shown only where it decides the
target: when both halves of a predicate lead to one state it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import transitions

from epd.fsm.kernel import Event, Row, State, Table


@dataclass(frozen=True, slots=True)
class Label:
    """What an edge is taken on: an event with its guard, or a message."""

    event: str
    guard: str = ""
    by_time: bool = False

    @property
    def text(self) -> str:
        return f"{self.event} [{self.guard}]" if self.guard else self.event


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A state, or a role."""

    name: str
    prose: str
    initial: bool = False
    terminal: bool = False
    held: str = ""  # why time must not end it


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """All labels that lead from one node to another, or back to it (`target == source`)."""

    source: str
    target: str
    labels: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """An image before it has positions."""

    name: str
    subtitle: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    legend: tuple[tuple[str, str], ...] = field(default=())  # (kind of text, its meaning)


STATE_LEGEND = (
    ("event", "what happened"),
    ("time", "an exit by time"),
    ("guard", "only if"),
    ("stays", "stays in the state"),
    ("prose", "dashed: held for a reason\u2003 double: terminal"),
)


def arrows(table: Table) -> list[transitions.Transition]:
    """Every transition of the machine, in the order of the table's rows."""
    by_event = [event.transitions for event in table.machine.events.values()]
    found = [arrow for by_source in by_event for arrows in by_source.values() for arrow in arrows]
    order = {id(row): index for index, row in enumerate(table.rows)}
    states = {state.name: index for index, state in enumerate(table.states)}
    return sorted(found, key=lambda t: (states[t.source], order[id(row_of(t))]))


def row_of(arrow: transitions.Transition) -> Row:
    row: Row = arrow.before[0].row
    return row


def edges(table: Table) -> tuple[GraphEdge, ...]:
    """Merged edges, in order of source and of first mention in the table."""
    events: dict[str, type[Event]] = {event.__name__: event for event in table.events}
    merged: dict[tuple[str, str], dict[str, list[str]]] = {}
    for arrow in arrows(table):
        event = arrow.before[0].event.__name__
        guards = [condition.func.__name__ for condition in arrow.conditions]
        labels = merged.setdefault((arrow.source, arrow.dest or arrow.source), {})
        labels.setdefault(event, []).extend(guards)
    return tuple(
        GraphEdge(
            source,
            target,
            tuple(
                Label(event, guards[0] if len(guards) == 1 else "", events[event].by_time)
                for event, guards in labels.items()
            ),
        )
        for (source, target), labels in merged.items()
    )


def state_graph(table: Table) -> Graph:
    """A table as nodes (terminal states last) and merged edges."""
    nodes = [
        GraphNode(
            state.name,
            told(state),
            state is table.initial,
            state in table.terminal,
            table.held.get(state, ""),
        )
        for state in table.states
    ]
    nodes.sort(key=lambda node: node.terminal)
    subtitle = headline(table.theory)
    return Graph(table.name, subtitle, tuple(nodes), edges(table), STATE_LEGEND)


def told(state: State) -> str:
    """What a state means, and what it owns."""
    owned = ", ".join(thing.name for thing in state.owns)
    return f"{state.value}; owns {owned}" if owned else str(state.value)


def headline(docstring: str) -> str:
    """A module's first line, without its name."""
    return docstring.strip().partition("\n")[0].partition(": ")[2]
