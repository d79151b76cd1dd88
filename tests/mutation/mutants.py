"""All mutants of some modules: found in the syntax, named so that a name outlives other changes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutation.operators import ANYWHERE, IN_FUNCTIONS, Change, is_logging

ROOT = Path(__file__).parent.parent.parent
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
SILENT = {"__repr__", "__str__"}  # only readers see them

Step = tuple[str, int | None]  # a field of a node, and the place in it if it is a list


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted slip.  `function`: where, outermost first; empty at module or class level."""

    path: str  # from the root of the repository
    line: int
    statement: int  # the line of the statement around it
    function: str
    operator: str
    before: str
    after: str
    number: int  # of those that read alike in one function
    steps: tuple[Step, ...]  # the way from the module to the node
    replacement: ast.AST
    in_body: bool  # of a function, so that importing the module does not run it

    @property
    def key(self) -> str:
        """Its name, as long as its function and its text stay."""
        number = f" #{self.number}" if self.number else ""
        return f"{self.path}:{self.function}: {self.before} -> {self.after}{number}"

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        return self.path.rpartition("/")[0]

    def __str__(self) -> str:
        text = f"{self.path}:{self.line}: {self.operator}: {self.before}  ->  {self.after}"
        return f"{text}  (in {self.function or 'the module'})"

    def original(self) -> ast.Module:
        return ast.parse((ROOT / self.path).read_text(encoding="utf-8"), self.path)

    def tree(self) -> ast.Module:
        """The module's syntax with the slip in it."""
        tree = self.original()
        node: ast.AST = tree
        for field, index in self.steps[:-1]:
            child = getattr(node, field)
            node = child if index is None else child[index]
        field, index = self.steps[-1]
        here = getattr(node, field)
        was = here if index is None else here[index]
        new = ast.copy_location(self.replacement, was)
        if index is None:
            setattr(node, field, new)
        else:
            here[index] = new
        return ast.fix_missing_locations(tree)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the walk is."""

    node: ast.AST
    parent: ast.AST
    steps: tuple[Step, ...]
    names: tuple[str, ...]  # of classes and functions around it
    in_body: bool  # of a function
    line: int
    statement: int


def of_modules(targets: tuple[str, ...]) -> list[Mutant]:
    """Of all modules below these paths, in order."""
    return [mutant for path in modules(targets) for mutant in of_module(path)]


def modules(targets: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for target in targets:
        whole = ROOT / target
        files = sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
        found += [file.relative_to(ROOT).as_posix() for file in files]
    return found


@cache
def of_module(path: str) -> tuple[Mutant, ...]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"), path)
    alike: Counter[tuple[str, str, str]] = Counter()
    found: list[Mutant] = []
    for place in _walk(_Place(tree, tree, (), (), False, 1, 1)):
        operators = IN_FUNCTIONS if place.in_body else ANYWHERE
        for name, operator in operators.items():
            changes = operator(place.node, place.parent)
            found += [_mutant(path, place, name, change, alike) for change in changes]
    return tuple(found)


def _mutant(
    path: str, place: _Place, operator: str, change: Change, alike: Counter[tuple[str, str, str]]
) -> Mutant:
    function = ".".join(place.names)
    before, after = " ".join(change.before.split()), " ".join(change.after.split())
    what = (function, before, after)
    number = alike[what]
    alike[what] += 1
    return Mutant(
        path,
        getattr(place.node, "lineno", place.line),
        place.statement,
        function,
        operator,
        before,
        after,
        number,
        place.steps,
        change.replacement,
        place.in_body or isinstance(place.node, FUNCTION),
    )


def _walk(place: _Place) -> Iterator[_Place]:
    node = place.node
    if place.steps:
        yield place
    for field, index, child in _children(node):
        if _is_left_out(node, field, child):
            continue
        names, line = place.names, getattr(child, "lineno", place.line)
        statement = line if isinstance(child, ast.stmt) else place.statement
        if isinstance(child, (*FUNCTION, ast.ClassDef)):
            names = (*names, child.name)
        if isinstance(child, FUNCTION):  # what changes it as a whole is seen when its body runs
            statement = body_of(child)[0].lineno
        in_body = place.in_body or (isinstance(node, FUNCTION) and field == "body")
        steps = (*place.steps, (field, index))
        yield from _walk(_Place(child, node, steps, names, in_body, line, statement))


def body_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """Its statements without the docstring, if there are others."""
    documented = ast.get_docstring(function, clean=False) is not None
    return function.body[1:] if documented and len(function.body) > 1 else function.body


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            yield field, None, value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield field, index, item


def _is_left_out(node: ast.AST, field: str, child: ast.AST) -> bool:
    """What no run shows: annotations, texts for readers, what a decorator is told."""
    if field in {"annotation", "returns", "decorator_list", "bases"}:
        return True
    if isinstance(child, ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom):
        return True
    if isinstance(child, FUNCTION) and child.name in SILENT:
        return True
    if isinstance(node, ast.Raise):
        return True
    if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
        return True
    return isinstance(child, ast.Expr) and (
        isinstance(child.value, ast.Constant) or is_logging(child.value)
    )
