"""How much of `epd` a small cluster imports (docs/architecture.md, section 3 has the number).

What a module imports at its top is read from its syntax, beginning at `BEGINNINGS`: those that a
function imports which `1e1p1d` of the bundled model calls on a CPU.  A long test compares that with
what its processes have loaded, so that a beginning that is missing, or is none any more, shows.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import COLD, serving
from tests.test_imports import FOLDERS, ROOT, module_name

MAX_LINES = 50_900
BEGINNINGS = (
    "epd.cli.main",
    "epd.cli.start.plan",
    "epd.cli.start.preflight",
    "epd.cli.start.supervisor",
    "epd.cli.verbs.run",
    "epd.engine.device.self_test",
    "epd.engine.factory",
    "epd.engine.kernels.torch_ops",
    "epd.engine.preload",
    "epd.families.qwen_vl.adapter",
    "epd.families.qwen_vl.sizes",
    *(f"epd.families.{name}" for name in FOLDERS),
    "epd.groups.device.shared_rows",
    "epd.runtime.child",
    "epd.runtime.front",
    "epd.runtime.zygote",
    "epd.tiny",
    "epd.transport.shm.backend",
)
# Python asks it for each module that is loaded, before it is; forks have it, too.
PROBE = """
import os, sys
class Probe:
    def find_spec(self, name, path=None, target=None):
        with open(os.environ["EPD_IMPORTED"], "a") as out:
            out.write(name + "\\n")
sys.meta_path.insert(0, Probe())
"""
PLACE = re.compile(r"epd(\.\w+)+:\w+")
MODULES = {module_name(path): path for path in (ROOT / "epd").rglob("*.py")}


def at_the_top(body: list[ast.stmt]) -> Iterator[str]:
    """Names that are imported when a module is, each with the packages that it lies in."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from at_the_top([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            yield from at_the_top(node.body)


def imported() -> set[Path]:
    found: set[str] = set()
    names = list(BEGINNINGS)
    while names:
        parts = names.pop().split(".")
        for module in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} - found:
            if module in MODULES:
                found.add(module)
                names += at_the_top(ast.parse(MODULES[module].read_text()).body)
    return {MODULES[module] for module in found}


def test_a_small_cluster_imports_little() -> None:
    num_lines = sum(path.read_text().count("\n") for path in imported())
    assert num_lines <= MAX_LINES
    page = (ROOT / "docs" / "architecture.md").read_text()
    (said,) = re.findall(r"imports ([\d,]+) lines", page)
    assert abs(int(said.replace(",", "")) - num_lines) < 500


def test_what_is_imported_later_exists() -> None:
    """A start would have found a wrong name; the first use may be a year behind it."""
    trees = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
    places = [
        node.value.partition(":")[::2]
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and PLACE.fullmatch(str(node.value))
    ]
    assert len(places) > 20
    for module, name in places:
        assert name in {getattr(node, "name", "") for node in trees[module].body}, (module, name)


@pytest.mark.long
def test_its_processes_import_just_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a zygote of their own: that of a test run began without the probe, or keeps it."""
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(PROBE)
    monkeypatch.setenv("EPD_IMPORTED", str(seen))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    with serving("1e1p1d", program=COLD) as server:
        image = next(MODULES["epd.tiny"].parent.rglob("samples/receipt-cafe.png"))
        ask = ("-m", "epd", "ask", "What is the total?", "--image", image)
        subprocess.run(
            [sys.executable, *ask, "--url", server.base_url],
            check=True,
            env=os.environ | {"EPD_IMPORTED": os.devnull},
        )
    found = {MODULES[name] for name in seen.read_text().split() if name in MODULES}
    found.discard(ROOT / "epd" / "__main__.py")
    assert {str(p.relative_to(ROOT)) for p in found} == {
        str(p.relative_to(ROOT)) for p in imported()
    }
