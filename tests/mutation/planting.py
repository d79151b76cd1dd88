"""How changed source gets in: served to the process that imports the module; no file is edited."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import CodeType, ModuleType

from tests.mutation.mutants import ROOT, Mutant


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
