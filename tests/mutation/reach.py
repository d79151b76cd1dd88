"""What every test and every run of the simulator executes: measured once, kept in a file.

The measuring is a mutation, too: each statement of a function first marks that it was reached, and
each transition which cell of its table it used.  The file is valid for the very source that it was
measured on.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation.mutants import FUNCTION, ROOT, body_of

MARKS = "__reached__"
HERE = Path(__file__).parent


class Marks:
    """What was reached since it was last asked."""

    def __init__(self) -> None:
        self.places: list[str] = []  # `epd/roles/bell.py:21`
        self.hits = bytearray()
        self.cells: set[str] = set()

    def take(self) -> list[str]:
        found = [self.places[i] for i, hit in enumerate(self.hits) if hit]
        self.hits[:] = bytes(len(self.hits))
        found += sorted(self.cells)
        self.cells.clear()
        return found

    def instrumented(self, path: str) -> ast.Module:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), path)
        for function in [node for node in ast.walk(tree) if isinstance(node, FUNCTION)]:
            skipped = len(function.body) - len(body_of(function))
            marked = [self._marked(path, statement) for statement in body_of(function)]
            function.body[skipped:] = [one for pair in marked for one in pair]
        line = ast.parse(f"from tests.mutation.reach import MARKED as {MARKS}").body
        head = 0
        while head < len(tree.body) and isinstance(tree.body[head], ast.Expr | ast.ImportFrom):
            head += 1  # the docstring and what must come first
        tree.body[head:head] = line
        return ast.fix_missing_locations(tree)

    def _marked(self, path: str, statement: ast.stmt) -> list[ast.stmt]:
        """A statement and what is in it; functions in functions are visited by themselves."""
        if not isinstance(statement, (*FUNCTION, ast.ClassDef)):
            for holder in (statement, *getattr(statement, "handlers", ()), *_cases(statement)):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(holder, name, None)
                    if block:
                        pairs = [self._marked(path, inner) for inner in block]
                        setattr(holder, name, [one for pair in pairs for one in pair])
        mark = ast.parse(f"{MARKS}[{len(self.places)}] = 1").body[0]
        self.places.append(f"{path}:{statement.lineno}")
        self.hits.append(0)
        return [ast.copy_location(mark, statement), statement]

    def watch_tables(self) -> None:
        """Of the kernel that is imported now."""
        from epd.fsm.kernel import Machine  # only once the importer serves marked modules

        fire, cells = Machine.fire, self.cells

        def marking(machine: Any, event: Any) -> Any:
            cells.add(cell(machine.table.name, machine.state.name, type(event).__name__))
            return fire(machine, event)

        Machine.fire = marking  # type: ignore[method-assign]


def _cases(statement: ast.stmt) -> list[ast.match_case]:
    return statement.cases if isinstance(statement, ast.Match) else []


def cell(table: str, state: str, event: str) -> str:
    return f"{table}:{state}:{event}"


MARKING = Marks()
MARKED = MARKING.hits


@dataclass(slots=True)
class Reach:
    """Which items (tests, runs of the simulator) execute what.

    `fired`: of runs of a drill, whether its fault really happened.  `at_import`: what importing and
    collecting runs.  `rows`: of each cell of the tables, what it holds.
    """

    costs_s: dict[str, float] = field(default_factory=dict)  # by item: time of the processor
    fired: dict[str, bool] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)  # bit maps of items
    at_import: dict[str, int] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)

    def note(self, item: str, cost_s: float, places: list[str]) -> None:
        bit = 1 << len(self.costs_s)
        self.costs_s[item] = cost_s
        for place in places:
            self.places[place] = self.places.get(place, 0) | bit

    def items(self, places: list[str]) -> list[str]:
        """Those that reach any of the places, the cheapest first."""
        together = 0
        for place in places:
            together |= self.places.get(place, 0)
        found = [item for i, item in enumerate(self.costs_s) if together >> i & 1]
        return sorted(found, key=lambda item: (self.costs_s[item], item))

    def within(self, path: str) -> list[str]:
        """All places of a module."""
        return [place for place in self.places if place.startswith(f"{path}:")]

    def save(self, file: Path, source: str) -> None:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["places"] = {place: hex(bits) for place, bits in self.places.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"source": source, **fields}), encoding="utf-8")

    @classmethod
    def load(cls, file: Path, source: str) -> Reach | None:
        """None: there is none for this source."""
        if not file.exists():
            return None
        fields = json.loads(file.read_text(encoding="utf-8"))
        if fields.pop("source") != source:
            return None
        fields["places"] = {place: int(bits, 16) for place, bits in fields["places"].items()}
        return cls(**fields)


def table_rows() -> dict[str, str]:
    """What the cells of all tables hold that are imported now."""
    from epd.fsm.kernel import Machine

    found: dict[str, str] = {}
    for kind in _subclasses(Machine):
        table = getattr(kind, "table", None)
        for state, events in table.dispatch.items() if table is not None else ():
            for event, edges in events.items():
                told = [
                    (getattr(guard, "__name__", ""), getattr(action, "__name__", ""), effects, to)
                    for guard, action, effects, to in edges
                ]
                found[cell(table.name, state.name, event.__name__)] = str(told)
    return found


def _subclasses(kind: type) -> list[type]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_subclasses(sub))]


def digest(more: str) -> str:
    """Of all source that the measuring ran."""
    whole = hashlib.sha256(more.encode())
    for path in sorted([*ROOT.glob("epd/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        if path.parent != HERE:
            whole.update(path.relative_to(ROOT).as_posix().encode())
            whole.update(path.read_bytes())
    return whole.hexdigest()
