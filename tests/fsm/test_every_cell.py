"""Every state x event x guard outcome of all tables, none left out.

Differential: the compiled `fire` and `transitions` itself, from which it was compiled, reach one
state with the same effects and the same changes of context.  Exhaustive: every cell is a row, or is
ignored for a written reason, or is illegal and leaves the object as it was.  The number of cells is
written down per table, so that a test which comes to visit fewer does not pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_origin, get_type_hints

import pytest
import transitions

from epd.fsm.kernel import Event, IllegalEvent, Machine, State, Table, Unless
from epd.fsm.request import Launched
from tests.fsm.tables import KINDS, Kind, at, context, make_event

each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@contextmanager
def forced(table: Table, state: State, event: type[Event], outcome: bool) -> Iterator[None]:
    """Guards of one cell answer `outcome` (and their complements the opposite), in both engines."""

    def answer(guard: Any) -> Any:
        value = not outcome if isinstance(guard, Unless) else outcome
        return lambda *_: value

    dispatch = table.dispatch[state]
    compiled = dispatch[event]
    calls = [
        condition.func
        for arrow in table.machine.events[event.__name__].transitions.get(state.name, ())
        for condition in arrow.conditions
    ]
    guards = [call.guard for call in calls]
    dispatch[event] = tuple((g and answer(g), do, effects, to) for g, do, effects, to in compiled)
    for call in calls:
        call.guard = answer(call.guard)
    try:
        yield
    finally:
        dispatch[event] = compiled
        for call, guard in zip(calls, guards, strict=True):
            call.guard = guard


def cells(table: Table) -> Iterator[tuple[State, type[Event], bool | None]]:
    """All rows of the table, one cell per outcome of its guard (None: no guard)."""
    for state in table.states:
        for event in table.events:
            rows = table.rows_of(state, event)
            if rows:
                outcomes = (None,) if rows[0].when is None else (True, False)
                yield from ((state, event, outcome) for outcome in outcomes)


class Model:
    """What `transitions` drives: it writes `.state`; all else is the machine's own context."""

    def __init__(self, machine: Machine, state: State) -> None:
        object.__setattr__(self, "_machine", machine)
        object.__setattr__(self, "state", state.name)
        object.__setattr__(self, "effects", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("state", "effects"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._machine, name, value)


def by_transitions(table: Table, machine: Machine, event: Event) -> tuple[str, Any, dict[str, Any]]:
    model = Model(machine, machine.state)
    state = table.machine.events[type(event).__name__]
    state.trigger(model, event)
    reached = model.state
    return getattr(reached, "name", reached), model.effects, context(machine)


def by_fire(machine: Machine, event: Event) -> tuple[str, Any, dict[str, Any]]:
    effects = machine.fire(event)
    return machine.state.name, effects, context(machine)


def in_cell(kind: Kind, state: State) -> Machine:
    """A machine in `state` whose context lets every action of the table run."""
    machine = at(kind.make(), state)
    if hasattr(machine, "waiters"):  # EMBEDDING: one waiter that is tried, one that is not
        machine.waiters.update({"room": "item", "other": "item"})
        machine.tried.add("room")
    if hasattr(machine, "steps"):
        machine.steps = (Launched(2, False), Launched(1, True))
    if hasattr(machine, "rooms"):
        machine.rooms.update({"room": None, "other": None})
    return machine


@each_kind
def test_fire_and_transitions_agree_in_every_cell(kind: Kind) -> None:
    table = kind.table
    visited = 0
    for state, event_type, outcome in cells(table):
        with forced(table, state, event_type, bool(outcome)):
            event = make_event(event_type)
            ours = by_fire(in_cell(kind, state), event)
            theirs = by_transitions(table, in_cell(kind, state), event)
            assert ours == theirs, f"{table.name}: {state.name} x {event_type.__name__} [{outcome}]"
            row = next(
                r
                for r in table.rows_of(state, event_type)
                if outcome is None or isinstance(r.when, Unless) is not outcome
            )
            assert ours[0] == (row.target or state).name
            assert ours[1] == row.all_effects(state, event_type)
        visited += 1
    assert visited >= kind.num_cells, f"{table.name}: only {visited} cells; lower it if meant"


@each_kind
def test_a_cell_is_a_row_or_ignored_for_a_reason_or_illegal(kind: Kind) -> None:
    table = kind.table
    for state in table.states:
        for event_type in table.events:
            machine = in_cell(kind, state)
            before = context(machine)
            rows, ignore = table.rows_of(state, event_type), table.ignore_of(state, event_type)
            where = f"{table.name}: {state.name} x {event_type.__name__}"
            if rows:
                assert ignore is None, where
            elif ignore is not None:
                assert len(ignore.reason.split()) >= 2, f"{where}: say why in words"
                assert machine.fire(make_event(event_type)) == (), where
                assert (machine.state, machine.story) == (state, ()), where
            else:
                assert_illegal(table, machine, event_type)
            if not rows:
                assert context(machine) == before, where


def assert_illegal(table: Table, machine: Machine, event_type: type[Event]) -> None:
    """Both engines refuse, the object stays as it was, and the error tells its story."""
    state = machine.state
    with pytest.raises(IllegalEvent) as raised:
        machine.fire(make_event(event_type))
    assert machine.state is state
    assert f"{event_type.__name__} is illegal in {state.name}" in str(raised.value)
    assert "story: (nothing happened yet)" in str(raised.value)
    with pytest.raises(transitions.MachineError):
        by_transitions(table, machine, make_event(event_type))


@each_kind
def test_real_guards_answer_without_raising_where_they_can_be_asked(kind: Kind) -> None:
    """A guard that raises would turn an event into a fault of the wrong kind."""
    for state, event_type, outcome in cells(kind.table):
        if outcome is None:
            continue
        predicate, complement = (row.when for row in kind.table.rows_of(state, event_type))
        machine, event = in_cell(kind, state), make_event(event_type)
        assert predicate(machine, event) is not complement(machine, event)


@each_kind
def test_a_machine_is_whole_when_it_is_made(kind: Kind) -> None:
    machine = kind.make()
    slots = [name for base in type(machine).__mro__ for name in getattr(base, "__slots__", ())]
    assert [name for name in slots if not hasattr(machine, name)] == []


def test_an_illegal_event_tells_what_had_happened() -> None:
    kind = next(k for k in KINDS if k.name == "INSTANCE")
    machine = kind.make()
    machine.fire(make_event(next(e for e in kind.table.events if e.__name__ == "JoinAccepted")))
    with pytest.raises(IllegalEvent, match=r"story: JOINING -JoinAccepted@0.000-> HEALTHY"):
        machine.fire(make_event(next(e for e in kind.table.events if e.__name__ == "JoinRejected")))


@each_kind
def test_guards_and_actions_are_of_the_machine_and_the_events_of_their_row(kind: Kind) -> None:
    """The kernel calls them by the table alone: what they are written for is checked here."""
    machine = type(kind.make())
    for row in kind.table.rows:
        guard = row.when.predicate if isinstance(row.when, Unless) else row.when
        for function in filter(None, (row.do, guard)):
            context, event = list(get_type_hints(function).values())[:2]
            assert issubclass(machine, get_origin(context) or context), (
                f"{function.__name__}: {context}"
            )
            for fired in row.events:
                wanted = getattr(event, "__origin__", event)
                assert issubclass(fired, wanted), f"{function.__name__}: {fired}"
