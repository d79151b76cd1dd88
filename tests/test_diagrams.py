"""The rendered pages: up to date, made from the tables alone, equal bytes each time, legible."""

from __future__ import annotations

import functools
import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from epd.api.web import DRAWINGS
from epd.fsm.kernel import Row, Table
from epd.fsm.tables import TABLES
from epd_lab import diagrams
from epd_lab.diagrams import check_diagrams, drawings, render, write_diagrams
from epd_lab.diagrams.edges import Graph, state_graph
from epd_lab.diagrams.messages import message_graph, message_page, speakers, vocabulary
from epd_lab.diagrams.page import page
from epd_lab.diagrams.rails import CARD_X, EVENT_SIZE, RailMap
from epd_lab.diagrams.svg import mono_width
from tests.fsm.mutants import patched

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
once = functools.cache(render)  # what is drawn here is what other processes draw
each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


@pytest.fixture(autouse=True)
def rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagrams, "render", once)


def test_the_pages_in_docs_are_up_to_date() -> None:
    stale = check_diagrams(ROOT / "docs" / "state_diagrams")
    assert not stale, f"{stale} differ from the code; run: python -m epd diagrams"


def test_the_drawings_of_the_page_are_up_to_date() -> None:
    assert DRAWINGS.read_text(encoding="utf-8") == drawings(), "run: python -m epd diagrams"


def test_writing_then_checking_finds_nothing(tmp_path: Path) -> None:
    out = tmp_path / "not" / "there" / "yet"
    written = write_diagrams(out)
    assert check_diagrams(out) == []
    assert sorted(written) == sorted(out.iterdir())
    names = {path.name for path in written}
    assert {"README.md", "messages.md", "messages.svg", "incoming.md", "incoming.svg"} <= names


def test_an_edited_row_makes_its_pages_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_diagrams(tmp_path)
    edited = [_with_another_effect(table) if table is TABLES[0] else table for table in TABLES]
    monkeypatch.setattr(diagrams, "render", lambda: render(edited))
    assert check_diagrams(tmp_path) == ["generation.md"], "an effect is no part of the image"


def test_an_edited_target_makes_page_and_image_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_diagrams(tmp_path)
    table = TABLES[0]
    row = table.rows[0]
    other = next(s for s in table.states if s in table.terminal and s is not row.target)
    extra = Row(row.sources[0], row.event, other)
    cell = (row.sources[0], row.event)
    rows = [Row(cell[0], next(e for e in table.events if e.by_time), row.target), extra]
    edited = patched(table, [cell, (cell[0], rows[0].event)], rows)
    monkeypatch.setattr(diagrams, "render", lambda: render([edited, *TABLES[1:]]))
    assert check_diagrams(tmp_path) == ["README.md", "generation.md", "generation.svg"]


def _with_another_effect(table: Table) -> Table:
    row = table.rows[0]
    changed = Row(row.source, row.event, row.target, (*row.effects, table.effects[0]), row.do)
    return Table(
        table.name,
        table.theory,
        type(table.initial),
        table.initial,
        table.terminal,
        [changed, *table.rows[1:]],
        table.ignores,
        table.held,
    )


def test_a_missing_and_an_edited_file_are_stale(tmp_path: Path) -> None:
    write_diagrams(tmp_path)
    (tmp_path / "request.svg").unlink()
    (tmp_path / "README.md").write_text("by hand")
    assert check_diagrams(tmp_path) == ["README.md", "request.svg"]


def test_pages_of_a_machine_that_is_no_more_are_removed_but_not_what_others_wrote(
    tmp_path: Path,
) -> None:
    write_diagrams(tmp_path)
    (tmp_path / "former.md").write_text((tmp_path / "request.md").read_text())
    (tmp_path / "former.svg").write_text("<svg/>")
    (tmp_path / "notes.md").write_text("mine")
    assert check_diagrams(tmp_path) == ["former.md", "former.svg"]
    write_diagrams(tmp_path)
    assert check_diagrams(tmp_path) == []
    assert (tmp_path / "notes.md").read_text() == "mine"


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_writes_equal_bytes(tmp_path: Path, hash_seed: str) -> None:
    code = "import sys, pathlib, epd_lab.diagrams as d; d.write_diagrams(pathlib.Path(sys.argv[1]))"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, env=environment, cwd=ROOT
    )
    assert check_diagrams(tmp_path) == []


# --- what the pages say ---------------------------------------------------------------------------


@each_table
def test_a_page_shows_every_row_state_event_and_effect(table: Table) -> None:
    text = page(table)
    rows = text.split("## Rows", 1)[1].split("## The same", 1)[0]
    told = len(list(table.told_rows()))
    assert len([line for line in rows.splitlines() if line.startswith("| `")]) == told
    for thing in table.owned:
        assert f"| `{thing.name}` | {thing.value} |" in text
    for name in (*table.states, *table.effects):
        assert f"| `{name.name}` |" in text
        assert name.value in text
    for event in table.events:
        assert f"| `{event.__name__}` |" in text
    for ignore in table.ignores:
        assert any(f". {ignore.reason}" in line for line in text.splitlines()) or not any(
            event in table.events for event in ignore.events
        )


@each_table
def test_the_matrix_has_a_cell_for_every_state_and_event(table: Table) -> None:
    matrix = page(table).split("## Every event in every state", 1)[1].split("Ignored", 1)[0]
    lines = [line for line in matrix.splitlines() if line.startswith("| `")]
    assert len(lines) == len(table.events)
    for line, event in zip(lines, table.events, strict=True):
        cells = re.split(r"(?<!\\)\|", line)[2:-1]
        assert len(cells) == len(table.states)
        for cell, state in zip(cells, table.states, strict=True):
            legal = table.rows_of(state, event) or table.ignore_of(state, event)
            assert bool(cell.strip()) is bool(legal), f"{state.name} x {event.__name__}"


@each_table
def test_a_drawing_names_every_state_and_every_edge(table: Table) -> None:
    root = ET.fromstring(f"<page>{drawings([table])}</page>")[0]
    assert root.attrib["data-machine"] == table.name
    named = [one.attrib for one in root.iter()]
    states = [one["data-state"] for one in named if "data-state" in one]
    assert sorted(states) == sorted(state.name for state in table.states)
    found = [(one["data-source"], one["data-target"]) for one in named if "data-target" in one]
    moves = {
        (source.name, row.target.name)
        for row in table.rows
        for source in row.sources
        if row.target is not None and row.target is not source
    }
    assert sorted(found) == sorted(moves)
    assert "style" not in {key for one in named for key in one}, "a strict page would not show it"


# --- legible: nothing overlaps --------------------------------------------------------------------


def _graphs() -> list[Graph]:
    return [*(state_graph(table) for table in TABLES), message_graph(speakers())]


@pytest.mark.parametrize("graph", _graphs(), ids=lambda graph: graph.name)
def test_no_station_line_or_rail_overlaps_another(graph: Graph) -> None:
    drawn = RailMap(graph)
    stations = list(drawn.stations.values())
    for above, below in itertools.pairwise(stations):
        assert above.y + above.height < below.y
    for station in stations:
        levels = [station.port_y, *(out.y for out in station.exits)]
        needed = [15 * len(out.lines) for out in station.exits]
        for high, low, room in zip(levels, levels[1:], needed, strict=False):
            assert low - high >= room, "a label would lie on the line above it"
        assert all(level < station.y + station.height for level in levels)
    for one, two in itertools.combinations(drawn.rails, 2):
        if drawn.rails[one] == drawn.rails[two]:
            (a, b), (c, d) = drawn.span_of(one) or (0, 0), drawn.span_of(two) or (0, 0)
            assert b < c or d < a, f"the rails of {one} and {two} lie on each other"


@pytest.mark.parametrize("graph", _graphs(), ids=lambda graph: graph.name)
def test_every_text_is_inside_the_image_and_short_of_the_rails(graph: Graph) -> None:
    drawn = RailMap(graph)
    root = ET.fromstring(drawn.draw())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    first_rail = min(drawn.rails.values())
    for text in root.iter(f"{SVG}text"):
        content = "".join(text.itertext())
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        assert 0 < x < width and 0 < y < height
        if (
            text.attrib["class"].split()[0] == "mono"
            and float(text.attrib["font-size"]) == EVENT_SIZE
        ):
            end = x + mono_width(content, EVENT_SIZE)
            cards_end = CARD_X + drawn.card_width
            limit = cards_end if x < cards_end else first_rail
            assert end <= limit, f"{content!r} runs over"


# --- messages -------------------------------------------------------------------------------------

SYNTHETIC = '''
"""The left role: asks."""
from epd import messages as wire
from epd.messages import Grant as RowGrant, Leave
from epd.fsm import instance as fsm
from epd.roles.base import Component, receives

class Left(Component):
    @receives(Leave, wire.Commit)
    def on_either(self, received):
        self.actor.send("right", RowGrant(received.room))
        self.actor.send("right", wire.CommitAck("room", 1))
        self.fire(None, fsm.Heartbeat())

class Silent(Component):
    pass
'''

OTHER = '''
"""The right role: answers."""
from epd.messages import Commit, CommitAck, Grant
from epd.roles.base import Component, receives

class Right(Component):
    @receives(Grant)
    async def on_grant(self, received):
        self.actor.send("left", Commit("room", 1, 2, 3))

    @receives(CommitAck)
    def on_ack(self, received): ...
'''


def test_who_sends_and_handles_is_read_from_code(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text(SYNTHETIC)
    (tmp_path / "right.py").write_text(OTHER)
    left, right = speakers([tmp_path])
    assert (left.name, left.about) == ("Left", "The left role: asks.")
    assert left.receives == ["Leave", "Commit"]
    assert left.sends == ["Grant", "CommitAck"], "an event named like a message is not one"
    assert (right.sends, right.receives) == (["Commit"], ["Grant", "CommitAck"])
    arrows = {
        (edge.source, edge.target): [label.event for label in edge.labels]
        for edge in message_graph([left, right]).edges
    }
    assert arrows == {("Left", "Right"): ["Grant", "CommitAck"], ("Right", "Left"): ["Commit"]}
    text = message_page([left, right])
    assert "| `Commit` | `Right` | `Left` |" in text
    assert "| `Leave` | nobody | `Left` |" in text


def test_without_roles_there_is_a_page_and_no_image(tmp_path: Path) -> None:
    files = render(TABLES, [tmp_path / "nowhere"])
    assert "messages.svg" not in files
    assert "| `Grant` | nobody | nobody |" in files["messages.md"]


def test_every_message_is_sent_by_some_role_and_handled_by_some_role() -> None:
    found = speakers()
    sent = {name for speaker in found for name in speaker.sends}
    handled = {name for speaker in found for name in speaker.receives}
    assert set(vocabulary()) - sent == set(), "nobody sends these"
    assert set(vocabulary()) - handled == set(), "nobody handles these"
