"""The pages of docs/state_diagrams, made from the tables and from the code of the roles.

`write_diagrams` writes them, `check_diagrams` lists those that would differ now.  Output is a pure
function of the code: no times, no order by hash; running twice gives equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from epd.fsm import child
from epd.fsm.kernel import Table
from epd.fsm.tables import TABLES
from epd_lab.diagrams.edges import headline, state_graph
from epd_lab.diagrams.messages import ACTORS, message_graph, message_page, speakers
from epd_lab.diagrams.page import NOTICE, markdown_table, page
from epd_lab.diagrams.rails import RailMap

DEFAULT_OUT = Path("docs") / "state_diagrams"

_HOW_TO_READ = """\
Each object of `epd` that has a life has a state machine, and its table is the only place where that
life is decided. These pages are written from the tables by `python -m epd diagrams`;
`python -m epd diagrams --check` fails when they are stale.

**An image.** States stand one below the other. To the right of each are its exits: the events that
lead out, on a line in the colour of the target; the line meets the target's rail and ends in an
arrow at its box. A double border is a terminal state. A dashed border is a state that time must not
end, with the reason. *Slanted* events are exits by time: every other state has one. A guard stands
in brackets and only where it decides the target.

**An event** is what happened, in the past tense; each outcome is an event of its own. **An effect**
is an order to the outside; what comes of it returns as an event. An event that a state does not
know is illegal: it raises with the object's story and fails that object alone."""
WATCHED = tuple(table for table in TABLES if table is not child.TABLE)  # by `GET /state`


def render(tables: Iterable[Table] = TABLES, actors: Iterable[Path] = ACTORS) -> dict[str, str]:
    """File name to content, of every file of the folder."""
    tables = tuple(tables)
    files = {"README.md": _index(tables)}
    for table in tables:
        name = table.name.lower()
        files[f"{name}.md"] = page(table)
        files[f"{name}.svg"] = RailMap(state_graph(table)).draw()
    found = speakers(actors)
    files["messages.md"] = message_page(found)
    if found:
        files["messages.svg"] = RailMap(message_graph(found)).draw()
    return files


def drawings(tables: Iterable[Table] = WATCHED) -> str:
    """For the page that shows them at work (`epd/api/pages`)."""
    return "".join(RailMap(state_graph(table)).draw_part() for table in tables)


def write_diagrams(out: Path = DEFAULT_OUT) -> list[Path]:
    """Write every page and image under `out`, which is made if absent; returns their paths.

    Pages of machines that are no more are removed, if they were written by this program.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = render()
    for name in _leftovers(out, files):
        (out / name).unlink()
    for name, content in files.items():
        (out / name).write_text(content, encoding="utf-8", newline="\n")
    return [out / name for name in files]


def check_diagrams(out: Path = DEFAULT_OUT) -> list[str]:
    """Names of files under `out` that are missing, would differ, or are left over from a machine
    that is no more; empty when all is up to date."""
    files = render()

    def stale(name: str) -> bool:
        path = out / name
        return not path.is_file() or path.read_text(encoding="utf-8") != files[name]

    return [name for name in files if stale(name)] + _leftovers(out, files)


def _leftovers(out: Path, files: dict[str, str]) -> list[str]:
    pages = sorted(out.glob("*.md")) if out.is_dir() else []
    gone = [p for p in pages if p.name not in files and p.read_text("utf-8").startswith(NOTICE)]
    images = [p.with_suffix(".svg") for p in gone]
    return [p.name for p in (*gone, *images) if p.exists()]


def _index(tables: tuple[Table, ...]) -> str:
    rows = [
        [
            f"[{table.name}]({table.name.lower()}.md)",
            headline(table.theory),
            f"{len(table.states)} states, {len(table.events)} events, {len(table.rows)} rows",
        ]
        for table in tables
    ]
    rows.append(["[Messages](messages.md)", "which role sends and which role handles each", ""])
    parts = [NOTICE, "# State machines", markdown_table(["", "Life of", ""], rows)]
    parts += ["## How to read them", _HOW_TO_READ]
    return "\n\n".join(parts) + "\n"
