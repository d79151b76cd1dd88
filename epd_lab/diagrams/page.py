"""A machine's page: theory, images, states, effects, and what every event does in every state."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from epd.fsm.kernel import Event, Row, State, Table
from epd_lab.diagrams.edges import headline

NOTICE = "<!-- Written by `python -m epd diagrams` from the tables in epd/fsm; do not edit. -->"
STAYS = "\u21bb"

_HOW_TO_READ_THE_MATRIX = f"""\
Target state, with its guard in brackets; {STAYS} stays in the state (it may still act: see the
rows). A dot with a number is ignored, for the reason below. An empty cell is illegal: the event
fails this one object, with its story."""


_OWNERS = """\
What a state owns and the next one does not is given back, in this order and before the row's own
effects; a row writes no release. Below, rows stand with all their effects."""


def theory_of(docstring: str) -> str:
    """The body of a module's docstring as Markdown; underlined titles become bold."""
    lines = docstring.strip().splitlines()[1:]
    text: list[str] = []
    for line in lines:
        if line and set(line) == {"-"} and text and text[-1]:
            text[-1] = f"**{text[-1]}**"
            text.append("")
        else:
            text.append(line)
    return "\n".join(text).strip()


def page(table: Table) -> str:
    name = table.name
    parts = [
        NOTICE,
        f"# {name}: {headline(table.theory)}",
        theory_of(table.theory),
        f"![{name} as a rail map]({name.lower()}.svg)",
        "Each state's exits are the lines to its right; follow a line's colour to its target.",
        "## States",
        _states(table),
        *(("## What is owned", _OWNERS, _owned(table)) if table.owned else ()),
        "## Effects",
        _effects(table),
        "## Events",
        _events(table),
        "## Every event in every state",
        _HOW_TO_READ_THE_MATRIX,
        _matrix(table),
        "## Rows",
        _rows(table),
    ]
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)


def _kind(table: Table, state: State) -> str:
    if state is table.initial:
        return "initial"
    if state in table.terminal:
        return "terminal"
    return f"held: {table.held[state]}" if state in table.held else ""


def _states(table: Table) -> str:
    rows = [
        [
            f"`{state.name}`",
            state.value,
            _names(state.owns),
            _timers(table, state),
            _kind(table, state),
        ]
        for state in table.states
    ]
    return markdown_table(["State", "What it means", "What it owns", "Timers", ""], rows)


def _timers(table: Table, state: State) -> str:
    """Those that run in it."""
    return ", ".join(f"`{e.__name__}`" for e in table.timers if e in table.running[state])


def _owned(table: Table) -> str:
    rows = []
    for thing in table.owned:
        brings, ends = (
            ", ".join(f"`{e.__name__}`" for e in table.events if thing in getattr(e, what))
            for what in ("brings", "ends")
        )
        release = f"`{thing.release.name}`" if thing.release else "in use: only its end frees it"
        rows.append(
            [f"`{thing.name}`", thing.value, release, _names(thing.passed_on_by), brings, ends]
        )
    head = ["Owned", "What it is", "Given back by", "Or passed on by", "Comes with", "Ends with"]
    return markdown_table(head, rows)


def _names(members: Iterable[Enum]) -> str:
    return ", ".join(f"`{member.name}`" for member in members)


def _effects(table: Table) -> str:
    rows = []
    for effect in table.effects:
        by = dict.fromkeys(c.event.__name__ for _, c in table.cells() if effect in c.effects)
        rows.append([f"`{effect.name}`", effect.value, ", ".join(f"`{name}`" for name in by)])
    return markdown_table(["Effect", "Order to the outside", "Follows"], rows)


def meaning(kind: type) -> str:
    """A class's docstring, unless it is the signature that a dataclass writes when it has none."""
    doc = " ".join((kind.__doc__ or "").split())
    return "" if doc.startswith(f"{kind.__name__}(") else doc


def _events(table: Table) -> str:
    rows = []
    for event in table.events:
        carried = ", ".join(f"`{name}`" for name in getattr(event, "__match_args__", ()))
        time = "*by time* " if event.by_time else ""
        rows.append([f"`{event.__name__}`", f"{time}{meaning(event)}".strip(), carried])
    return markdown_table(["Event", "What happened", "Carries"], rows)


def _guard(row: Row) -> str:
    return row.when.__name__ if row.when is not None else ""


def _cell(table: Table, state: State, event: type[Event], reasons: list[str]) -> str:
    rows = table.rows_of(state, event)
    if rows:
        cells = []
        for row in rows:
            target = STAYS if row.target in (None, state) else row.target.name
            cells.append(f"{target} [{_guard(row)}]" if row.when is not None else target)
        return "<br>".join(cells)
    ignore = table.ignore_of(state, event)
    if ignore is None:
        return ""
    if ignore.reason not in reasons:
        reasons.append(ignore.reason)
    return f"\u00b7 <sup>{reasons.index(ignore.reason) + 1}</sup>"


def _matrix(table: Table) -> str:
    """Events down, states across: there are more events, and state names are shorter."""
    reasons: list[str] = []
    rows = [
        [f"`{event.__name__}`", *(_cell(table, state, event, reasons) for state in table.states)]
        for event in table.events
    ]
    notes = "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))
    head = ["", *(f"`{state.name}`" for state in table.states)]
    return f"{markdown_table(head, rows)}\n\nIgnored, because:\n\n{notes}"


def _rows(table: Table) -> str:
    rows = []
    for row, effects in table.told_rows():
        events = ", ".join(f"`{event.__name__}`" for event in row.events)
        guard = f" [{_guard(row)}]" if row.when is not None else ""
        target = f"`{row.target.name}`" if row.target is not None else STAYS
        rows.append([_names(row.sources), f"{events}{guard}", target, _names(effects), row.note])
    return markdown_table(["From", "On", "To", "Effects, in order", "Note"], rows)
