"""How changed source gets in: served to whoever imports the module, or put into its live functions.

No file is edited.  A change within a function is planted into a process that has imported all and
collected all tests: its code is exchanged, which takes no time.  A change of what importing runs
(tables, constants, defaults) needs a process that has not imported the module yet.
"""

from __future__ import annotations

import ast
import gc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType

from tests.mutation.mutants import ROOT, Mutant

Where = tuple[str, str, int]  # file, qualified name and first line of a function


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        super().__init__(name, path)
        self._tree = tree

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self.path, "exec", dont_inherit=True)


class Importer:
    """Serves changed syntax for some modules; put it first into `sys.meta_path`."""

    def __init__(self, tree_of: Callable[[str], ast.Module | None]) -> None:
        """`tree_of`: the syntax for a path from the root of the repository, or None: as it is."""
        self._tree_of = tree_of

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in {"epd", "epd_lab", "tests"}:
            return None
        stem = ROOT / name.replace(".", "/")
        package, module = stem / "__init__.py", stem.with_suffix(".py")
        file = package if package.is_file() else module
        tree = self._tree_of(file.relative_to(ROOT).as_posix()) if file.is_file() else None
        if tree is None:
            return None
        loader = _Loader(name, str(file), tree)
        where = [str(stem)] if file == package else None
        return importlib.util.spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=where
        )


def serve(mutant: Mutant) -> None:
    """For this process; what the mutant changes must not be imported yet."""
    assert mutant.module not in sys.modules
    tree = mutant.tree()
    sys.meta_path.insert(0, Importer(lambda path: tree if path == mutant.path else None))


def functions(modules: list[str]) -> dict[Where, list[FunctionType]]:
    """The live functions of modules, given by name, by where they were written."""
    wanted, found = set(modules), dict[Where, list[FunctionType]]()
    gc.unfreeze()  # what collecting has imported is kept from garbage collections, and from here
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__module__ in wanted:  # asking more runs code
            found.setdefault(_where(thing.__code__), []).append(thing)
    gc.freeze()
    return found


def exchangeable(mutant: Mutant) -> bool:
    """Whether a live function can take the mutant's code: it is in one, and of the same form."""
    if not mutant.in_body:
        return False
    was, becomes = _outermost(mutant, mutant.original()), _outermost(mutant, mutant.tree())
    return was.co_freevars == becomes.co_freevars


def exchange(mutant: Mutant, live: dict[Where, list[FunctionType]]) -> None:
    """Give live functions the mutant's code."""
    code = _outermost(mutant, mutant.tree())
    for function in live[_where(code)]:
        function.__code__ = code


def _where(code: CodeType) -> Where:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _outermost(mutant: Mutant, tree: ast.Module) -> CodeType:
    """The code of the first function on the way from the module to the change."""
    node: ast.AST = tree
    for field, index in mutant.steps:
        child = getattr(node, field)
        node = child if index is None else child[index]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            break
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    whole = compile(tree, str(ROOT / mutant.path), "exec", dont_inherit=True)
    for code in _codes(whole):
        if code.co_name == node.name and code.co_firstlineno == first:
            return code
    raise LookupError(f"{mutant.key}: no code of {node.name} in line {first}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
