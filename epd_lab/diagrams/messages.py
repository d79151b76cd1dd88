"""The senders and receivers of the control plane's messages, read from the code of the roles.

Nothing here is declared twice.  A class *receives* the messages of its `@receives(...)` decorators,
and it *sends* the messages that it constructs: a role builds a message for no other purpose.  Both
are found in the syntax trees of the role modules, without importing them.  A module that cannot be
there yet, or a message that nobody builds or nobody handles, is shown as such.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from epd import messages
from epd_lab.diagrams.edges import Graph, GraphEdge, GraphNode, Label
from epd_lab.diagrams.page import NOTICE, markdown_table, meaning

_HOW_TO_READ = """\
Read from the code of `epd/roles`: a class sends what it builds, and handles what its `@receives`
decorators name. Fields and their meaning are in `epd/messages.py` and `epd/room_messages.py`."""

ACTORS = tuple(Path(messages.__file__).parent / name for name in ("groups", "roles"))


@dataclass(slots=True)
class Speaker:
    """A class of a role module: the messages that it builds and handles, and the headline of its
    module."""

    name: str
    about: str
    sends: list[str] = field(default_factory=list)
    receives: list[str] = field(default_factory=list)


def vocabulary() -> dict[str, type[messages.Message]]:
    """Every message by its name, in the order of `epd.messages`, and those of rooms."""
    kinds = sorted(messages.MESSAGES, key=lambda kind: kind.__module__)
    return {kind.__name__: kind for kind in kinds}


def speakers(folders: Iterable[Path] = ACTORS) -> list[Speaker]:
    """The classes that take part, in order of the first message that each sends."""
    found: list[Speaker] = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        known = _imported(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                speaker = Speaker(node.name, about)
                speaker.receives = in_order(known.get(name, "") for name in _received(node))
                speaker.sends = in_order(known.get(name, "") for name in _built(node))
                if speaker.sends or speaker.receives:
                    found.append(speaker)
    order = list(vocabulary())
    return sorted(found, key=lambda s: order.index((s.sends or s.receives)[0]))


def in_order(names: Iterable[str]) -> list[str]:
    """The messages among `names`, each once, in the order of the vocabulary."""
    present = set(names)
    return [name for name in vocabulary() if name in present]


def _imported(tree: ast.Module) -> dict[str, str]:
    """How a module spells each message: an event may bear the name of one, and is not it."""
    spelled: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "epd.messages":
            spelled |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "epd":
            for alias in node.names:
                if alias.name == "messages":
                    prefix = alias.asname or alias.name
                    spelled |= {f"{prefix}.{name}": name for name in vocabulary()}
    return spelled


def _received(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in part.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("receives"):
                    yield from (ast.unparse(argument) for argument in mark.args)


def _built(node: ast.ClassDef) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name | ast.Attribute):
            yield ast.unparse(part.func)


def message_graph(found: list[Speaker]) -> Graph:
    """Senders to handlers; what one class sends to its like at another instance stays on it."""
    edges = []
    for source in found:
        for target in found:
            names = [name for name in source.sends if name in target.receives]
            if names:
                edges.append(
                    GraphEdge(source.name, target.name, tuple(Label(name) for name in names))
                )
    nodes = tuple(GraphNode(s.name, s.about) for s in found)
    legend = (("message", "what is sent"), ("stays", "to the same role of another instance"))
    return Graph("MESSAGES", "which role sends and which role handles", nodes, tuple(edges), legend)


def message_page(found: list[Speaker]) -> str:
    rows = []
    for name, kind in vocabulary().items():
        sends = ", ".join(f"`{s.name}`" for s in found if name in s.sends)
        handles = ", ".join(f"`{s.name}`" for s in found if name in s.receives)
        rows.append([f"`{name}`", sends or "nobody", handles or "nobody", meaning(kind)])
    parts = [NOTICE, "# Messages: which role sends and which role handles each", _HOW_TO_READ]
    if found:
        parts.append("![messages as a rail map](messages.svg)")
    parts.append(markdown_table(["Message", "Sent by", "Handled by", ""], rows))
    return "\n\n".join(parts) + "\n"
