"""The laws of a table (see `epd.fsm.kernel`): each function gives the first breach, or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import product

from epd.fsm.definition import Definition, RowCall
from epd.fsm.rows import Event, State, Unless


def _guards(table: Definition) -> str:
    for state in table.states:
        for event in table.events:
            guards = [row.when for row in table.rows_of(state, event)]
            if guards in ([], [None]):
                continue
            where = f"{state.name} x {event.__name__}"
            if len(guards) != 2 or any(g is None for g in guards):
                return f"{where}: guards are not a predicate and its complement"
            first, second = guards
            if not (isinstance(second, Unless) and second.predicate is first):
                return f"{where}: write the predicate first, then unless(the same predicate)"
    return ""


def _terminals(table: Definition) -> str:
    for row in table.rows:
        for source in row.sources:
            if source in table.terminal and row.target is not None:
                return f"an edge leaves the terminal state {source.name}"
    return ""


def _ends_without_owning(table: Definition) -> str:
    for state in table.states:
        if state in table.terminal and state.owns:
            return f"the terminal state {state.name} owns {_names(state.owns)}"
    return ""


def _ignored_owners(table: Definition) -> str:
    for ignore in table.ignores:
        for state, event in product(ignore.sources, ignore.events):
            missed = [*event.brings, *(thing for thing in event.ends if thing in state.owns)]
            if missed:
                return f"{state.name} ignores {event.__name__}, which changes who owns {_names(missed)}"
    return ""


def _ways_back(table: Definition) -> str:
    """Whatever is owned is kept, given back, passed on, or ended: in every transition."""
    for source, call in table.cells():
        row, event, target = call.row, call.event, call.row.target or source
        parted = row.parted(source, event)
        stuck = [t for t in parted if t.release is None and not row.passes_on(t)]
        unowned = [t for t in table.owned if row.passes_on(t) and t not in parted]
        by_hand = [e for e in row.effects if e in row.releases(source, event)]
        over = [t for t in event.ends if t in target.owns and not row.effects]
        for wrong, why in (
            (stuck, "has no way back: no effect releases it, and the event does not end it"),
            (unowned, "is passed on and not parted with"),
            (by_hand, "follows from what is owned: do not write it"),
            (over, f"is owned by {target.name}, and the event has ended it"),
        ):
            if wrong:
                return f"{source.name} x {event.__name__} -> {target.name}: {_names(wrong)} {why}"
    return ""


def edges_of(table: Definition) -> list[tuple[State, State]]:
    return [(s, row.target) for row in table.rows for s in row.sources if row.target is not None]


def _reachability(table: Definition) -> str:
    edges = edges_of(table)
    forward = closure([table.initial], edges)
    unreachable = [s.name for s in table.states if s not in forward]
    if unreachable:
        return f"unreachable: {', '.join(unreachable)}"
    back = closure(filter(table.terminal.__contains__, table.states), [(b, a) for a, b in edges])
    traps = [s.name for s in table.states if s not in back]
    return f"no way to a terminal state from {', '.join(traps)}" if traps else ""


Moment = tuple[State, frozenset[type[Event]]]


def moments(table: Definition) -> set[Moment]:
    """Every state that can be reached by an event, with timers that run in it then."""
    born = frozenset(event for event, arms in table.timers.items() if not arms)
    frontier: list[Moment] = [(table.initial, born & table.running[table.initial])]
    seen = set(frontier if born else ())
    while frontier:
        here, running = frontier.pop()
        for source, call in table.cells():
            rings = call.event in table.timers
            if source is not here or (rings and call.event not in running):
                continue
            target = call.row.target or source
            runs = running - {call.event} | _armed(table, call)
            after = (target, runs & table.running[target])
            if after not in seen:
                seen.add(after)
                frontier.append(after)
    return seen


def _armed(table: Definition, call: RowCall) -> set[type[Event]]:
    return {event for event, arms in table.timers.items() if set(arms) & set(call.effects)}


def _timers(table: Definition) -> str:
    """What is armed runs in the state that is entered."""
    for source, call in table.cells():
        target = call.row.target or source
        idle = _armed(table, call) - table.running[target]
        if idle:
            what = ", ".join(event.__name__ for event in idle)
            return f"{source.name} x {call.event.__name__} arms {what}, of which {target.name} has no row"
    return ""


def _exits_by_time(table: Definition) -> str:
    """Whatever led to a state: a timer runs in it that has a way out (or, if it is held, tries
    again), or another machine's clock has."""
    begins = (table.initial, table.running[table.initial])  # left at once, or what it has is armed
    for state, running in (begins, *moments(table)):
        rings = [
            call
            for source, call in table.cells()
            if source is state and call.event.by_time
            if call.event in running or call.event not in table.timers
        ]
        leaves = any(call.row.target not in (None, state) for call in rings)
        tries = state in table.held and any(call.effects for call in rings)
        if not (state in table.terminal or leaves or tries):
            runs = ", ".join(sorted(event.__name__ for event in running)) or "none"
            return f"no exit by time (fault F15): {state.name}, where of its timers run: {runs}"
    return ""


LAWS = (
    _guards,
    _terminals,
    _ends_without_owning,
    _ignored_owners,
    _ways_back,
    _reachability,
    _timers,
    _exits_by_time,
)


def _names(members: Iterable[Enum]) -> str:
    return ", ".join(sorted(member.name for member in members))


def closure(start: Iterable[State], edges: list[tuple[State, State]]) -> set[State]:
    frontier = list(start)
    seen = set(frontier)
    while frontier:
        here = frontier.pop()
        for source, target in edges:
            if source is here and target not in seen:
                seen.add(target)
                frontier.append(target)
    return seen
