"""Tables with a bug put back: what the tests of this directory must notice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from epd.fsm.kernel import Event, Owned, Row, State, Table


class Planted(Row):
    """A row that says all of its effects: what a machine owns gives nothing back of itself."""

    __slots__ = ()

    def parted(self, source: State, event: type[Event]) -> tuple[Owned, ...]:
        return ()


def patched(
    table: Table, remove: Iterable[tuple[State, type[Event]]], rows: Sequence[Row]
) -> Table:
    """`table` with rows and ignores of some cells replaced, by rows as they stand here.  Raises
    TableError like any table."""
    cells = set(remove)

    def keep(row: Row) -> Iterable[Row]:
        for event in row.events:
            sources = tuple(s for s in row.sources if (s, event) not in cells)
            if sources:
                yield replace(row, source=sources, event=event)

    ignores = [
        type(ignore)((state,), (event,), ignore.reason)
        for ignore in table.ignores
        for state in ignore.sources
        for event in ignore.events
        if (state, event) not in cells
    ]
    kept = [part for row in table.rows for part in keep(row)]
    planted = [
        Planted(row.source, row.event, row.target, row.effects, row.do, row.when, row.note)
        for row in rows
    ]
    return Table(
        table.name,
        table.theory,
        type(table.initial),
        table.initial,
        table.terminal,
        [*kept, *planted],
        ignores,
        table.held,
        table.timers,
    )
