"""Equal plans give equal traces, in other processes, under other hash seeds; and nothing in roles,
fsm and scheduling can break that."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
from epd.sim.drills import by_name
from epd.sim.run import run
from epd.sim.swarm import draw_plan
plans = [draw_plan(11), draw_plan(132), by_name("slow-bytes").plan(3)]
print([run(plan).digest for plan in plans])
"""


def digests(hash_seed: str, python: str = sys.executable) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
    command = [python, "-W", "ignore", "-c", SCRIPT]
    found = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def test_digests_are_equal_over_hash_seeds() -> None:
    assert digests("1") == digests("4711")


@pytest.mark.parametrize("name", ["python3.12", "python3.13"])
def test_digests_are_equal_over_python_versions(name: str) -> None:
    python = shutil.which(name)
    probe = "import msgspec, transitions"
    if python is None or subprocess.call([python, "-c", probe], stderr=subprocess.DEVNULL):
        pytest.skip(f"{name} with msgspec and transitions is not installed")
    assert digests("1") == digests("2", python)


FORBIDDEN_IMPORTS = {"time", "random", "uuid", "secrets", "threading", "datetime"}
FORBIDDEN_CALLS = {"TaskGroup", "as_completed", "to_thread", "get_event_loop", "id"}
DETERMINISTIC = ("epd/roles", "epd/fsm", "epd/scheduling")
SOURCES = sorted(path for area in DETERMINISTIC for path in (ROOT / area).rglob("*.py"))


def problems(tree: ast.AST) -> list[str]:
    """What would make two runs differ: clocks, randomness, addresses, sets in order of hashes."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else modules
            found += [f"{node.lineno}: imports {m}" for m in modules if m in FORBIDDEN_IMPORTS]
        if isinstance(node, ast.Call) and _called(node) in FORBIDDEN_CALLS:
            found.append(f"{node.lineno}: calls {_called(node)}")
        if isinstance(node, ast.For | ast.comprehension) and _is_set(node.iter):
            found.append(f"{node.iter.lineno}: iterates a set: sort it")
    return found


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_set(node: ast.expr) -> bool:
    made = isinstance(node, ast.Call) and _called(node) in ("set", "frozenset")
    return made or isinstance(node, ast.Set | ast.SetComp)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_undetermined(path: Path) -> None:
    assert problems(ast.parse(path.read_text())) == []


def test_the_lint_finds_what_it_is_for() -> None:
    planted = "import time\nfrom random import random\nfor x in {1, 2}: id(x)\nasyncio.TaskGroup()"
    assert len(problems(ast.parse(planted))) == 5
