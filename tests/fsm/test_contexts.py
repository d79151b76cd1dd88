"""Only a machine writes itself: what its context holds is written by actions of rows, in `epd.fsm`.

Read from the source, without types: an attribute that bears the name of a field of any context
counts, whoever has it, unless it is an attribute of `self` in a class that is no machine.  Counted
are assignments, `del`, `setattr`, and calls and subscripts that change the value in place, also by
a local name for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.fsm.tables import KINDS

ROOT = Path(__file__).parents[2] / "epd"
FIELDS = {
    name
    for kind in KINDS
    for base in type(kind.make()).__mro__
    for name in base.__dict__.get("__slots__", ())
}
CHANGES = frozenset(
    "add append appendleft clear discard extend extendleft insert move_to_end pop popitem popleft "
    "remove reverse setdefault sort subtract update difference_update intersection_update "
    "symmetric_difference_update __setitem__ __delitem__ __setattr__".split()
)
# These import no machine and are handed none (tests/test_imports.py).
WITHOUT = ("api", "engine", "families", "media_files", "model_files", "transport")
# Fields of other objects that bear such a name.
OTHERS = {
    "cli/ask/client.py answer.finish_reason": "what a client has read of an answer",
    "roles/prefill/held_prompts.py self._requests.num_held": "a count of the role",
    "roles/prefill/role.py record.rows": "the role's record of a request",
    "roles/prefill/role.py self._requests.record(request).rows": "likewise",
    "roles/encode/row_tiers.py self._stored.failures": "counts of a storage",
    "roles/timers.py timer.owner": "an entry of the heap",
    "runtime/logs.py setattr(record, _FIELDS, {'lines': num_lost})": "a record of the log",
    "groups/processes.py self._ranks[number].asked": "what a rank has been asked",
    "groups/processes.py its.asked": "likewise",
    "scheduling/backlog.py attempt.images": "the books of the gateway",
}


class Writes(ast.NodeVisitor):
    """Of one file; `of_self`: those of a context's own method."""

    def __init__(self, *, of_self: bool = False) -> None:
        self._of_self = of_self
        self.found: list[tuple[int, str]] = []
        self._names: dict[str, str] = {}  # local names for values of fields

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._names = self._names, dict(self._names)
        self.generic_visit(node)
        self._names = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _field(self, node: ast.expr) -> str:
        """`request.steps` of a field of a context, or of a local name for it; empty: neither."""
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        is_field = isinstance(node, ast.Attribute) and node.attr in FIELDS
        is_own = is_field and isinstance(node.value, ast.Name) and node.value.id == "self"
        return ast.unparse(node) if is_field and is_own == self._of_self else ""

    def _note(self, node: ast.AST, what: str) -> None:
        if what:
            self.found.append((node.lineno, what))  # type: ignore[attr-defined]

    def _write(self, target: ast.expr) -> None:
        for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(part, ast.Tuple | ast.List | ast.Starred):
                self._write(part.value if isinstance(part, ast.Starred) else part)
            elif not isinstance(part, ast.Name):
                self._note(part, self._field(part))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._write(target)
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self._names[name.id] = self._field(value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note(node, self._field(node.target))
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._write(node.target)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._names[node.target.id] = self._field(node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._write(node.target)
        self.generic_visit(node)

    visit_AsyncFor = visit_For  # noqa: N815

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self._write(item.optional_vars)
        self.generic_visit(node)

    visit_AsyncWith = visit_With  # noqa: N815

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._write(target)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in CHANGES:
            self._note(node, self._field(called.value))
        if isinstance(called, ast.Name) and called.id in ("setattr", "delattr"):
            who, name = node.args[:2]
            is_own = isinstance(who, ast.Name) and who.id == "self"
            is_other = isinstance(name, ast.Constant) and name.value not in FIELDS
            self._note(node, "" if is_own or is_other else ast.unparse(node))
        self.generic_visit(node)


def writes_in(source: str) -> Iterator[tuple[int, str]]:
    visitor = Writes()
    visitor.visit(ast.parse(source))
    yield from visitor.found


@cache
def writes() -> list[str]:
    """Of all files that may have a machine, outside `epd.fsm`."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] not in ("fsm", *WITHOUT) and name.parts[:2] != ("groups", "device"):
            found += [f"{name} {what}" for _, what in writes_in(path.read_text())]
    return found


def test_contexts_are_written_by_actions_of_rows_alone() -> None:
    assert [what for what in writes() if what not in OTHERS] == []


def test_what_is_excepted_is_there() -> None:
    assert sorted(set(OTHERS)) == sorted({what for what in writes() if what in OTHERS})


def methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Of all classes in `epd.fsm` that are machines."""
    machines = {base.__name__ for kind in KINDS for base in type(kind.make()).__mro__}
    for path in sorted((ROOT / "fsm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name in machines:
                functions = (part for part in node.body if isinstance(part, ast.FunctionDef))
                yield from ((node.name, function) for function in functions)


def test_contexts_have_no_methods_that_write() -> None:
    """Nor setters: `fire` is the one way in, besides a machine's birth."""
    ways_in = {("Machine", "__init__"), ("Machine", "fire")}
    for owner, function in methods():
        own = Writes(of_self=True)
        own.visit(function)
        is_born = function.name == "__init__"
        assert is_born or (owner, function.name) in ways_in or not own.found, (owner, own.found)
        assert not any("setter" in ast.unparse(mark) for mark in function.decorator_list)


@pytest.mark.parametrize(
    "source",
    [
        "request.missing = set()",
        "request.missing |= {1}",
        "self.request.missing.add(room)",
        "one, request.missing = two",
        "request.output[0] = token",
        "del request.output[:1]",
        "output = request.output\noutput.append(token)",
        "one, output = two, request.output\noutput += [token]",
        "if output := request.output:\n    output.clear()",
        "def f(request):\n    output = request.output\n    output[1] = 2",
        "setattr(request, 'missing', set())",
        "setattr(request, name, set())",
        "for request.missing in rooms: pass",
        "with room as request.missing: pass",
        "request.failures.setdefault(kind, 0)",
    ],
)
def test_a_write_is_found(source: str) -> None:
    assert list(writes_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "self.missing = set()",
        "missing = set(request.missing)\nmissing.add(1)",
        "request.other = 1",
        "setattr(request, 'other', 1)",
        "output = request.output\noutput = []\noutput.append(1)",
        "if request.missing == 1: pass",
    ],
)
def test_what_is_no_write_is_not(source: str) -> None:
    assert not list(writes_in(source))
