"""Tables with a bug put back: what the tests of this directory must notice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from epd.fsm.kernel import Event, Row, State, Table


def patched(
    table: Table, remove: Iterable[tuple[State, type[Event]]], rows: Sequence[Row]
) -> Table:
    """`table` with rows and ignores of some cells replaced.  Raises TableError like any table."""
    cells = set(remove)

    def keep(row: Row) -> Iterable[Row]:
        sources = tuple(s for s in row.sources if (s, row.event) not in cells)
        if sources:
            yield Row(sources, row.event, row.target, row.effects, row.do, row.when, row.note)

    ignores = [
        type(ignore)((state,), (event,), ignore.reason)
        for ignore in table.ignores
        for state in ignore.sources
        for event in ignore.events
        if (state, event) not in cells
    ]
    kept = [part for row in table.rows for part in keep(row)]
    return Table(
        table.name,
        table.theory,
        type(table.initial),
        table.initial,
        table.terminal,
        [*kept, *rows],
        ignores,
        table.held,
    )
