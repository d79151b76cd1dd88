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

from tests.e2e.server import serving, wait_for
from tests.patience import PATIENCE_S
from tests.test_imports import FOLDERS, ROOT, module_name

MAX_LINES = 43_400
BEGINNINGS = (
    "epd.cli.main",
    "epd.cli.start.plan",
    "epd.cli.start.preflight",
    "epd.cli.start.supervisor",
    "epd.cli.verbs.run",
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
PROBE = """
import os, sys, threading, time
def watch():
    while True:
        time.sleep(0.5)
        modules = [module for name, module in list(sys.modules.items()) if name[:3] == "epd"]
        files = {getattr(module, "__file__", None) for module in modules}
        with open(os.path.join(os.environ["EPD_IMPORTED"], str(os.getpid())), "w") as out:
            out.write("\\n".join(filter(None, files)))
def start():
    threading.Thread(target=watch, daemon=True).start()
os.register_at_fork(after_in_child=start)
start()
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
    probe, seen = tmp_path / "probe", tmp_path / "seen"
    probe.mkdir()
    seen.mkdir()
    (probe / "sitecustomize.py").write_text(PROBE)
    monkeypatch.setenv("EPD_IMPORTED", str(seen))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(probe), str(ROOT)]))
    with serving("1e1p1d") as server:
        image = next(MODULES["epd.tiny"].parent.rglob("samples/receipt-cafe.png"))
        ask = (
            *("-m", "epd", "ask", "What is the total?"),
            "--image",
            image,
            "--url",
            server.base_url,
        )
        subprocess.run(
            [sys.executable, *ask], check=True, env=os.environ | {"EPD_IMPORTED": "/tmp"}
        )
        for process in server.processes():
            file = seen / str(process.pid)
            # One that was forked just now writes its list within a second, or is over.
            wait_for(lambda: file.exists() or not process.is_running(), PATIENCE_S, "its list")  # noqa: B023 - within this turn
    found = {Path(line) for file in seen.iterdir() for line in file.read_text().splitlines()}
    assert {str(p.relative_to(ROOT)) for p in found} == {
        str(p.relative_to(ROOT)) for p in imported()
    }
